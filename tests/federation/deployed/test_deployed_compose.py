"""`deploy/compose.yaml` does what it says, short of Docker: its commands run as they stand, side by side."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deployed_harness import FAST, wait_for

from federation_harness import make, small_config
from free_ports import free_ports
from trilemma.federation.operations import deployment
from trilemma.federation.processes import groups as processes
from trilemma.federation.server.commits import CommitLog

pytestmark = [pytest.mark.federation, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
CLIENTS = 2
"""Of the five in the file: what one of them does all do."""


def trilemma_federation(*arguments: str) -> tuple[str, ...]:
    """The image's entry point."""
    return (sys.executable, "-c", "from trilemma.cli import main; main()", "federation", *arguments)


def service_command(service: dict, folder: Path) -> tuple[str, ...]:
    """The command of a service, with the paths it sees replaced by those that are mounted there."""
    (volume,) = service["volumes"]
    outside, inside = volume.split(":")
    mounted = folder / Path(outside).relative_to("federation")
    return trilemma_federation(*(str(mounted) if part == inside else part for part in service["command"]))


def test_the_services_are_a_federation_and_stop_when_told(tmp_path):
    yaml = pytest.importorskip("yaml", reason="reads a compose file")
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    some = ["server", *(f"client-{number}" for number in range(CLIENTS))]
    folder = tmp_path / "federation"
    parties = make(
        folder, CLIENTS, small_config(CLIENTS, tolerate=0, rounds=2), timing=FAST, port=free_ports(1)
    )
    with contextlib.ExitStack() as running:
        running.callback(deployment.down, folder)
        attached = [
            running.enter_context(
                subprocess.Popen(service_command(service, folder), stdout=subprocess.DEVNULL)
            )
            for service in (services[name] for name in some)
        ]
        running.callback(lambda: [one.kill() for one in attached])
        wait_for(lambda: all(party.ready.exists() for party in parties), 240.0)
        run = trilemma_federation("run", str(folder / "server"), "--limit", "240")
        subprocess.run(run, check=True, timeout=300, stdout=subprocess.DEVNULL)
        assert len(CommitLog(parties[0].run_folder("default")).records()) == 2
        for one in attached:
            one.send_signal(signal.SIGTERM)
        assert [one.wait(timeout=120) for one in attached] == [0] * len(some)
        left = [processes.recorded(party.running) for party in parties]
        assert not any(left), "a container that is stopped leaves nothing running"

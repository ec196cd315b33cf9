"""Flower's own programs run the adapter: a SuperLink, a SuperNode for each client, and `flwr run`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest
import tomli_w

from federation_harness import PRIVATE, make, result_of, small_config
from free_ports import free_ports
from trilemma.federation.client.account import own_statement
from trilemma.federation.party.public_facts import Timing
from trilemma.federation.server.commits import CommitLog

pytest.importorskip("flwr.serverapp", reason="Flower is not installed: pip install 'trilemma[flower]'")

CLIENTS, ROUNDS, LIMIT = 2, 1, 200.0

APP = {
    "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
    "project": {"name": "a-federation", "version": "1.0.0", "license": "Apache-2.0", "dependencies": []},
    "tool": {
        "flwr": {
            "app": {
                "publisher": "somebody",
                "components": {"serverapp": "app:server_app", "clientapp": "app:client_app"},
                "config": {"trilemma-folder": "", "trilemma-run": "default"},
            }
        }
    },
}
NAMES = """from trilemma.flower import client_app, server_app

__all__ = ["client_app", "server_app"]
"""
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
TIMING = Timing(round_limit=120.0, join_limit=120.0, poll=0.5)


def program(name: str) -> str:
    """One of Flower's commands, of the environment that tests run in."""
    return str(Path(sys.executable).with_name(name))


def ended(process: subprocess.Popen[bytes]) -> None:
    """Take a program down, with what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.federation
def test_flowers_own_programs_run_a_federation(tmp_path):
    parties = make(
        tmp_path / "federation",
        CLIENTS,
        small_config(CLIENTS, *PRIVATE, tolerate=0, rounds=ROUNDS),
        budget=1e9,
        timing=TIMING,
    )
    link = free_ports(CLIENTS)
    ports = range(link + 1, link + 1 + CLIENTS)
    app, home = tmp_path / "app", tmp_path / "home"
    app.mkdir()
    home.mkdir()
    (app / "pyproject.toml").write_text(tomli_w.dumps(APP))
    (app / "app.py").write_text(NAMES)
    known = {"default": "here", "here": {"address": f"127.0.0.1:{link}", "insecure": True}}
    (home / "config.toml").write_text(tomli_w.dumps({"superlink": known}))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path}
    with contextlib.ExitStack() as stack:

        def start(*command: str) -> None:
            log = stack.enter_context((tmp_path / f"{len(list(tmp_path.iterdir()))}.log").open("wb"))
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=tmp_path
            )
            stack.callback(ended, process)

        own = "--disable-runtime-dependency-installation"
        start(program("flower-superlink"), "--insecure", "--port", str(link), own)
        for party, port in zip(parties[1:], ports, strict=True):
            node = f'trilemma-folder="{party.folder}"'
            there = ("--superlink", f"127.0.0.1:{link}", "--port", str(port), "--node-config", node)
            start(program("flower-supernode"), "--insecure", *there)
            start(sys.executable, "-m", "trilemma.flower", str(party.folder))
        folder = f'trilemma-folder="{parties[0].folder}"'
        deadline, said = time.monotonic() + LIMIT, ""
        for _ in range(10):
            run = subprocess.run(
                [program("flwr"), "run", str(app), "here", "--run-config", folder],
                env=environment,
                capture_output=True,
                text=True,
                cwd=tmp_path,
                timeout=60,
                check=False,
            )
            if run.returncode == 0:
                break
            said = run.stdout + run.stderr
            time.sleep(1.0)  # the SuperLink starts
        else:
            pytest.fail(said)
        result = parties[0].run_folder("default") / "result"
        while not result.exists() and time.monotonic() < deadline:
            time.sleep(0.5)
        logs = "".join(path.read_text()[-4000:] for path in sorted(tmp_path.glob("*.log")))
        assert result.exists(), logs
    records = CommitLog(parties[0].run_folder("default")).records()
    assert [sorted(record["weights"]) for record in records] == [["0", "1"]] * ROUNDS
    assert result_of(parties, "default")
    for party in parties[1:]:
        assert len(own_statement(party).entries) == ROUNDS
        assert any(
            "no guarantee against a malicious server" in one.text for one in own_statement(party).remarks
        )


def newest_minors(count: int) -> list[str]:
    """The newest release of each of Flower's newest minors, as the package index has them."""
    asked = [sys.executable, "-m", "pip", "index", "versions", "flwr"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False)
    _, _, listed = said.stdout.partition("Available versions:")
    newest: dict[str, str] = {}
    for version in listed.split("\n")[0].replace(",", " ").split():
        newest.setdefault(version.rpartition(".")[0], version)
    return list(newest.values())[:count]


@pytest.mark.nightly
def test_the_two_newest_minors_of_flower_carry_it_too(tmp_path):
    """Each in an environment of its own that shares all else with this one: torch, and what Flower needs.

    Flower pins that more narrowly than it needs it.
    """
    versions = newest_minors(2)
    if not versions:
        pytest.skip("no package index with flwr can be reached from here")
    here, shared = Path(__file__).parent, sysconfig.get_path("purelib")
    tests = [str(here / name) for name in ("test_carrier_flower.py", Path(__file__).name)]
    for version in versions:
        folder = tmp_path / version
        venv.create(folder, with_pip=True)
        python = folder / "bin" / "python"
        (own,) = (folder / "lib").glob("python3*/site-packages")
        (own / "shared.pth").write_text(f"{shared}\n")  # after what is its own
        pip = [python, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed"]
        subprocess.run([*pip, f"flwr=={version}"], check=True)
        only = ["-k", "not two_newest", "-p", "no:cacheprovider", "-q"]
        done = subprocess.run(
            [python, "-m", "pytest", *only, *tests], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"flwr {version}:\n{done.stdout[-4000:]}"

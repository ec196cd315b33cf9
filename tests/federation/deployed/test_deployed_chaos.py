"""Chaos: any process is killed, again and again, and the run ends as if nothing had happened.

    TRILEMMA_CHAOS=120 pytest tests/federation/deployed/test_deployed_chaos.py      seconds of it; without: 20

Every 1 to 4 seconds kill -9 meets some process of a federation in the middle of its rounds; now and then the
one that starts the others again, for which the test does what systemd would. Victims and pauses follow from a
seed (TRILEMMA_CHAOS_SEED), and the list of kills is printed. The model is what follows from the messages that
were heard, and where nobody dropped out that of an undisturbed run, to the bit. Whoever is killed in the
middle of a round drops out of it: silent, or refusing the round that it has lost; in a long chaos there is a
second run in which only the server's processes are.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from deployed_harness import Real

from federation_harness import Direct, coordinator, dropped_out, make, result_of, share_seeds, small_config
from free_ports import free_ports
from trilemma.base.errors import UserError
from trilemma.federation.client.spending import reach
from trilemma.federation.operations import deployment
from trilemma.federation.party.layout import parties
from trilemma.federation.party.public_facts import Timing
from trilemma.federation.party.task import load_task
from trilemma.federation.processes import groups as processes
from trilemma.federation.server.replay import replay
from trilemma.federation.server.under_way import run_under_way

pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.timeout(900)]

SECONDS = float(os.environ.get("TRILEMMA_CHAOS", "20"))
SEED = int(os.environ.get("TRILEMMA_CHAOS_SEED", "1"))
CLIENTS = 3
TIMING = Timing(round_limit=10.0, join_limit=40.0, poll=0.2)
LDP = (
    "algorithm.name=cafcor",
    "aggregation.rule=caf",
    "privacy.threat=ldp",
    "privacy.clip=0.1",
    "privacy.sigma_ind=2.0",  # with less no budget reaches to the end of a long chaos
)


class Chaos:
    """A federation that is attended by a process of its own, and whoever kills."""

    def __init__(self, real: Real) -> None:
        self.real, self.random = real, random.Random(SEED)
        self.attendant: subprocess.Popen | None = None
        self.kills: list[str] = []

    def attend(self) -> None:
        """Do what systemd would: start `up --attach`, or start it again when it ended."""
        if self.attendant is None or self.attendant.poll() is not None:
            command = (
                sys.executable,
                "-m",
                "trilemma",
                "federation",
                "up",
                str(self.real.folder),
                "--attach",
            )
            with (self.real.folder / "attendant.log").open("ab") as log:
                self.attendant = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def kill(self, whose: Callable[[str], bool]) -> None:
        """Kill -9 a process of those parties; the attendant is one of the server's."""
        found = [
            (party.name, one)
            for party in parties(self.real.folder)
            for one in processes.recorded(party.running)
            if whose(party.name) and processes.leads(one)
        ]
        moment = f"{time.monotonic() - self.began:5.1f} s"
        if not found or self.random.random() < 0.1:
            self.attendant.kill()
            self.attendant.wait(60)
            self.kills.append(f"{moment} attendant")
            return
        name, one = self.random.choice(found)
        with suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
        self.kills.append(f"{moment} {name}")

    def run(self, name: str, whose: Callable[[str], bool], limit: float = 240.0) -> None:
        """Run to the end while processes are killed for a while; an operator looks after it."""
        log = self.real.log(name)
        self.began = time.monotonic()
        next_kill = self.began
        while not (log.result.is_file() and run_under_way(self.real.server) is None):
            now = time.monotonic()
            assert now - self.began < SECONDS + limit, f"{self.kills}\n{self.real.said(40)}"
            self.attend()
            if not log.records() and not self.kills:
                next_kill = self.began = now  # it begins when the run has
            if now >= next_kill and now - self.began < SECONDS:
                self.kill(whose)
                next_kill = now + self.random.uniform(1.0, 4.0)
            if run_under_way(self.real.server) is None and not log.result.is_file():
                with suppress(UserError, TimeoutError):
                    self.real.start(name)  # the first time, or it gave up
            time.sleep(0.3)
        print(
            f"{name}: {len(log.records())} rounds, {time.monotonic() - self.began:.0f} s, killed:",
            *self.kills,
            sep="\n  ",
        )


@pytest.mark.parametrize(
    "whose",
    [
        "anybody",
        pytest.param("server", marks=pytest.mark.skipif(SECONDS < 60, reason="`make chaos` does it")),
    ],
)
def test_any_process_is_killed_and_the_run_ends_as_it_should(tmp_path: Path, whose):
    rounds = int(8 * SECONDS)
    config = small_config(CLIENTS, *LDP, rounds=rounds)
    folder = tmp_path / "federation"
    everybody = make(folder, CLIENTS, config, budget=1e9, transcript=True, timing=TIMING, port=free_ports(1))
    share_seeds(everybody, config)
    assert reach(everybody[1], load_task(everybody[1]), "chaos").ends
    shutil.copytree(folder, tmp_path / "undisturbed")
    chaos = Chaos(Real(folder, everybody))
    try:
        chaos.run("chaos", lambda name: whose in ("anybody", name))
    finally:
        if chaos.attendant is not None:
            chaos.attendant.kill()
        deployment.down(folder, grace=2.0)
    assert not any(processes.recorded(party.running) for party in everybody)
    records = chaos.real.log("chaos").records()
    assert [record["round"] for record in records] == list(range(1, rounds + 1))
    assert any(kill.split()[-1] != "attendant" for kill in chaos.kills)
    params = result_of(everybody, "chaos")["params"]
    assert torch.equal(params, replay(everybody[0], "chaos").broadcast["params"])
    dropped = dropped_out(records)
    if not dropped:
        undisturbed = parties(tmp_path / "undisturbed")
        coordinator(undisturbed, Direct(undisturbed), "chaos")[0].go()
        assert torch.equal(params, result_of(undisturbed, "chaos")["params"])
    assert whose == "anybody" or not dropped

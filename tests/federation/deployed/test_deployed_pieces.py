"""Messages in pieces between real processes; a client is killed in the middle of one."""

from __future__ import annotations

import os
import sys

import pytest
from deployed_harness import LIAR, real, wait_for

from federation_harness import check_against_simulation, share_seeds, small_config
from trilemma.federation.party.public_facts import Timing
from trilemma.federation.processes import groups as processes

pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.nightly]

CLIENTS, ROUNDS, PIECE = 3, 2, 4096
WIDE = ("model.name=mlp", "model.hidden=[64]", "data.holders=all")
"""4,546 parameters: a question is five pieces, and so is an answer."""


SHORT = f"""
from trilemma.federation.carriers.grpc import frames
frames.PIECE_BYTES = {PIECE}
from trilemma.federation.carriers.grpc import transfers
transfers.IN_MEMORY = 0
"""


@pytest.fixture
def short_pieces(monkeypatch, tmp_path):
    """Pieces of a few thousand bytes, in files, in every process that is started from here."""
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "sitecustomize.py").write_text(SHORT)
    path = [str(tmp_path / "short"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


def test_a_client_killed_in_the_middle_of_a_transfer_goes_on_where_it_stopped(tmp_path, short_pieces):
    """Nobody may be missing (f = 0): the run ends with everybody's messages, and is the simulation's."""
    config = small_config(CLIENTS, *WIDE, tolerate=0, rounds=ROUNDS)
    timing = Timing(round_limit=120.0, join_limit=60.0, poll=0.1)
    notes = tmp_path / "notes"
    with real(tmp_path / "federation", CLIENTS, config, timing=timing, transcript=True) as running:
        share_seeds(running.parties, config)
        victim = running.client(0)
        program = (sys.executable, str(LIAR), str(victim.folder), "dying", str(notes))
        running.restart(victim, (*program, "2"))
        running.start("pieces")
        process = running.process(victim)
        wait_for(lambda: notes.exists() and not processes.members(process), 240.0)
        arriving = list((victim.state / "arriving").iterdir())
        assert [path.stat().st_size for path in arriving] == [3 * PIECE]
        running.restart(victim, (*program, "-1"))
        assert running.wait("pieces", 600.0) == "completed", running.said(40)
        records = running.log("pieces").records()
        assert [record["absent"] for record in records] == [[]] * ROUNDS
        check_against_simulation(running.parties, config, "pieces")
        places = [int(line) for line in notes.read_text().split()]
    before, after = places[:3], places[3:]
    assert before == [0, 1, 2]
    assert after[:2] == [3, 4], f"what was there was sent again: {after}"

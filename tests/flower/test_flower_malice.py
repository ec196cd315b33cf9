"""A malicious server drives the nodes of a real federation, with real processes between them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from flower_harness import Real, real

from federation_harness import PRIVATE, small_config
from trilemma.federation import processes
from trilemma.federation.spending import read_budget
from trilemma.flower import deployment
from trilemma.privacy.ledger import Ledger

pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.nightly]

MALICIOUS = Path(__file__).with_name("flower_malicious.py")
REFUSALS = {
    "other terms": "terms",
    "same round, other model": "repeated",
    "wrong shape": "broadcast",
    "wrong type": "broadcast",
    "long": "block",
    "no such round": "round",
    "nothing": "repeated",
    "gibberish": "block",
    "an expulsion": "expulsions",
    "an older epoch": "epoch",
    "an older call": "epoch",
    **{f"broadcast {number}": "broadcast" for number in ("1e+30", "3e+38", "inf", "-inf", "nan")},
}
"""What is refused, and with which word of the catalogue."""
ANSWERED = ("first", "tiny", "minus nothing", "after that")
"""The rounds that are answered, each by everybody, and so the lines of every ledger."""


def change_worker(federation: Real, argv: tuple[str, ...] | None = None) -> None:
    """Give the server another worker, or its own again."""
    federation.kill(federation.server, "worker")
    honest = next(one for one in deployment.commands(federation.server) if one.name == "worker")
    processes.start(honest if argv is None else replace(honest, argv=argv), federation.server.running)


def test_whatever_a_server_says_real_nodes_pay_once_for_what_they_tell(tmp_path):
    """Every refusal comes back as its code; a round has one answer, paid for; nobody's process ends.

    (In one process `test_federation_malice.py` tries far more.)
    """
    where = tmp_path / "said.json"
    config = small_config(3, *PRIVATE, "privacy.sigma_ind=5", rounds=5)
    with real(tmp_path / "federation", 3, config, budget=1e6) as federation:
        # Whatever a server uploads, no client runs it.
        canary = tmp_path / "canary"
        for module in (federation.server.folder / "app").rglob("*.py"):
            module.write_text(f"open({str(canary)!r}, 'a').write('ran')\n")
        before = [federation.process(party, "worker") for party in federation.parties[1:]]
        change_worker(federation, (sys.executable, str(MALICIOUS), str(federation.server.folder), str(where)))
        assert federation.wait(federation.start("malice")) == "finished:completed", federation.said(40)
        said = json.loads(where.read_text())
        assert not canary.exists()
        for name, code in REFUSALS.items():
            assert [one.partition(":")[0] for one in said[name]] == [code] * len(said[name]), name
        for name in ANSWERED:
            assert all(one.startswith("answer ") for one in said[name]), said[name]
        assert said["first"] == said["again"], "the same question has the same bytes for an answer"
        assert said["huge"] == ["silence"], "its SuperNode does not take 40 MB, and goes on some time later"
        for party in federation.parties[1:]:
            with Ledger(party.ledger, read_budget(party)) as ledger:
                assert [entry.round for entry in ledger.entries] == [0, 1, 2, 3]
        assert [federation.process(party, "worker") for party in federation.parties[1:]] == before
        assert all(map(processes.leads, before))
        change_worker(federation)
        assert federation.go("honest")[-1]["absent"] == []

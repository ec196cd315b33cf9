"""A malicious server drives the nodes of a real federation, with real processes between them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from deployed_harness import real
from malicious_server import entries

from federation_harness import PRIVATE, small_config
from trilemma.federation.processes import groups as processes

pytestmark = [pytest.mark.federation, pytest.mark.slow, pytest.mark.nightly]

MALICIOUS = Path(__file__).with_name("deployed_malicious.py")
REFUSALS = {
    "other terms": "terms",
    "same round, other model": "repeated",
    "wrong shape": "broadcast",
    "wrong type": "broadcast",
    "long": "block",
    "huge": "block",
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


def test_whatever_a_server_says_real_nodes_pay_once_for_what_they_tell(tmp_path):
    """Every refusal comes back as its code; a round has one answer, paid for; nobody's process ends.

    (In one process `test_federation_malice.py` tries far more.)
    """
    where = tmp_path / "said.json"
    config = small_config(3, *PRIVATE, "privacy.sigma_ind=5", rounds=5)
    with real(tmp_path / "federation", 3, config, budget=1e6) as federation:
        before = [federation.process(party) for party in federation.parties[1:]]
        program = (sys.executable, str(MALICIOUS), str(federation.server.folder), str(where))
        federation.restart(federation.server, program)
        federation.start("malice")
        assert federation.wait("malice") == "completed", federation.said(40)
        said = json.loads(where.read_text())
        for name, code in REFUSALS.items():
            assert [one.partition(":")[0] for one in said[name]] == [code] * len(said[name]), name
        for name in ANSWERED:
            assert all(one.startswith("answer ") for one in said[name]), said[name]
        assert said["first"] == said["again"], "the same question has the same bytes for an answer"
        for party in federation.parties[1:]:
            assert [entry.round for entry in entries(party)] == [0, 1, 2, 3]
        assert [federation.process(party) for party in federation.parties[1:]] == before
        assert all(map(processes.leads, before))
        federation.restart(federation.server)
        assert federation.go("honest")[-1]["absent"] == []

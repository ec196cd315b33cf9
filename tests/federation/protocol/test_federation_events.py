"""One catalogue of events: nothing else can be said, and nothing private is."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation_harness import PRIVATE, Direct, make, small_config
from trilemma.federation.client.node import Node
from trilemma.federation.processes import logs
from trilemma.federation.processes.logs import LARGEST_LOG, EventLog, events_file, read_events
from trilemma.federation.protocol import events, kinds, wire
from trilemma.federation.protocol.events import CATALOGUE, Event, Sort, UnknownEvent, without_quotes
from trilemma.federation.protocol.reasons import Refused
from trilemma.federation.server.coordinator import open_run

CLIENTS = 3
SAMPLES = {
    Sort.NUMBER: 3,
    Sort.CLIENT: 2,
    Sort.CLIENTS: [0, 2],
    Sort.WORD: "word",
    Sort.SENTENCE: "a sentence",
    Sort.FIGURES: {"commit": 0.5},
}


@pytest.mark.parametrize("code", sorted(CATALOGUE))
def test_every_kind_is_said_and_takes_its_own_fields_alone(code):
    kind = CATALOGUE[code]
    facts = {name: SAMPLES[sort] for name, sort in kind.fields.items()}
    event = kind(**facts)
    assert event.text
    assert "{" not in event.text
    with pytest.raises(UnknownEvent, match="and not"):
        kind(**facts, loss=0.7)
    for name in facts:
        with pytest.raises(UnknownEvent):
            kind(**{other: value for other, value in facts.items() if other != name})
        with pytest.raises(UnknownEvent, match=name):
            kind(**{**facts, name: ValueError("patient 4711")})


def test_what_the_catalogue_does_not_have_cannot_be_said():
    with pytest.raises(UnknownEvent, match="no event 'loss-of-client'"):
        Event("loss-of-client", {"loss": 0.7})
    for sentence in ("two\nlines", "a" * 201, "unknown: patient 4711", "an error: unreached: patient 4711"):
        with pytest.raises(UnknownEvent):
            events.CLIENT_REFUSED(epoch=0, client=1, reason=sentence)
    for number in (math.nan, math.inf, "3", None):
        with pytest.raises(UnknownEvent):
            events.ROUND_REPEATED(round=number)


@given(st.text(max_size=300))
def test_any_reason_becomes_a_sentence_without_what_others_wrote(text):
    said = without_quotes(f"no message but an error: unknown: {text}")
    assert events.REPLY_REJECTED(round=0, client=None, reason=said).facts["reason"] == said
    assert said == "no message but an error: unknown"
    assert Sort.SENTENCE.holds(without_quotes(text))


def test_a_run_tells_its_story_and_nothing_private(tmp_path):
    """Server and clients write down every step; no loss, and ε in the clients' own logs alone."""
    parties = make(tmp_path / "federation", CLIENTS, small_config(CLIENTS, *PRIVATE), budget=1e6)
    logs = {party.name: EventLog(events_file(party.running), party.name) for party in parties}
    direct = Direct(parties)
    direct.clients = {party.client: Node(party, say=logs[party.name]) for party in parties[1:]}
    open_run(parties[0], "run", direct, logs["server"], direct.time.clock).go()

    server = read_events(logs["server"].path)
    codes = [one["event"] for one in server]
    assert codes == ["epoch-called", "epoch-opened", *["round-committed"] * 3, "run-finished"]
    assert server[-2]["heard"] == [0, 1, 2]
    assert server[-2]["bytes"] > 0
    assert {"admit", "aggregate", "exchange"} <= set(server[-2]["seconds"])
    client = read_events(logs["client-1"].path)
    assert [one["event"] for one in client] == [
        "epoch-joined", "epoch-confirmed", *["round-answered"] * 3, "result-received"
    ]  # fmt: skip
    counted = [[one["round"] for one in told if "round" in one] for told in (server, client)]
    assert counted == [[1, 2, 3], [1, 2, 3]], "both count alike"
    assert client[-2]["epsilon"]["exact"] > client[2]["epsilon"]["exact"] > 0
    everything = "".join(log.path.read_text() for log in logs.values())
    assert '"loss"' not in "".join(log.path.read_text() for name, log in logs.items() if name != "server")
    assert "epsilon" not in logs["server"].path.read_text()
    assert str(tmp_path) not in everything


def test_a_refusal_is_a_code_in_the_log(tmp_path):
    parties = make(tmp_path / "federation", CLIENTS, small_config(CLIENTS))
    said: list[Event] = []
    node = Node(parties[1], say=said.append)
    for block in (b"gibberish", wire.dumps(kinds.Hello(run="run", epoch=0, terms="patient 4711"))):
        with pytest.raises(Refused):
            node.answer(block)
    assert [one.facts for one in said] == [
        {"asked": "unknown", "reason": "block"},
        {"asked": "hello", "reason": "terms"},
    ]


def test_a_log_neither_grows_for_ever_nor_stops_anybody(tmp_path):
    log = EventLog(tmp_path / "run" / "events.jsonl", "server", "run")
    log(events.ROUND_REPEATED(round=1))
    first = log.path.read_bytes()
    log.path.write_bytes(b" " * LARGEST_LOG + b"\n" + first + b'{"event": "round-rep\n')
    log(events.ROUND_REPEATED(round=2))
    assert log.path.stat().st_size < 1000
    assert [one["round"] for one in read_events(log.path)] == [1, 2]
    nowhere = EventLog(log.path / "below-a-file", "server")
    nowhere(events.ROUND_REPEATED(round=1))
    assert read_events(nowhere.path) == []


@pytest.mark.parametrize("module", ["processes.logs", "operations.doctor"])
def test_what_every_start_imports_needs_no_torch(module):
    """`up` has the doctor look at every client, and each process writes events: starting must stay cheap."""
    program = f"import sys, trilemma.federation.{module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_catalogue_stands_in_the_documentation():
    page = (Path(__file__).parents[3] / "docs" / "federation.md").read_text()
    for kind in CATALOGUE.values():
        row = f"| `{kind.code}` | {kind.level} | {', '.join(kind.fields)} | {kind.meaning} |"
        assert row in page, row


def test_no_log_of_a_process_grows_for_ever(tmp_path, monkeypatch):
    """Much of it is about what others do: they could fill a disk."""
    monkeypatch.setattr(logs, "LARGEST", 2000)
    party = make(tmp_path / "federation", 1, small_config(1, tolerate=0))[1]
    party.running.mkdir()
    logs.keep_log(party)
    try:
        for number in range(500):
            logs.listener(party)(events.LINE(what=f"line {number}"))
    finally:
        for handler in list(logs.log.handlers):
            logs.log.removeHandler(handler)
            handler.close()
    written = list(party.running.glob("process.log*"))
    assert "line 499" in party.process_log.read_text()
    assert sum(one.stat().st_size for one in written) < 2 * 2000

"""Rounds as OpenTelemetry traces, and the one schema of logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trilemma.federation.processes.logs import EventLog
from trilemma.federation.processes.traces import Traces
from trilemma.federation.protocol import events
from trilemma.federation.protocol.event_schema import schema, text

SCHEMA = Path(__file__).parents[3] / "docs" / "events.schema.json"


def test_the_published_schema_is_that_of_the_catalogue():
    assert SCHEMA.read_text() == text()
    assert json.loads(text()) == schema()


def test_what_is_written_down_keeps_to_the_schema(tmp_path):
    """Whatever may be said, in every field its largest and smallest."""
    checker = pytest.importorskip("jsonschema", reason="jsonschema is not installed").Draft202012Validator
    checker.check_schema(schema())
    holds = checker(schema())
    log = EventLog(tmp_path / "events.jsonl", "server", "run")
    log(events.CLIENT_REFUSED(epoch=0, client=None, reason="terms: they differ"))
    log(events.ROUND_REPEATED(round=1))
    log(events.RUN_FINISHED(run="run", rounds=1))
    for line in (tmp_path / "events.jsonl").read_text().splitlines():
        holds.validate(json.loads(line))
    assert not holds.is_valid({**json.loads(line), "loss": 0.3})


def test_a_round_is_a_span_with_a_span_for_each_stage_and_no_field_of_its_own():
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    kept = memory.InMemorySpanExporter()
    traces = Traces("server", kept)
    say = traces.of("run")
    facts = {name: [] for name in ("absent", "unreached", "rejected", "late", "expelled")}
    seconds = {"clients": 2.0, "rule": 0.5}
    say(
        events.ROUND_COMMITTED(
            round=3, epoch=0, heard=[0, 2], bytes=10, seconds=seconds, scores={"accuracy": 0.9}, **facts
        )
    )
    say(events.ROUND_REPEATED(round=4))
    traces.flush()
    spans = {span.name: span for span in kept.get_finished_spans()}
    assert set(spans) == {"round", "clients", "rule"}
    whole = spans["round"]
    assert whole.end_time - whole.start_time == 2_500_000_000
    assert spans["rule"].parent.span_id == whole.context.span_id
    assert whole.attributes["trilemma.round"] == 3
    assert whole.attributes["trilemma.heard"] == (0, 2)
    allowed = {*events.CATALOGUE["round-committed"].fields, "run"}
    assert {name.split(".")[1] for name in whole.attributes} <= allowed

"""Rounds as OpenTelemetry traces, where they are asked for: a span for a round, one for each of its stages.

`TRILEMMA_TRACES=1` asks for them. OpenTelemetry's own variables say where they go
(OTEL_EXPORTER_OTLP_ENDPOINT). A span is made from an event of the catalogue when the round is over, so it
has that event's fields and no others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trilemma.base.errors import UserError
from trilemma.federation.protocol.events import Event, Say

TRACES = "TRILEMMA_TRACES"
"""Environment variable that asks for traces."""

ROUNDS = {"round-committed": "round", "round-answered": "round", "score-told": "evaluation"}
"""Which events are spans, and what these are called."""

NANO = 1_000_000_000


class Traces:
    """Makes spans of events. `exporter` is where they go; None: where OpenTelemetry's variables say."""

    def __init__(self, party: str, exporter: Any = None) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import set_span_in_context
        except ImportError:
            raise UserError(
                f"{TRACES} is set, and needs OpenTelemetry: pip install 'trilemma[traces]'"
            ) from None
        resource = Resource.create({"service.name": "trilemma", "trilemma.party": party})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("trilemma.federation")
        self._inside: Callable[[Any], Any] = set_span_in_context

    def of(self, run: str) -> Say:
        """Return who makes spans of a run's events."""

        def say(event: Event) -> None:
            if event.code in ROUNDS:
                self._span(run, event)

        return say

    def _span(self, run: str, event: Event) -> None:
        """Make the span of a round that has just ended, with its stages one after the other."""
        stages = {str(name): int(took * NANO) for name, took in event.facts.get("seconds", {}).items()}
        end = time.time_ns()
        at = end - sum(stages.values())
        whole = self._tracer.start_span(ROUNDS[event.code], start_time=at)
        whole.set_attributes({f"trilemma.{name}": value for name, value in _attributes(run, event).items()})
        for name, took in stages.items():
            part = self._tracer.start_span(name, context=self._inside(whole), start_time=at)
            at += took
            part.end(end_time=at)
        whole.end(end_time=end)

    def flush(self) -> None:
        """Send what has not been sent."""
        self._provider.force_flush()


def _attributes(run: str, event: Event) -> dict[str, Any]:
    """Return an event's fields as OpenTelemetry takes them: numbers, words, lists; figures by name."""
    found: dict[str, Any] = {"run": run} if run else {}
    for name, value in event.facts.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": one for inner, one in value.items()} if name != "seconds" else {}
        elif value is not None:
            found[name] = value
    return found

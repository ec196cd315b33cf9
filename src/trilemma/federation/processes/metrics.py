"""Metrics of a party for Prometheus: numbers about what it does, at `/metrics` on loopback, where asked for.

    trilemma federation up FOLDER --metrics 9400      (or TRILEMMA_METRICS=9400 in its environment)

The process of a party serves them. They are made from the events of its log, so that nothing is told here
that the catalogue of events does not allow; and each party tells of itself alone: what a client spent is at
that client's own endpoint and no other. A process that starts reads its log, so that counters go on where
they were, as far back as the log reaches.
"""

from __future__ import annotations

import contextlib
import logging
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from trilemma.federation.party.layout import Party, metrics_port
from trilemma.federation.processes.logs import events_file, read_events
from trilemma.federation.protocol.events import Event, Say

log = logging.getLogger("trilemma")


Facts = Mapping[str, Any]
STATES = ("heard", "absent", "rejected")


@dataclass(frozen=True)
class Metric:
    """What is counted of events of these codes: a number, or one for each value of the label `by`.

    `apart`: for each run.
    """

    name: str
    events: str
    kind: type[Counter] | type[Gauge]
    meaning: str
    of: Callable[[Facts], float | Mapping[str, float]] = lambda facts: 1.0
    by: str = ""
    apart: bool = True


# fmt: off
SERVER = (
    Metric("rounds", "round-committed", Counter, "rounds committed"),
    Metric("rounds_repeated", "round-repeated", Counter, "rounds asked again"),
    Metric("rounds_failed", "round-failed", Counter, "rounds given up in an epoch"),
    Metric("stage_seconds", "round-committed", Counter, "seconds spent in a stage of rounds",
        lambda facts: facts["seconds"], "stage"),
    Metric("message_bytes", "round-committed", Counter, "bytes of messages", lambda facts: facts["bytes"]),
    Metric("rejected", "reply-rejected", Counter, "answers turned away"),
    Metric("not_joined", "client-refused", Counter, "refusals to join an epoch"),
    Metric("expelled", "client-expelled", Counter, "clients expelled for good"),
    Metric("round", "round-committed", Gauge, "the newest round committed", lambda facts: facts["round"]),
    Metric("epoch", "epoch-called", Gauge, "the newest epoch", lambda facts: facts["epoch"]),
    Metric("clients_joined", "epoch-opened", Gauge, "members of the newest epoch",
        lambda facts: len(facts["clients"])),
    Metric("clients", "round-committed", Gauge, "clients in the newest round: present, absent, rejected",
        lambda facts: {one.replace("heard", "present"): len(set(facts[one])) for one in STATES}, "state"),
    Metric("score", "round-committed", Gauge, "scores on the server's test set, or on clients' own examples",
        lambda facts: facts["scores"], "metric"),
)
CLIENT = (  # no loss of a client's is among them
    Metric("client_rounds", "round-answered", Counter, "rounds answered"),
    Metric("client_repeats", "answer-repeated", Counter, "answers given once more"),
    Metric("client_stage_seconds", "round-answered", Counter, "seconds spent in a stage",
        lambda facts: facts["seconds"], "stage"),
    Metric("client_bytes", "round-answered", Counter, "bytes of answers", lambda facts: facts["bytes"]),
    Metric("client_refusals", "refused", Counter, "blocks refused",
        lambda facts: {facts["reason"]: 1.0}, "reason", apart=False),
    Metric("client_epsilon", "round-answered score-told", Gauge, "ε so far",
        lambda facts: facts["epsilon"], "accountant", apart=False),
    Metric("client_epoch", "epoch-joined", Gauge, "the newest epoch joined", lambda facts: facts["epoch"]),
)
# fmt: on


class Counts:
    """The metrics of a table, as far as they have been counted."""

    def __init__(self, table: Sequence[Metric], registry: CollectorRegistry) -> None:
        labels = [[*(["run"] if one.apart else []), *([one.by] if one.by else [])] for one in table]
        self._kept = [
            (one, one.kind(f"trilemma_{one.name}", one.meaning, by, registry=registry))
            for one, by in zip(table, labels, strict=True)
        ]

    def count(self, code: str, run: str, facts: Facts) -> None:
        """Count an event."""
        for one, kept in self._kept:
            if code not in one.events.split():
                continue
            found = one.of(facts)
            for label, number in found.items() if isinstance(found, Mapping) else [("", found)]:
                place = kept.labels(*([run] if one.apart else []), *([label] if one.by else []))
                if isinstance(place, Counter):
                    place.inc(max(0.0, number))
                else:
                    place.set(number)


class Metrics:
    """The metrics of a party, which count its events: those in its log, and those that come.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from trilemma.federation.protocol.events import REFUSED
    >>> metrics = Metrics(Party(Path(tempfile.mkdtemp()) / "client-1", 1))
    >>> metrics.of("")(REFUSED(asked="hello", reason="terms"))
    >>> metrics.registry.get_sample_value("trilemma_client_refusals_total", {"reason": "terms"})
    1.0
    """

    def __init__(self, party: Party) -> None:
        self.registry = CollectorRegistry()
        server = party.client is None
        self._counts = Counts(SERVER if server else CLIENT, self.registry)
        if not server:
            _budget(party, self.registry)
        for line in read_events(events_file(party.running)):
            # Somebody may have edited the log.
            with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError, OverflowError):
                self._counts.count(line["event"], line.get("run") or "", line)

    def of(self, run: str) -> Say:
        """Return who counts the events of a run; a client's say themselves which run they are about."""

        def say(event: Event) -> None:
            self._counts.count(event.code, str(event.facts.get("run", run)), event.facts)

        return say


def _budget(client: Party, registry: CollectorRegistry) -> None:
    limit = Gauge("trilemma_client_epsilon_budget", "ε that may be spent in all", registry=registry)

    def read() -> float:
        try:
            return float(tomllib.loads(client.budget.read_text())["epsilon"])
        except (OSError, ValueError, LookupError, TypeError):
            return math.nan

    limit.set_function(read)


def serve(party: Party, base: str | None) -> Metrics | None:
    """Serve a party's metrics on loopback, where a first port is given; return them.

    Metrics that cannot be served, because a port is taken, keep nobody from working.
    """
    port = metrics_port(party, base)
    if port is None:
        return None
    metrics = Metrics(party)
    try:
        start_http_server(port, "127.0.0.1", metrics.registry)
    except OSError as error:
        log.error("no metrics at 127.0.0.1:%d: %s", port, error.strerror)
        return None
    log.info("metrics of %s at http://127.0.0.1:%d/metrics", party.name, port)
    return metrics

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
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from trilemma.federation.party.layout import Party, metrics_port
from trilemma.federation.processes.logs import events_file, read_events
from trilemma.federation.protocol.events import Event, Say

log = logging.getLogger("trilemma")


class ServerMetrics:
    """What the server's events count."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"trilemma_{name}", meaning, ["run", *labels], registry=registry)

        def gauge(name: str, meaning: str, *labels: str) -> Gauge:
            return Gauge(f"trilemma_{name}", meaning, ["run", *labels], registry=registry)

        self.rounds = counter("rounds", "rounds committed")
        self.repeated = counter("rounds_repeated", "rounds asked again")
        self.failed = counter("rounds_failed", "rounds given up in an epoch")
        self.seconds = counter("stage_seconds", "seconds spent in a stage of rounds", "stage")
        self.bytes = counter("message_bytes", "bytes of admitted messages")
        self.rejected = counter("rejected", "answers turned away")
        self.refused = counter("not_joined", "refusals to join an epoch")
        self.expelled = counter("expelled", "clients expelled for good")
        self.round = gauge("round", "the newest round that is committed")
        self.epoch = gauge("epoch", "the newest epoch")
        self.joined = gauge("clients_joined", "members of the newest epoch")
        self.clients = gauge("clients", "clients in the newest round: present, absent, rejected", "state")
        self.score = gauge("score", "scores on the server's test set, or on clients' own examples", "metric")

    def count(self, code: str, run: str, facts: Mapping[str, Any]) -> None:
        """Count an event of a run."""
        match code:
            case "epoch-called":
                self.epoch.labels(run).set(facts["epoch"])
            case "epoch-opened":
                self.joined.labels(run).set(len(facts["clients"]))
            case "client-refused":
                self.refused.labels(run).inc()
            case "client-expelled":
                self.expelled.labels(run).inc()
            case "reply-rejected":
                self.rejected.labels(run).inc()
            case "round-repeated":
                self.repeated.labels(run).inc()
            case "round-failed":
                self.failed.labels(run).inc()
            case "round-committed":
                self.rounds.labels(run).inc()
                self.round.labels(run).set(facts["round"])
                self.bytes.labels(run).inc(facts["bytes"])
                for stage, seconds in facts["seconds"].items():
                    self.seconds.labels(run, stage).inc(max(0.0, seconds))
                for state, who in (("present", "heard"), ("absent", "absent"), ("rejected", "rejected")):
                    self.clients.labels(run, state).set(len(set(facts[who])))
                for name, score in facts["scores"].items():
                    self.score.labels(run, name).set(score)


class ClientMetrics:
    """What a client's events count; no loss of its is among them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.rounds = Counter("trilemma_client_rounds", "rounds answered", ["run"], registry=registry)
        self.again = Counter("trilemma_client_repeats", "answers given once more", ["run"], registry=registry)
        self.seconds = Counter(
            "trilemma_client_stage_seconds", "seconds spent in a stage", ["run", "stage"], registry=registry
        )
        self.bytes = Counter("trilemma_client_bytes", "bytes of answers", ["run"], registry=registry)
        self.refused = Counter("trilemma_client_refusals", "blocks refused", ["reason"], registry=registry)
        self.epsilon = Gauge("trilemma_client_epsilon", "ε so far", ["accountant"], registry=registry)
        self.epoch = Gauge("trilemma_client_epoch", "the newest epoch joined", ["run"], registry=registry)

    def count(self, code: str, run: str, facts: Mapping[str, Any]) -> None:
        """Count an event."""
        match code:
            case "epoch-joined":
                self.epoch.labels(run).set(facts["epoch"])
            case "round-answered":
                self.rounds.labels(run).inc()
                self.bytes.labels(run).inc(facts["bytes"])
                for stage, seconds in facts["seconds"].items():
                    self.seconds.labels(run, stage).inc(max(0.0, seconds))
                for accountant, epsilon in facts["epsilon"].items():
                    self.epsilon.labels(accountant).set(epsilon)
            case "score-told":
                for accountant, epsilon in facts["epsilon"].items():
                    self.epsilon.labels(accountant).set(epsilon)
            case "answer-repeated":
                self.again.labels(run).inc()
            case "refused":
                self.refused.labels(facts["reason"]).inc()


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
        self._counts = ServerMetrics(self.registry) if server else ClientMetrics(self.registry)
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

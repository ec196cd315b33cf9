"""What a client's own log of events says it did, and was told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class Doings:
    """Its last answer; what it refused, by reason; who was expelled, itself too."""

    run: str = ""
    epoch: int | None = None
    round: int | None = None
    answered: float | None = None
    refused: Mapping[str, int] = field(default_factory=dict)
    refused_at: float | None = None
    expelled: tuple[str, ...] = ()


def doings(told: Sequence[Mapping[str, Any]]) -> Doings:
    """Return what a client's events say, all runs together.

    >>> said = {"run": "a", "client": 3, "round": 2, "test": "length", "figures": {"statistic": 9.0}}
    >>> doings([{"event": "expulsion-announced", "epoch": 1, **said}]).expelled
    ('run a: client 3 in round 2, length: statistic 9',)
    """
    found, refused = Doings(), Counter[str]()
    for one in told:
        match one["event"]:
            case "epoch-joined":
                found = replace(found, run=one["run"], epoch=one["epoch"])
            case "round-answered" | "answer-repeated":
                facts = {name: one[name] for name in ("run", "epoch", "round")}
                found = replace(found, **facts, answered=moment(one))
            case "refused":
                refused[str(one["reason"])] += 1
                found = replace(found, refused_at=moment(one))
            case "expulsion-announced" | "expelled":
                found = replace(found, expelled=(*found.expelled, _expulsion(one)))
    return replace(found, refused=dict(refused))


def moment(event: Mapping[str, Any]) -> float:
    """Return when something happened, in seconds since 1970."""
    return datetime.fromisoformat(event["time"]).timestamp()


def _expulsion(event: Mapping[str, Any]) -> str:
    who = f"client {event['client']}" if "client" in event else "this client"
    figures = ", ".join(f"{name} {value:.4g}" for name, value in event["figures"].items())
    return f"run {event['run']}: {who} in round {event['round']}, {event['test']}: {figures}"

"""What an audit found: one outcome per test, what each is compared with, and the whole of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trilemma.privacy import Guarantee, Verdict

Value = float | int | str
"""What a fact of an outcome may be."""


@dataclass(frozen=True)
class AuditOutcome:
    """What one test found.

    Attributes:
        test: Which test it was.
        measures: What `found` and `certified` are: ε, or how far a message moves.
        found: What was found: a lower bound on ε that holds with the audit's confidence, or a largest move.
        certified: What must not be exceeded; None: nothing is certified.
        assumes: What the bound takes for granted; nothing, where it is empty.
        facts: What else is worth knowing.
        slack: By which share `found` may exceed: the rounding of single precision, where a move is compared.

    >>> AuditOutcome("likelihood ratio", "ε", 1.7, 2.0).ratio
    0.85
    >>> AuditOutcome("bits", "ε", math.inf, 2.0).exceeds
    True
    """

    test: str
    measures: str
    found: float
    certified: float | None
    assumes: str = ""
    facts: Mapping[str, Value] = field(default_factory=dict)
    slack: float = 0.0

    @property
    def ratio(self) -> float | None:
        """What was found, as a share of what is certified; None: nothing is."""
        if self.certified is None:
            return None
        if self.certified == 0:
            return math.inf if self.found else 0.0
        return self.found / self.certified

    @property
    def exceeds(self) -> bool:
        """Whether what was found refutes what is certified."""
        return self.certified is not None and self.found > self.certified * (1 + self.slack)

    def plain(self) -> dict[str, Any]:
        """Return JSON values, infinity as text."""
        values = {**asdict(self), "facts": dict(self.facts), "ratio": self.ratio, "exceeds": self.exceeds}
        return {
            name: "inf" if isinstance(value, float) and math.isinf(value) else value
            for name, value in values.items()
        }


@dataclass(frozen=True)
class Audit:
    """All outcomes about one subject, beside what is certified for it.

    Each bound on ε is false with probability at most `risk`, all of them together with 1 − confidence.
    """

    subject: str
    verdict: Verdict
    delta: float
    rounds: int
    trials: int
    confidence: float
    outcomes: tuple[AuditOutcome, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing that was found exceeds what is certified."""
        return not any(outcome.exceeds for outcome in self.outcomes)

    @property
    def certified(self) -> float | None:
        """The certified ε; None: there is none."""
        return self.verdict.epsilon if isinstance(self.verdict, Guarantee) else None

    def plain(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "subject": self.subject,
            "verdict": self.verdict.plain(),
            "delta": self.delta,
            "rounds": self.rounds,
            "trials": self.trials,
            "confidence": self.confidence,
            "outcomes": [outcome.plain() for outcome in self.outcomes],
            "notes": list(self.notes),
            "passed": self.passed,
        }

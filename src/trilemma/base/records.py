"""What a run writes down, simulated or deployed: a record for every round, a summary at its end.

The simulator and a federation's server write the same records, so that one reader
(`trilemma.report.load`) and everything built on it serves both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from trilemma.base.typed import Count, Finite, Number, Seed, Size, typed

Scores = Mapping[str, Number | None]
"""Test scores by name, the loss among them. None: the score is not finite."""

Test = Literal["not finite", "length", "pairs", "one of a pair", "direction"]
"""What a client can be expelled for (`trilemma.learning.defences.evidence`)."""

OWN_SCORE = "own_accuracy"
"""What clients' score of the model on their own examples is called; with `_low` and `_high`, how far
liars could have brought it."""


@dataclass(frozen=True)
class Record:
    """One round. `round` counts finished rounds, from 1.

    `metrics` is empty where the model was not scored. `weights` is every heard client's share in the
    aggregate; `absent` are those who were asked and silent, `unreached` those whom the carrier did not
    reach, `rejected` those whose answer was turned away, with the reason (None: nobody knows whose answer
    it was). `late` are those who were asked, not waited for and not heard; `times` are the seconds
    clients took, `slow` those who took far longer than usual (`trilemma.federation.protocol.waiting`).
    `sharing` are those who shared secrets for the noise, where a federation's server judges messages by it.
    `expelled` are those who were expelled for good, with the test, what it gave and its threshold
    (`trilemma.learning.defences.evidence.Expulsion`). `epsilon` is what is guaranteed so far, and
    `accountant` by whom: infinite where nothing is, and in the records of a federation's server, whose
    clients keep their own ledgers. `facts` are the algorithm's own figures and what was sent, `seconds` the
    time by stage.

    >>> record = Record(3, weights={0: 0.5, 2: 0.5}, metrics={"accuracy": 0.9}, absent=(1,))
    >>> Record.read(record.plain()) == record
    True
    """

    round: Count
    epsilon: Number = math.inf
    accountant: str = ""
    train_loss: Number | None = None
    metrics: Scores = field(default_factory=dict)
    weights: Mapping[Count, Number] = field(default_factory=dict)
    epoch: int | None = None
    absent: tuple[Count, ...] = ()
    unreached: tuple[tuple[Count, str], ...] = ()
    rejected: tuple[tuple[Count | None, str], ...] = ()
    late: tuple[Count, ...] = ()
    slow: tuple[Count, ...] = ()
    times: Mapping[Count, Number] = field(default_factory=dict)
    sharing: tuple[Count, ...] = ()
    expelled: tuple[Mapping[str, Any], ...] = ()
    attack_strength: Number | None = None
    facts: Mapping[str, Number] = field(default_factory=dict)
    seconds: Mapping[str, Number] = field(default_factory=dict)

    @property
    def unheard(self) -> frozenset[int]:
        """Who was asked and not heard, and counts against f.

        >>> sorted(Record(3, absent=(1,), unreached=((4, "away"),), rejected=((None, "whose?"),)).unheard)
        [1, 4]
        """
        turned_away = {client for client, _ in self.rejected if client is not None}
        return frozenset({*self.absent, *turned_away, *(client for client, _ in self.unreached)})

    def plain(self) -> dict[str, Any]:
        """Return the record as JSON values; an infinite ε is None."""
        return {
            "round": self.round,
            "epoch": self.epoch,
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
            "accountant": self.accountant or None,
            "train_loss": self.train_loss,
            "metrics": dict(self.metrics),
            "weights": {str(client): weight for client, weight in self.weights.items()},
            "absent": list(self.absent),
            "unreached": [list(one) for one in self.unreached],
            "rejected": [list(one) for one in self.rejected],
            "late": list(self.late),
            "slow": list(self.slow),
            "times": {str(client): seconds for client, seconds in self.times.items()},
            "sharing": list(self.sharing),
            "expelled": [dict(one) for one in self.expelled],
            "attack_strength": self.attack_strength,
            "facts": dict(self.facts),
            "seconds": dict(self.seconds),
        }

    def figures(self) -> dict[str, float]:
        """Return every number of the round by name, those that are there; a stage's seconds as `stage s`.

        >>> Record(3, metrics={"accuracy": 0.9, "loss": None}, seconds={"clients": 0.5}).figures()
        {'clients s': 0.5, 'accuracy': 0.9}
        """
        own = {
            "train_loss": self.train_loss,
            "attack_strength": self.attack_strength,
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
        }
        seconds = {f"{stage} s": spent for stage, spent in self.seconds.items()}
        everything = {**seconds, **own, **self.facts, **self.metrics}
        return {name: value for name, value in everything.items() if value is not None}

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Record:
        """Return the record that `plain` was written from; what a later version added is left out.

        >>> Record.read({"round": 3, "weights": {"-1": 0.5}})
        Traceback (most recent call last):
        ValueError: weights.-1.[key]: Input should be greater than or equal to 0
        """
        return typed(cls, {name: value for name, value in plain.items() if value is not None})


@dataclass(frozen=True)
class Spread:
    """A quantity over seeds. A diverged seed counts as None and leaves the mean to the others."""

    mean: Finite | None
    std: Size | None
    per_seed: Mapping[Seed, Finite | None]

    @classmethod
    def of(cls, values: Mapping[int, float | None]) -> Spread:
        """Summarise one value per seed; std is the sample standard deviation, 0 for one seed.

        What is not finite counts as diverged.

        >>> Spread.of({1: 0.8, 2: 0.9}).mean, Spread.of({1: 0.8, 2: math.nan})
        (0.85, Spread(mean=0.8, std=0.0, per_seed={'1': 0.8, '2': None}))
        """
        values = {
            seed: one if one is not None and math.isfinite(one) else None for seed, one in values.items()
        }
        present = [value for value in values.values() if value is not None]
        mean = round(statistics.fmean(present), 6) if present else None
        std = (round(statistics.stdev(present), 6) if len(present) > 1 else 0.0) if present else None
        return cls(mean, std, {str(seed): value for seed, value in values.items()})


@dataclass(frozen=True)
class Summary:
    """The result of a run, never one number without the others.

    `metrics` are scores by name, the one that counts first; `epsilon` is ε by accountant, empty where nothing
    is guaranteed, and `accountant` names the one whose figure the records hold, "" where no run chose one;
    `printed` are the figures of papers and formulas that are no guarantee; `verdict` is the guarantee with
    all it rests on, or the reason why there is none, as plain values (typed: `trilemma.report.verdict_of`);
    `byzantine` is None where nobody knows it, in a federation; `diverged` is the round in which a seed's
    training was not finite any more, by seed; `notes` are the reservations a reader must see.
    """

    metrics: Mapping[str, Spread]
    loss: Spread
    epsilon: Mapping[str, Finite | None]
    delta: Finite | None
    seconds: Finite
    algorithm: str
    rule: str
    clients: Count
    byzantine: Count | None
    attack: str
    threat: str
    rounds: Count
    accountant: str = ""
    diverged: Mapping[Seed, Count] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    directory: str = ""
    printed: Mapping[str, Finite | None] = field(default_factory=dict)
    verdict: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether every seed diverged, so that there is no result."""
        return bool(self.diverged) and len(self.diverged) == len(self.loss.per_seed)

    @property
    def score(self) -> str:
        """The metric that counts: the first, or the loss where there are no others."""
        return next(iter(self.metrics), "loss")

    @property
    def accuracy(self) -> Spread:
        """The accuracy of a classifier.

        Raises:
            AttributeError: It was scored by other metrics.
        """
        if "accuracy" not in self.metrics:
            raise AttributeError(f"scored by {', '.join(self.metrics) or 'its loss'}, not by accuracy")
        return self.metrics["accuracy"]

    def spread(self, name: str) -> Spread:
        """Return a metric, or the loss, over seeds."""
        return self.loss if name == "loss" else self.metrics[name]

    def plain(self) -> dict[str, Any]:
        """Return JSON values; every metric stands under its own name.

        >>> spread = Spread.of({1: 0.5})
        >>> summary = Summary({"auc": spread}, spread, {}, None, 1.0, "dsgd", "mean", 3, 0, "none", "none", 9)
        >>> summary.plain()["auc"]["mean"], Summary.read(summary.plain()) == summary
        (0.5, True)
        """
        plain = asdict(self)
        return {**plain.pop("metrics"), **plain}

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Summary:
        """Return the summary that `plain` was written from."""
        others = {name: value for name, value in plain.items() if name not in SUMMARY}
        metrics = {
            name: value
            for name, value in others.items()
            if isinstance(value, Mapping) and set(value) == {"mean", "std", "per_seed"}
        }
        found = typed(cls, {**plain, "metrics": metrics})
        if found.delta is None and any(value is not None for value in found.epsilon.values()):
            raise ValueError("epsilon without delta")
        return found


SUMMARY = frozenset(part.name for part in fields(Summary))
"""What stands in a summary beside its metrics: no metric can be called so."""

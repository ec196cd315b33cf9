"""A question about privacy as people ask it: two of ε, δ and the noise give the third.

`trilemma privacy` and the page's planner ask here, so that their figures are the same to the last digit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from trilemma.aggregation.steps.weights import check
from trilemma.base.errors import UserError
from trilemma.privacy import NoiseLaw, Release, Sampling, Threat
from trilemma.privacy.accounting import calculator
from trilemma.privacy.types import Adjacency, Assumption, Scheme, Unit
from trilemma.report.privacy import calibration_record, finding_record


@dataclass(frozen=True)
class Question:
    """What is given; what is not (None) is asked for.

    >>> question = Question(clients=100, rounds=30, byzantine=10, clip=2.25, epsilon=26.4, delta=1e-4)
    >>> record = question.record()
    >>> round(record["calibrated"]["sigma_cor"], 3), round(record["epsilon"]["exact"], 1)
    (0.607, 26.4)
    """

    clients: int
    rounds: int
    threat: str = "secldp"
    byzantine: int = 0
    collusion: int | None = None
    neighbours: int | None = None
    weights: str = ""
    clip: float = 1.0
    sigma_ind: float | None = None
    sigma_cor: float | None = None
    noise_multiplier: float | None = None
    epsilon: float | None = None
    delta: float | None = None
    unit: str = "user"
    batch: int = 1
    examples: int | None = None
    sampling: str = "none"
    adjacency: str = "replace"
    assume: str = "guaranteed"
    accountant: str | None = None
    dim: int = 1

    def record(self) -> dict[str, Any]:
        """Return the answer as plain values: what was found, and the least noise where that was asked."""
        record = finding_record(self.finding)
        record["notes"] = [*record["notes"], *self._each()]
        return record if self.calibration is None else record | calibration_record(self.calibration, self.dim)

    @cached_property
    def finding(self) -> calculator.Solution:
        """What is guaranteed: by the given noise, or by the least noise that was asked for."""
        law = self.law
        if self.calibration is not None:
            law = self.calibration.asked.law
        elif law is not None and self.epsilon is not None and self.delta is None:
            return calculator.find_delta(replace(self.shape, law=law), self.model, self.rounds, self.epsilon)
        assert law is not None
        assert self.delta is not None
        return calculator.find_epsilon(replace(self.shape, law=law), self.model, self.rounds, self.delta)

    @cached_property
    def calibration(self) -> calculator.Calibration | None:
        """The least noise for the given ε and δ; None where the noise is given."""
        law = self.law
        if self.delta is None and (law is None or self.epsilon is None):
            raise UserError("give --delta, or the noise and --epsilon to find it")
        if law is not None and self.epsilon is not None and self.delta is not None:
            raise UserError(_EITHER)
        if law is not None:
            return None
        if self.epsilon is None or self.delta is None:
            raise UserError(_EITHER)
        return calculator.find_noise(
            self.shape, self.model, self.rounds, self.epsilon, self.delta, self.accountant
        )

    @property
    def model(self) -> Threat:
        """Who may see what."""
        if self.neighbours is not None and self.neighbours >= self.clients:
            raise UserError(f"k = {self.neighbours}: each of n = {self.clients} clients has n − 1 others")
        threat = Threat(
            self.threat,
            self.clients,
            self.byzantine,
            assume=cast(Assumption, self.assume),
            neighbours=self.neighbours,
            scales=tuple(self.clients * share for share in self.shares),
        )
        return threat if self.collusion is None else replace(threat, collusion=self.collusion)

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """The clients' public weights, normalised; () where all are alike."""
        try:
            said = [float(word) for word in self.weights.split(",") if word.strip()]
        except ValueError:
            raise UserError(f"weights = {self.weights!r}; allowed: numbers, as in 29,29,20,12") from None
        return check(said, self.clients, self.byzantine) if said else ()

    def _each(self) -> Iterator[str]:
        """Say what ε is for clients of each weight."""
        found = self.finding
        if self.delta is None or found.threat.name == "ldp":
            return
        for share in sorted(set(self.shares), reverse=True):
            threat = replace(found.threat, own=self.clients * share)
            cost = calculator.find_epsilon(found.release, threat, self.rounds, self.delta).epsilon
            assert isinstance(cost, dict)
            yield f"a client of weight {share:.3g}: ε = {min(cost.values()):.3g}"

    @property
    def shape(self) -> Release:
        """What a client lets out in a round, without the noise."""
        return Release(
            self.clip,
            NoiseLaw(),
            cast(Unit, self.unit),
            self.batch,
            self._rate,
            cast(Adjacency, self.adjacency),
        )

    @property
    def law(self) -> NoiseLaw | None:
        """The noise, where it is given."""
        sigmas = self.sigma_ind is not None or self.sigma_cor is not None
        if self.noise_multiplier is not None:
            if sigmas:
                raise UserError("give --noise-multiplier or sigmas, not both")
            return NoiseLaw(sigma_ind=self.noise_multiplier * self.shape.sensitivity)
        return NoiseLaw(self.sigma_ind or 0.0, self.sigma_cor or 0.0) if sigmas else None

    @property
    def _rate(self) -> Sampling:
        if self.sampling == "none":
            return Sampling()
        if self.examples is None or self.examples < self.batch:
            raise UserError("a sampling rate needs --examples, at least as many as --batch")
        return Sampling(cast(Scheme, self.sampling), self.batch / self.examples)


_EITHER = "give either the noise (--sigma-ind, --sigma-cor, --noise-multiplier) or --epsilon"

"""The likelihood-ratio test: which of two data sets did a client hold, from all it sent in all rounds?

Every trial throws a coin for the data set and plays all rounds. The observer knows both data sets, every
broadcast, everybody else's data and the colluders' secrets; it plans with the algorithm itself, noise off:
the pair of data sets and the broadcast that move the releases c_t(heads) and c_t(tails) farthest apart. With
R what a threat model leaves of a release (`observer`), v its variance and q the chance that the canary is in
the batch (1 where nothing is sampled), the score of a trial is

    Σ_t log [(1 − q) N(R_t; 0, v) + q N(R_t; c_t(heads), v)] − the same for tails.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trilemma.audit.bounds import Coins, Scores, by_shape, clopper_pearson
from trilemma.audit.canaries import Pair, broadcasts, sampled, whole, without_canary
from trilemma.audit.observer import AuditObserver
from trilemma.audit.outcomes import AuditOutcome, Value
from trilemma.audit.subject import Subject
from trilemma.audit.trials import CanaryReading, TrialNoise, play
from trilemma.base.keys import Key
from trilemma.learning.protocol import State
from trilemma.privacy import Noiseless, SimulatedNoise

TOGETHER = 1 << 22
"""Numbers of noise, or examples held, that are in memory at once."""


@dataclass(frozen=True)
class LikelihoodPlan:
    """What the observer decided on before any trial: a pair, a broadcast, and what they lead to.

    `heads` and `tails` (T, d) are the releases without noise, the canary in every batch; `nothing` (T, d)
    those without a canary.
    """

    pair: Pair
    broadcast: str
    sent: Sequence[State]
    reading: CanaryReading
    heads: Tensor
    tails: Tensor
    nothing: Tensor

    @property
    def move(self) -> float:
        """How far apart the two data sets' releases are in a round, at most."""
        return float((self.heads - self.tails).norm(dim=1).max())

    def facts(self, counted: str, scores: Scores, coins: Coins) -> dict[str, Value]:
        """Return what is told of a test beside its ε: how many were `counted`, and how many guesses right."""
        return {
            counted: len(coins),
            "pair": self.pair.name,
            "broadcast": self.broadcast,
            "move": round(self.move, 6),
            "right": round(float(((scores > 0) == coins).mean()), 4),
        }


def plan(subject: Subject, pairs: Sequence[Pair], key: Key) -> LikelihoodPlan:
    """Return the pair and the broadcast that move releases farthest apart, over all rounds together."""
    plans = [
        _planned(subject, pair, name, subject.always(broadcast), key)
        for pair in pairs
        for name, broadcast in broadcasts(subject.first_broadcast(pair.model, key), subject.bound).items()
    ]
    return max(plans, key=lambda one: float((one.heads - one.tails).square().sum()))


def _planned(subject: Subject, pair: Pair, name: str, sent: Sequence[State], key: Key) -> LikelihoodPlan:
    algorithm = subject.algorithm
    coins = np.array([True, False])
    silent = play(algorithm, whole(pair, coins, Noiseless()), sent, key)
    tails_only = whole(pair, np.zeros(subject.rounds, bool), Noiseless())
    reading = CanaryReading.of(algorithm, tails_only, subject.release.law, sent, key)
    heads, tails = reading.releases(silent).unbind(1)
    empty = play(algorithm, whole(without_canary(pair), coins[1:], Noiseless()), sent, key)
    nothing = reading.releases(empty)[:, 0]
    return LikelihoodPlan(pair, name, sent, reading, heads, tails, nothing)


def scores(subject: Subject, plan: LikelihoodPlan, trials: int, key: Key) -> tuple[Scores, Coins]:
    """Play twice `trials` runs, a coin each; return how much each looks like heads, and whether it was."""
    observer = AuditObserver.of(subject.threat, subject.release.law)
    held = subject.examples if subject.amplified else 1
    largest = max(1, TOGETHER // max(observer.members * plan.heads.numel(), held))
    found, coins = [], key.fold("coins").numpy().random(2 * trials) < 0.5
    for start in range(0, len(coins), largest):
        part, here = coins[start : start + largest], key.fold("trials", start)
        noise = TrialNoise(SimulatedNoise(here.fold("noise"), observer.members), observer.members)
        clients = (
            sampled(plan.pair, part, noise, subject.examples)
            if subject.amplified
            else whole(plan.pair, part, noise)
        )
        sent = play(subject.algorithm, clients, plan.sent, here)
        seen = observer.residual(plan.reading.releases(sent), noise)
        rate = subject.release.sampling.rate if subject.amplified else 1.0
        found.append(_log_ratio(plan, seen, observer.variance, rate).numpy())
    return np.concatenate(found), coins


def _log_ratio(plan: LikelihoodPlan, seen: Tensor, variance: float, rate: float) -> Tensor:
    """Return Σ_t log p(seen; heads) − log p(seen; tails) of residuals (T, k, d)."""

    def exponent(centre: Tensor) -> Tensor:
        # log N(R; c) − log N(R; 0 canaries), per round and trial
        move = centre - plan.nothing
        return ((seen - plan.nothing[:, None]) @ move[..., None])[..., 0] / variance - (
            move.square().sum(1) / (2 * variance)
        )[:, None]

    heads, tails = exponent(plan.heads), exponent(plan.tails)
    if rate < 1:
        out, share = math.log1p(-rate), math.log(rate)
        heads, tails = (torch.logaddexp(torch.full_like(one, out), share + one) for one in (heads, tails))
    return (heads - tails).sum(0)


def likelihood(
    subject: Subject, pairs: Sequence[Pair], trials: int, risk: float, key: Key, on: str = ""
) -> list[AuditOutcome]:
    """Return what the test shows about ε: by counting alone, and if the curve has the certified shape."""
    chosen = plan(subject, pairs, key)
    found, coins = scores(subject, chosen, trials, key)
    facts = chosen.facts("runs", found, coins)
    counted = clopper_pearson(found, coins, subject.delta, risk)
    one = subject.mechanism
    shaped = by_shape(found, coins, one, subject.rounds, subject.delta, risk)
    shape = "Gaussian" if one.gaussian else "sampled Gaussian"
    return [
        AuditOutcome(f"likelihood ratio, counted{on}", "ε", counted, subject.certified, facts=facts),
        AuditOutcome(
            f"likelihood ratio, by shape{on}",
            "ε",
            shaped,
            subject.certified,
            f"the trade-off between ε and δ is that of a {shape} mechanism",
            facts,
        ),
    ]

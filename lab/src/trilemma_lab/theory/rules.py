"""The theorems applied to a rule: its κ, its σ̄² and its error bounds."""

from __future__ import annotations

from dataclasses import dataclass

from trilemma import aggregation
from trilemma.aggregation.steps.types import Criterion
from trilemma.privacy import NoiseLaw
from trilemma_lab.theory.bounds import (
    Problem,
    Upper,
    error_term,
    non_convex_bound,
    strongly_convex_bound,
)


@dataclass(frozen=True)
class Promise:
    """What the theorems say about one rule. Without a proven κ all numbers are None.

    `strongly_convex` is also None for a loss that is not strongly convex.
    """

    rule: str
    kappa: float | None
    criterion: Criterion
    error: float | None = None
    non_convex: Upper | None = None
    strongly_convex: Upper | None = None


def rule_bounds(
    text: str, problem: Problem, law: NoiseLaw, clients: int, byzantine: int, rounds: int
) -> Promise:
    """Return what the theorems promise for the rule or chain `text`.

    >>> from trilemma_lab.theory.bounds import Heterogeneity
    >>> problem = Problem(dim=69, heterogeneity=Heterogeneity(g=1.0, g_cov=1.0))
    >>> rule_bounds("mean", problem, NoiseLaw(), clients=7, byzantine=2, rounds=400).kappa is None
    True
    """
    rule = aggregation.parse(text, byzantine)
    kappa, criterion = rule.kappa(clients), rule.criterion
    if kappa is None:
        return Promise(rule.name, None, criterion)
    error = error_term(problem, law, clients, byzantine, kappa, criterion)
    convex = None
    if problem.convexity > 0:
        convex = strongly_convex_bound(problem, error, kappa, rounds, criterion)
    rough = non_convex_bound(problem, error, kappa, rounds, criterion)
    return Promise(rule.name, kappa, criterion, error, rough, convex)

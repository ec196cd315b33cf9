"""SMEA, smallest maximum eigenvalue averaging.

    S* = argmin over S of n − f messages of λ_max(Cov_S),   value = mean of S*

The papers enumerate all C(n, f) subsets in d dimensions. Here everything happens in the n×n inner products,
and almost no subset is ever decomposed. λ_max(Cov_S) is at least the Rayleigh quotient of any vector. All
subsets start with the top eigenvector of the whole set and improve theirs together, one matrix product per
step for all of them; a subset whose quotient passes the best eigenvalue known (CAF's subset to begin with)
is out. The few that stay are decomposed exactly.

Where there are too many subsets to hold, a search tree fixes messages in or out, the most suspect first. In
it, λ_max of a scatter matrix only grows with added messages, and along any direction the least scatter that
the remaining removals can leave is that of removing outermost messages: both bound a branch from below.

Reference: Allouah, Guerraoui, Gupta, Pinot, Stephan, "On the privacy-robustness-utility trilemma in
distributed learning", ICML 2023.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from trilemma.aggregation.caf import Caf
from trilemma.aggregation.passes.gram import Geometry
from trilemma.aggregation.passes.spectral import top_eigenpair
from trilemma.aggregation.steps.registry import rules
from trilemma.aggregation.steps.rule import Geometric
from trilemma.aggregation.steps.types import Array, Criterion, Weighing
from trilemma.base.errors import UserError

NUMBERS = 2_000_000
"""Subsets are held together as long as they have no more than so many entries."""

AT_ONCE = 4096
"""Subsets of weighted clients that are decomposed together."""

STRICTLY = 1.0 - 1e-12
"""A subset must be better than the best by more than rounding to replace it."""


@rules.register("smea")
class Smea(Geometric):
    """Mean of the n − f messages whose covariance has the smallest top eigenvalue.

    Proposition 5.1: for every S of n − f messages, ‖value − mean_S‖² ≤ κ λ_max(Cov_S) with
    κ = 4f/(n−f) · (1 + f/(n−2f))². (Spectral criterion: λ_max, not the trace.)

    Exact unless more than `budget` subsets, or `seconds`, are needed: then the answer is the best found,
    `info.exact` is False and no subset has a top eigenvalue below `info.lower_bound`. `info.objective` is
    the top eigenvalue of the answer, `info.iterations` counts subsets looked at. Cost: two reads of X, and
    milliseconds for C(n, f) of a few thousand. Where clients have weights: of the sets of weight at least
    1 − W that would have less without any of their clients, each decomposed.

    >>> from trilemma import aggregation as agg
    >>> import torch
    >>> out = agg.smea(f=1)(torch.tensor([[1.0], [2.0], [3.0], [4.5], [4.6]]))
    >>> out.value, out.info.exact, round(out.info.objective, 4)
    (tensor([3.5250]), True, 1.1769)
    """

    budget: int = Field(default=5_000_000, gt=0, description="how many subsets may be looked at")
    seconds: float = Field(default=60.0, gt=0, allow_inf_nan=True, description="how long the search may take")
    criterion: ClassVar[Criterion] = "spectral"
    weighs: ClassVar[bool] = True

    def weigh(self, geometry: Geometry, f: int) -> Weighing:
        """Return equal weights for the subset of n − f messages with the smallest top eigenvalue."""
        n, G = geometry.n, geometry.inner[:-1, :-1]
        if geometry.mass is not None:
            return self._weigh(G, geometry.mass, geometry.counted(f)[0])
        suspect = np.argsort(Caf(f=f).weigh(geometry, f).weights, kind="stable")
        search = _Search(G, suspect, n - f, self.budget, time.monotonic() + self.seconds)
        search.offer(np.sort(suspect[f:]))
        lower = search.run(f) if f else search.best
        weights = np.zeros(n)
        weights[search.kept] = 1.0 / (n - f)
        return Weighing(
            weights,
            exact=lower >= search.best * STRICTLY,
            iterations=search.seen,
            objective=search.best / (n - f),
            lower_bound=min(lower, search.best) / (n - f),
        )

    def _weigh(self, G: Array, mass: Array, liars: float) -> Weighing:
        """Return the weights of the subset that varies least, of those just heavy enough."""
        kept = 1.0 - np.array(list(itertools.islice(removals(mass, liars), self.budget // len(G) + 1)))
        if len(kept) * len(G) > self.budget:
            raise UserError(
                f"smea looks at every set of weighted clients that may be honest: of {len(G)} more than "
                f"its budget = {self.budget:,} has room for; allowed: caf, or a larger budget"
            )
        shares = kept * mass
        shares /= shares.sum(axis=1, keepdims=True)
        tops = np.empty(len(shares))
        for first in range(0, len(shares), AT_ONCE):
            p = shares[first : first + AT_ONCE]
            to = p @ G
            H = G - to[:, :, None] - to[:, None, :] + (to * p).sum(axis=1)[:, None, None]
            root = np.sqrt(p)
            tops[first : first + AT_ONCE] = np.linalg.eigvalsh(root[:, :, None] * H * root[:, None, :])[:, -1]
        best = int(np.argmin(tops))
        least = max(float(tops[best]), 0.0)
        return Weighing(shares[best], iterations=len(tops), objective=least, lower_bound=least)

    def kappa(self, n: int) -> float:
        """Return κ of Proposition 5.1; with weights W counts in place of f/n."""
        self.check(n)
        f, total = self.counted(n)
        return 4 * f / (total - f) * (1 + f / (total - 2 * f)) ** 2


def removals(mass: Array, most: float) -> Iterator[tuple[int, ...]]:
    """Yield every set of clients (as n zeros and ones) of weight ≤ `most` to which none can be added.

    >>> list(removals(np.array([0.5, 0.25, 0.25]), 0.5))
    [(1, 0, 0), (0, 1, 1)]
    """
    room = most + 1e-12 * float(mass.sum())

    def further(place: int, left: float, skipped: float) -> Iterator[tuple[int, ...]]:
        if place == len(mass):
            if skipped > left:  # the lightest that was left in does not fit any more
                yield ()
            return
        own = float(mass[place])
        if own <= left:
            yield from ((1, *rest) for rest in further(place + 1, left - own, skipped))
        yield from ((0, *rest) for rest in further(place + 1, left, min(skipped, own)))

    return further(0, room, math.inf)


def scatter(G: Array, kept: Any) -> Array:
    """Return the inner products of the kept rows around their mean."""
    H = G[np.ix_(kept, kept)]
    to = H.mean(axis=1)
    result: Array = H - to[:, None] - to[None, :] + to.mean()
    return result


@dataclass
class _Search:
    """The best subset so far and what has been looked at; eigenvalues are of undivided scatter matrices."""

    G: Array
    suspect: Any
    size: int
    budget: int
    deadline: float
    best: float = math.inf
    kept: Any = None
    seen: int = 0
    vectors: list[Array] = field(default_factory=list)

    def offer(self, kept: Any) -> float:
        """Decompose a complete subset; keep it if it is the best. Returns its top eigenvalue."""
        value, vector = top_eigenpair(scatter(self.G, kept))
        value = max(value, 0.0)
        if value < self.best * STRICTLY or self.kept is None:
            self.best, self.kept = value, kept
        full = np.zeros(len(self.G))
        full[kept] = vector
        self.vectors = [full, *self.vectors[:7]]
        return value

    def run(self, f: int) -> float:
        """Search all ways to remove f rows; return a lower bound on the smallest top eigenvalue."""
        order = itertools.count()
        open_: list[tuple[float, int, tuple[int, ...], int]] = [(self._bound((), 0, f), next(order), (), 0)]
        while open_:
            bound, _, removed, decided = heapq.heappop(open_)
            if bound >= self.best * STRICTLY:
                return self.best
            left, free = f - len(removed), len(self.suspect) - decided
            count = math.comb(free, left)
            if count * len(self.G) <= NUMBERS and self.seen + count <= self.budget:
                self._enumerate(removed, decided, left)
                continue
            if self.seen >= self.budget or time.monotonic() > self.deadline:
                return bound  # the heap holds no smaller one
            row = int(self.suspect[decided])
            for child in ((*removed, row), removed):
                if f - len(child) <= free - 1:
                    below = max(bound, self._bound(child, decided + 1, f))
                    if below < self.best * STRICTLY:
                        heapq.heappush(open_, (below, next(order), child, decided + 1))
        return self.best

    def _bound(self, removed: tuple[int, ...], decided: int, f: int) -> float:
        """Bound the top eigenvalue of every subset below a node of the tree."""
        self.seen += 1
        inside = np.setdiff1d(self.suspect[:decided], removed)
        result = top_eigenpair(scatter(self.G, inside))[0] if len(inside) > 1 else 0.0
        present = np.setdiff1d(np.arange(len(self.G)), removed)
        H = scatter(self.G, present)
        value, vector = top_eigenpair(H)
        if value > 0.0:
            along = H @ vector / math.sqrt(value)
            free = ~np.isin(present, inside)
            least = least_scatter(along, free, f - len(removed))
            # Of a row far from all others rounding is left when it is taken out again: that bounds nothing.
            rounding = 16 * len(present) * float(np.finfo(float).eps) * value
            result = max(result, float(least - rounding))
        return result

    def _enumerate(self, removed: tuple[int, ...], decided: int, left: int) -> None:
        """Settle all subsets that also remove `left` of the undecided rows."""
        choices = np.array(list(itertools.combinations(self.suspect[decided:], left)), dtype=np.int64)
        self.seen += len(choices)
        mask = np.ones((len(choices), len(self.G)))
        mask[:, list(removed)] = 0.0
        np.put_along_axis(mask, choices, 0.0, axis=1)
        alive = _Alive(self.G, mask, self.size, self.vectors[0])
        for _ in range(200):
            alive.drop(self.best * STRICTLY)
            if not len(alive.quotient):
                return
            if len(alive.quotient) <= 16:
                break
            for i in np.argsort(alive.quotient, kind="stable")[:2]:
                alive.quotient[i] = self.offer(np.flatnonzero(alive.mask[i]))
            alive.drop(self.best * STRICTLY)
            alive.improve()
        for i in np.argsort(alive.quotient, kind="stable"):
            if alive.quotient[i] < self.best * STRICTLY:
                self.offer(np.flatnonzero(alive.mask[i]))


class _Alive:
    """Subsets still in the race, each with a vector u and its Rayleigh quotient, a lower bound on λ_max."""

    def __init__(self, G: Array, mask: Array, size: int, start: Array) -> None:
        self.G, self.size, self.mask = G, size, mask
        self.u = self._unit(self._centred(mask * start))
        self.image = self._apply(self.u)
        self.quotient = np.einsum("ij,ij->i", self.u, self.image)

    def _centred(self, v: Array) -> Array:
        result: Array = self.mask * (v - (self.mask * v).sum(axis=1, keepdims=True) / self.size)
        return result

    def _apply(self, v: Array) -> Array:
        return self._centred(v @ self.G)

    @staticmethod
    def _unit(v: Array) -> Array:
        length = np.sqrt(np.einsum("ij,ij->i", v, v))[:, None]
        result: Array = np.divide(v, length, out=np.zeros_like(v), where=length > 0.0)
        return result

    def drop(self, threshold: float) -> None:
        """Leave out the subsets whose quotient has reached the threshold."""
        keep = self.quotient < threshold
        if not keep.all():
            self.mask, self.u, self.image = self.mask[keep], self.u[keep], self.image[keep]
            self.quotient = self.quotient[keep]

    def improve(self) -> None:
        """Replace each u by the best combination of u and its residual (Rayleigh-Ritz in two dimensions)."""
        # Centred again: otherwise rounding would grow by λ/‖residual‖ in every step.
        residual = self._unit(self._centred(self.image - self.quotient[:, None] * self.u))
        pushed = self._apply(residual)
        cross = np.einsum("ij,ij->i", self.u, pushed)
        other = np.einsum("ij,ij->i", residual, pushed)
        angle = 0.5 * np.arctan2(2.0 * cross, self.quotient - other)
        c, s = np.cos(angle)[:, None], np.sin(angle)[:, None]
        self.u = c * self.u + s * residual
        self.image = c * self.image + s * pushed
        self.quotient = np.einsum("ij,ij->i", self.u, self.image) / np.einsum("ij,ij->i", self.u, self.u)


def least_scatter(values: Array, free: Any, count: int) -> float:
    """Return the least Σ (v − mean)² after removing `count` of the free values, the outermost ones.

    >>> least_scatter(np.array([0.0, 1.0, 2.0, 50.0]), np.array([True, True, True, True]), 1)
    2.0
    """
    loose = np.sort(values[free])
    left = np.concatenate([[0.0], np.cumsum(loose[:count])])
    left2 = np.concatenate([[0.0], np.cumsum(np.square(loose[:count]))])
    right = np.concatenate([[0.0], np.cumsum(loose[::-1][:count])])
    right2 = np.concatenate([[0.0], np.cumsum(np.square(loose[::-1][:count]))])
    total = values.sum() - left - right[::-1]
    total2 = np.square(values).sum() - left2 - right2[::-1]
    return float(max((total2 - np.square(total) / (len(values) - count)).min(), 0.0))

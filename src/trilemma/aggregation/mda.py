"""MDA, minimum-diameter averaging.

The mean of the n − f messages whose largest pairwise distance is smallest. A diameter t is possible exactly
if f messages touch every pair farther apart than t: a vertex cover of size f. The smallest such t is found
by bisection over the distances that occur, each vertex cover by a bounded search tree: a message with more
than f far partners must go, otherwise branch on the one with the most: it goes, or all its partners do.

Reference: Rousseeuw, "Multivariate estimation with high breakdown point", 1985; El Mhamdi, Guerraoui,
Rouault, "The hidden vulnerability of distributed learning in Byzantium", ICML 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trilemma.aggregation.passes.gram import Geometry
from trilemma.aggregation.steps.registry import rules
from trilemma.aggregation.steps.rule import Geometric
from trilemma.aggregation.steps.types import Array, Weighing

BUDGET = 200_000
"""Nodes of all search trees of one call together."""


@rules.register("mda")
class MinimumDiameter(Geometric):
    """Mean of the n − f messages of smallest diameter.

    Exact for all but adversarially dense cases: beyond a budget of search nodes the answer is the best
    found, `info.exact` is False and `info.lower_bound` a proven bound on the smallest diameter;
    `info.objective` is the diameter of the answer. Where several subsets share the smallest diameter,
    messages that need not go but may are chosen by the same rule among the rest. No κ is stated here for f
    > 0. Cost: two reads of X.

    >>> from trilemma import aggregation as agg
    >>> import torch
    >>> agg.mda(f=1)(torch.tensor([[0.0], [1.0], [1.5], [9.0]])).value
    tensor([0.8333])
    """

    def weigh(self, geometry: Geometry, f: int) -> Weighing:
        """Return equal weights for the n − f messages of smallest diameter."""
        kept, exact, lower = tightest(geometry.distances, f)
        weights = np.zeros(geometry.n)
        weights[kept] = 1.0 / len(kept)
        diameter = float(np.sqrt(geometry.distances[np.ix_(kept, kept)].max()))
        return Weighing(weights, exact=exact, objective=diameter, lower_bound=lower)

    def kappa(self, n: int) -> float | None:
        """Return 0 without Byzantine clients, where this is the mean, else None."""
        self.check(n)
        return 0.0 if self.f == 0 else None


class _OutOfBudget(Exception):
    pass


def tightest(distances: Array, f: int, budget: int = BUDGET) -> tuple[Any, bool, float]:
    """Return n − f rows of smallest diameter, whether that is proven, and a lower bound on the diameter.

    >>> D = np.square(np.subtract.outer([0.0, 1.0, 1.5, 9.0], [0.0, 1.0, 1.5, 9.0]))
    >>> kept, exact, lower = tightest(D, 1)
    >>> kept.tolist(), exact, lower
    ([0, 1, 2], True, 1.5)
    """
    n = len(distances)
    # Outliers first: ties are then broken by distance, not by the order of the clients.
    order = np.argsort(-np.sqrt(distances).sum(axis=1), kind="stable")
    D = distances[np.ix_(order, order)]
    sizes = np.unique(D)
    kept = _around_one(D, n - f)
    possible = int(np.searchsorted(sizes, D[np.ix_(kept, kept)].max()))
    impossible, exact, search = -1, True, _Covers(D, budget)
    while possible - impossible > 1:
        middle = (possible + impossible) // 2
        try:
            cover = search.cover(float(sizes[middle]), f)
        except _OutOfBudget:
            exact = False
            break
        if cover is None:
            impossible = middle
        else:
            possible, kept = middle, _without(D, cover, f, search.left)
    return np.sort(order[kept]), exact, float(np.sqrt(sizes[impossible + 1]))


def _around_one(D: Array, size: int) -> Any:
    """Return the best of the sets of a row and those nearest to it: at most twice the smallest diameter."""
    near = np.argsort(D, axis=1, kind="stable")[:, :size]
    diameters = [D[np.ix_(rows, rows)].max() for rows in near]
    return near[int(np.argmin(diameters))]


def _without(D: Array, cover: int, f: int, budget: int) -> Any:
    """Return the rows outside the cover; removals that it left over are spent as well as can be."""
    rest = np.array([i for i in range(len(D)) if not cover >> i & 1])
    spare = f - (len(D) - len(rest))
    if not spare:
        return rest
    if not cover:  # nothing to be gained: drop the outermost
        return rest[spare:]
    return rest[tightest(D[np.ix_(rest, rest)], spare, max(budget, 1))[0]]


@dataclass
class _Covers:
    """Search trees for small vertex covers of the graph of pairs farther apart than t, with one budget."""

    D: Array
    left: int

    def cover(self, t: float, size: int) -> int | None:
        """Return a set of at most `size` rows, as bits, that touches every pair farther apart than t."""
        far = [int.from_bytes(np.packbits(row, bitorder="little").tobytes(), "little") for row in t < self.D]
        return self._search(far, (1 << len(far)) - 1, size)

    def _search(self, far: list[int], alive: int, size: int) -> int | None:
        """Return a cover of the rows `alive`: it has the row of most pairs, or else all its partners."""
        self.left -= 1
        if self.left < 0:
            raise _OutOfBudget
        taken = 0
        while True:
            degrees = [(far[i] & alive).bit_count() if alive >> i & 1 else 0 for i in range(len(far))]
            most = max(degrees)
            if most == 0:
                return taken
            if size <= 0 or sum(degrees) > 2 * size * most:  # `size` rows cannot touch that many pairs
                return None
            row = degrees.index(most)
            if most <= size:
                break
            taken, alive, size = taken | 1 << row, alive & ~(1 << row), size - 1
        partners = far[row] & alive
        for group, count in ((1 << row, 1), (partners, most)):
            if count <= size:
                found = self._search(far, alive & ~group, size - count)
                if found is not None:
                    return taken | group | found
        return None

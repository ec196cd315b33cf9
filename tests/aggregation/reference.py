"""Slow, obvious versions of every aggregation rule and mixing step, in float64 numpy.

They follow the definitions literally: subsets are enumerated, covariances are decomposed, coordinates are
visited one by one. Nothing here is fast, clever or shared with the package: that makes it a reference.

Conventions, where the literature leaves room:

* rows of X are clients, f of them may be Byzantine, norms are Euclidean;
* the median of an even number of values is the mean of the two in the middle;
* the first row wins a tie between rows, the first subset in lexicographic order a tie between subsets;
* a tie between values of one coordinate leaves more than one right answer: `Answer.slack` says how far apart
  they are;
* CAF and Filter take the maximum of τ over the rows that still have weight. Over all rows (as printed) a
  removed outlier would keep the maximum, no further row would ever be removed, and the claim of the
  paper that one weight reaches zero in every step would not hold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trilemma.testing.adversary import subset_moments

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Answer:
    """The value of a rule, each client's share in it, and how far ties make the value ambiguous.

    `weights` is None where several sets of weights give the same value and the definition prefers none.
    """

    value: Array
    weights: Array | None
    slack: Array


Rule = Callable[[Array, int], Answer]
Mixing = Callable[[Array, int], Array]


def _weighted(weights: Array, X: Array) -> Answer:
    used = weights != 0  # a removed row does not take part, however large it is
    return Answer(weights[used] @ X[used], weights, np.zeros(X.shape[1]))


def _uniform_on(rows: list[int], X: Array) -> Answer:
    weights = np.zeros(len(X))
    weights[rows] = 1 / len(rows)
    return _weighted(weights, X)


def _squared_distances(X: Array) -> Array:
    return np.array([[math.fsum((a - b) ** 2) for b in X] for a in X]).reshape(len(X), len(X))


# -------------------------------------------------------------------------------------------- averages


def mean(X: Array, f: int) -> Answer:
    """Σ x_i / n, whatever f is."""
    return _uniform_on(list(range(len(X))), X)


def monna(X: Array, f: int, pivot: int = 0) -> Answer:
    """Mean of the n − f rows nearest to the pivot row, which counts itself (Farhadkhani et al., 2023)."""
    distances = _squared_distances(X)[pivot]
    distances[pivot] = -1.0  # the pivot comes first even among its duplicates
    return _uniform_on(list(np.argsort(distances, kind="stable")[: len(X) - f]), X)


# ---------------------------------------------------------------------------- coordinate by coordinate


def _shares(X: Array, columns: list[Array]) -> Array | None:
    """The rows' shares, averaged over columns; None where equal values leave open whose they are."""
    tied = any(len(np.unique(column)) < len(column) for column in X.T)
    return None if tied or not columns else np.mean(columns, axis=0)


def cwmed(X: Array, f: int) -> Answer:
    """Median of each coordinate (Yin et al., 2018)."""
    n, d = X.shape
    middle = [(n - 1) // 2, n // 2]
    shares = []
    for column in X.T:
        share = np.zeros(n)
        for rank in middle:
            share[np.argsort(column, kind="stable")[rank]] += 0.5
        shares.append(share)
    return Answer(np.median(X, axis=0), _shares(X, shares), np.zeros(d))


def cwtm(X: Array, f: int) -> Answer:
    """Mean of each coordinate without its f smallest and f largest values (Yin et al., 2018)."""
    n, d = X.shape
    values, shares = np.zeros(d), []
    for j, column in enumerate(X.T):
        kept = np.argsort(column, kind="stable")[f : n - f]
        values[j] = math.fsum(column[kept]) / (n - 2 * f)
        share = np.zeros(n)
        share[kept] = 1 / (n - 2 * f)
        shares.append(share)
    return Answer(values, _shares(X, shares), np.zeros(d))


def _mean_around_median(X: Array, count: int) -> Answer:
    """Per coordinate, the mean of the `count` values closest to the median.

    Where the last value in and the first value out are equally far, both answers are right.
    """
    n, d = X.shape
    values, slack, shares = np.zeros(d), np.zeros(d), []
    for j, column in enumerate(X.T):
        distance = np.abs(column - np.median(column))
        favour_low = np.lexsort((column, distance))[:count]
        favour_high = np.lexsort((-column, distance))[:count]
        values[j] = math.fsum(column[favour_low]) / count
        slack[j] = abs(math.fsum(column[favour_high]) / count - values[j])
        share = np.zeros(n)
        share[favour_low] = 1 / count
        shares.append(share)
    return Answer(values, _shares(X, shares), slack)


def meamed(X: Array, f: int) -> Answer:
    """Mean of the n − f values closest to the median, in each coordinate (Xie et al., 2018)."""
    return _mean_around_median(X, len(X) - f)


# ------------------------------------------------------------------------------------------- distances


def _krum_scores(squared: Array, f: int) -> Array:
    n = len(squared)
    others = [np.sort(np.delete(row, i)) for i, row in enumerate(squared)]
    return np.array([math.fsum(row[: max(n - f - 2, 0)]) for row in others])


def krum(X: Array, f: int) -> Answer:
    """The row of least Σ squared distances to its n − f − 2 nearest others (Blanchard et al., 2017)."""
    return _uniform_on([int(np.argmin(_krum_scores(_squared_distances(X), f)))], X)


def multikrum(X: Array, f: int) -> Answer:
    """Mean of the n − f rows of smallest Krum score."""
    scores = _krum_scores(_squared_distances(X), f)
    return _uniform_on(list(np.argsort(scores, kind="stable")[: len(X) - f]), X)


def bulyan_selection(X: Array, f: int) -> list[int]:
    """The n − 2f rows that Krum picks one after another, each time among those not yet picked."""
    squared, pool, chosen = _squared_distances(X), list(range(len(X))), []
    for _ in range(len(X) - 2 * f):
        scores = _krum_scores(squared[np.ix_(pool, pool)], f)
        chosen.append(pool.pop(int(np.argmin(scores))))
    return sorted(chosen)


def bulyan(X: Array, f: int) -> Answer:
    """Bulyan (El Mhamdi et al., 2018), in two stages.

    Select n − 2f rows by repeated Krum; then, per coordinate, the mean of the n − 4f values closest to the
    median of the selected ones.
    """
    chosen = bulyan_selection(X, f)
    inner = _mean_around_median(X[chosen], len(X) - 4 * f)
    if inner.weights is None:
        return inner
    weights = np.zeros(len(X))
    weights[chosen] = inner.weights
    return Answer(inner.value, weights, inner.slack)


def diameter(X: Array, rows: tuple[int, ...]) -> float:
    """The largest distance between two of the rows."""
    squared = _squared_distances(X[list(rows)])
    return math.sqrt(squared.max())


def mda(X: Array, f: int) -> Answer:
    """Mean of the n − f rows of smallest diameter (El Mhamdi et al., 2018), over all subsets.

    The diameter hangs on one pair of rows, so that several subsets often share the smallest one: among those
    `minimum_diameter_subsets` lists, this is the first.
    """
    return _uniform_on(list(minimum_diameter_subsets(X, f)[0]), X)


def minimum_diameter_subsets(X: Array, f: int, tolerance: float = 1e-12) -> list[tuple[int, ...]]:
    """All subsets of n − f rows whose diameter is the smallest, up to a relative tolerance."""
    n = len(X)
    squared = _squared_distances(X)
    subsets = list(itertools.combinations(range(n), n - f))
    diameters = np.array([squared[np.ix_(rows, rows)].max() for rows in subsets])
    best = diameters.min() * (1 + tolerance)
    return [rows for rows, size in zip(subsets, diameters, strict=True) if size <= best]


def geomed(X: Array, f: int) -> Answer:
    """The point m of smallest Σ‖x_i − m‖ (Chen et al., 2017), by Newton's method on the convex objective.

    A row x_k with multiplicity r is the optimum exactly when ‖Σ_{x_i ≠ x_k} (x_i − x_k)/‖x_i − x_k‖‖ ≤ r;
    otherwise the objective is smooth around its optimum. In one dimension an even number of rows leaves
    an interval of optima, all of them right.
    """
    n, d = X.shape
    zero = np.zeros(d)
    if d == 0 or (X[0] == X).all():
        return Answer(X[0].copy(), None, zero)
    if d == 1:
        low, high = np.sort(X[:, 0])[[(n - 1) // 2, n // 2]]
        return Answer(np.array([(low + high) / 2]), None, np.array([(high - low) / 2]))
    centre = np.median(X, axis=0)
    Y = X - centre
    for k in range(n):
        distances = np.sqrt([math.fsum((y - Y[k]) ** 2) for y in Y])
        far = distances > 0
        pull = ((Y[far] - Y[k]) / distances[far, None]).sum(axis=0)
        if np.linalg.norm(pull) <= n - far.sum():
            return Answer(X[k].copy(), None, zero)
    m = _newton_geometric_median(Y)
    return Answer(centre + m, None, zero)


def _newton_geometric_median(Y: Array) -> Array:
    def objective(m: Array) -> float:
        return math.fsum(np.linalg.norm(Y - m, axis=1))

    m = np.zeros(Y.shape[1])
    if (np.linalg.norm(Y - m, axis=1) == 0).any():  # start away from the rows, where the gradient is defined
        nearest = np.partition(np.linalg.norm(Y, axis=1), 1)[1]
        m = m + 0.01 * nearest * np.linspace(0.5, 1.0, Y.shape[1]) / math.sqrt(Y.shape[1])
    for _ in range(500):  # Weiszfeld, to get near
        weights = 1 / np.maximum(np.linalg.norm(Y - m, axis=1), np.finfo(float).tiny)
        m = weights / weights.sum() @ Y
    for _ in range(50):
        difference = m - Y
        distance = np.linalg.norm(difference, axis=1)
        units = difference / distance[:, None]
        gradient = units.sum(axis=0)
        hessian = (1 / distance).sum() * np.eye(len(m)) - (units / distance[:, None]).T @ units
        step = np.linalg.lstsq(hessian, gradient, rcond=None)[0]
        size = 1.0
        while size > 1e-12 and objective(m - size * step) > objective(m):
            size /= 2
        m = m - size * step
        if np.linalg.norm(step) <= 1e-15 * np.linalg.norm(m):
            break
    return m


def cc(X: Array, f: int, radius: float, steps: int, start: Array | None = None) -> Answer:
    """Centred clipping: v ← v + mean_i clip(x_i − v, radius), repeated (Karimireddy et al., 2021)."""
    weights = np.zeros(len(X))
    v = np.zeros(X.shape[1]) if start is None else start
    for _ in range(steps):
        norms = np.array([math.hypot(*(x - v)) for x in X])
        shrink = np.array([1.0 if norm <= radius else radius / norm for norm in norms])
        weights = weights * (1 - shrink.mean()) + shrink / len(X)
        v = v + np.mean([s * (x - v) for s, x in zip(shrink, X, strict=True)], axis=0)
    return Answer(v, weights if start is None else None, np.zeros(X.shape[1]))


# --------------------------------------------------------------------------------------------- spectra


def smea(X: Array, f: int) -> Answer:
    """Mean of the n − f rows of least top covariance eigenvalue (Allouah et al., 2023), over all subsets."""
    subsets, _, _, tops = subset_moments(X, f)
    return _uniform_on(list(subsets[np.argmin(tops)]), X)


def reweightings(X: Array) -> Iterator[tuple[Array, float]]:
    """The sequence (c, σ_c²) that CAF and Filter walk through, starting from c = 1.

    μ_c = Σ c_i x_i / Σ c_i, Σ_c = Σ c_i (x_i − μ_c)(x_i − μ_c)ᵀ / Σ c_i with top eigenpair (σ_c², v),
    τ_i = ⟨v, x_i − μ_c⟩², c_i ← c_i (1 − τ_i / max τ). Ends where nothing varies any more.
    """
    c = np.ones(len(X))
    while c.sum() > 0:
        active = c > 0
        mu = c[active] @ X[active] / c.sum()
        centred = X[active] - mu
        scaled = np.sqrt(c[active] / c.sum())[:, None] * centred
        _, singular, directions = np.linalg.svd(scaled, full_matrices=False)
        yield c, float(singular[0] ** 2) if singular.size else 0.0
        if not singular.size:
            return
        tau = np.zeros(len(X))  # exactly summed, so that equal rows have equal τ and leave together
        tau[active] = [math.fsum(row * directions[0]) ** 2 for row in centred]
        if tau.max() == 0:
            return
        c = c * (1 - tau / tau.max())


def caf(X: Array, f: int) -> Answer:
    """Algorithm 2 of Allouah et al. (2025): the μ_c of smallest σ_c among the steps with Σc > n − 2f."""
    n = len(X)
    best, smallest = np.ones(n), math.inf
    for c, variance in reweightings(X):
        if c.sum() <= n - 2 * f:
            break
        if variance <= smallest:
            best, smallest = c, variance
    return _weighted(best / best.sum(), X)


def filter_threshold(n: int, f: int) -> float:
    """η = 2n(n − f)/(n − 2f)²: Filter stops at σ_c² ≤ η σ₀²."""
    return 2 * n * (n - f) / (n - 2 * f) ** 2


def filter_(X: Array, f: int, bound: float = 0.0) -> Answer:
    """Filter (Diakonikolas et al., 2017): the first μ_c with σ_c² ≤ η·bound.

    `bound` is σ₀², a bound on the top eigenvalue of the honest covariance. Where no step reaches it
    (always, for bound = 0) the answer is the last step whose remaining weight exceeds n − 2f.
    """
    n = len(X)
    last = np.ones(n)
    for c, variance in reweightings(X):
        if c.sum() <= n - 2 * f:
            break
        last = c
        if variance <= filter_threshold(n, f) * bound:
            break
    return _weighted(last / last.sum(), X)


# --------------------------------------------------------------------------------------------------- mixing
# A mixing step is a matrix A whose rows say how the new rows are made of the old ones: X becomes A X, and the
# shares w of the new rows become the shares Aᵀ w of the clients.


def nnm(X: Array, f: int) -> Array:
    """Each row becomes the mean of its n − f nearest rows, itself included (Allouah et al., 2023)."""
    n = len(X)
    squared = _squared_distances(X)
    np.fill_diagonal(squared, -1.0)  # a row is its own nearest one even among its duplicates
    A = np.zeros((n, n))
    for i, row in enumerate(squared):
        A[i, np.argsort(row, kind="stable")[: n - f]] = 1 / (n - f)
    return A


def clip(X: Array, f: int, radius: float) -> Array:
    """Each row is scaled down to the radius where it is longer."""
    norms = [math.hypot(*x) for x in X]
    return np.diag([1.0 if norm <= radius else radius / norm for norm in norms])


def arc(X: Array, f: int) -> Array:
    """Clip the ⌊2(f/n)(n − f)⌋ longest rows to the norm of the next one (Allouah et al., 2025)."""
    n = len(X)
    longest_first = sorted((math.hypot(*x) for x in X), reverse=True)
    return clip(X, f, longest_first[2 * f * (n - f) // n])


def bucketings(n: int, size: int) -> Iterator[Array]:
    """Every outcome of bucketing: the means of random buckets of `size` rows (Karimireddy et al., 2022).

    The last bucket takes what is left over.
    """
    seen = set()
    for order in itertools.permutations(range(n)):
        buckets = [tuple(sorted(order[i : i + size])) for i in range(0, n, size)]
        label = (tuple(sorted(buckets[:-1])), buckets[-1])
        if label in seen:
            continue
        seen.add(label)
        A = np.zeros((len(buckets), n))
        for row, bucket in zip(A, buckets, strict=True):
            row[list(bucket)] = 1 / len(bucket)
        yield A


def chain(mixings: Sequence[Mixing], rule: Rule, X: Array, f: int) -> Answer:
    """Mix step by step, then aggregate; shares are those of the clients, before mixing."""
    n, d = X.shape
    shares, mixed = np.eye(n), X
    for mixing in mixings:
        A = mixing(mixed, f)
        shares = A @ shares
        mixed = np.array([row[row != 0] @ mixed[row != 0] for row in A]).reshape(len(A), d)
    answer = rule(mixed, f)
    weights = None if answer.weights is None else shares.T @ answer.weights
    return Answer(answer.value, weights, answer.slack)


# ------------------------------------------------------------------------------------------ the bounds

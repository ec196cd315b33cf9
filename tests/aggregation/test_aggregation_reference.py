"""Every rule, mixing step and a set of chains against a slow, obvious version, and the papers' propositions.

`RULES` and `MIXINGS` name the reference of everything that is registered, or say why there is none. What
holds for rules whoever wrote them is in `trilemma.testing.test_rules`.

An answer may be off by 1e-4 of the *spread* of its input (`trilemma.testing.inputs`), plus what rounding the
exact answer to the input's dtype costs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import reference as ref
import torch
from reference import Answer, Array

from trilemma import aggregation as agg
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.testing.adversary import climb, robustness_ratio, starting_points, subset_moments
from trilemma.testing.inputs import D, F, N, attacked, float64, sample, spread
from trilemma.testing.test_rules import SIZES, build, subjects

KEY = Key(seed=7)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = 1e-4


# -------------------------------------------------------------------------- what is known of each rule


@dataclass(frozen=True)
class Known:
    """How a rule or mixing step is checked."""

    # Its slow version, given the built rule (for its parameters); for a mixing step, the matrix.
    reference: Callable[[Any, Array, int], Any] | None = None
    no_reference: str = ""  # why there is none
    fewest: Callable[[int], int] = lambda f: 2 * f + 1  # the smallest n it is compared at


def plain(function: Callable[[Array, int], Any]) -> Callable[[Any, Array, int], Any]:
    return lambda rule, X, f: function(X, f)


RULES = {
    "mean": Known(plain(ref.mean)),
    "cwmed": Known(plain(ref.cwmed)),
    "cwtm": Known(plain(ref.cwtm)),
    "meamed": Known(plain(ref.meamed)),
    "krum": Known(plain(ref.krum), fewest=lambda f: 2 * f + 3),
    "multikrum": Known(plain(ref.multikrum), fewest=lambda f: 2 * f + 3),
    "mda": Known(plain(ref.mda)),
    "geomed": Known(plain(ref.geomed)),
    "cc": Known(lambda rule, X, f: ref.cc(X, f, rule.radius, rule.steps)),
    "caf": Known(plain(ref.caf)),
    "smea": Known(plain(ref.smea)),
    "filter": Known(lambda rule, X, f: ref.filter_(X, f, rule.bound)),
    "bulyan": Known(plain(ref.bulyan), fewest=lambda f: 4 * f + 3),
    "monna": Known(plain(ref.monna)),
}
MIXINGS = {
    "nnm": Known(plain(ref.nnm)),
    "bucketing": Known(no_reference="drawn; see test_bucketing_is_one_of_all_bucketings"),
    "clip": Known(lambda mixing, X, f: ref.clip(X, f, mixing.radius)),
    "arc": Known(plain(ref.arc)),
    "evidence": Known(
        no_reference="it leaves messages alone; the server asks it, tests/learning/test_evidence.py"
    ),
    **dict.fromkeys(
        ("noise-test", "noise-test-rank", "safeguard", "fltrust"),
        Known(no_reference="it leaves messages alone; the server asks it, tests/learning/test_filters.py"),
    ),
}
SUBJECTS = [s for s in subjects() if all(name in {**RULES, **MIXINGS} for name in s.split("+"))]


def known(subject: str) -> list[Known]:
    *mixings, rule = subject.split("+")
    return [*(MIXINGS[name] for name in mixings), RULES[rule]]


def fewest(subject: str, f: int) -> int:
    return max(one.fewest(f) for one in known(subject))


def parts(subject: str, f: int) -> list[Any]:
    """The mixing steps and the rule of a subject, each built alone, for their parameters."""
    *mixings, rule = subject.split("+")
    return [*(agg.mixings[name](f=f) for name in mixings), agg.rules[rule](f=f)]


def expected(subject: str, X: Array, f: int) -> Answer:
    steps = [
        functools.partial(one.reference, part)  # type: ignore[arg-type]
        for one, part in zip(known(subject), parts(subject, f), strict=True)
    ]
    return ref.chain(steps[:-1], steps[-1], X, f)


def bare(name: str) -> ref.Rule:
    """The reference of a rule that has no parameters."""
    return functools.partial(RULES[name].reference, None)  # type: ignore[arg-type]


def with_reference(subjects: list[str]) -> list[str]:
    return [s for s in subjects if all(one.reference is not None for one in known(s))]


def test_every_rule_is_accounted_for():
    for registry, table in ((agg.rules, RULES), (agg.mixings, MIXINGS)):
        missing = [n for n in registry if n not in table or not (table[n].reference or table[n].no_reference)]
        assert not missing, f"neither a reference nor a reason why there is none: {missing}"
        assert not set(table) - set(registry), "the table names rules that are not registered"


# ---------------------------------------------------------------------------------------------- inputs


def colluding(rng: np.random.Generator) -> Array:
    """All Byzantine rows equal, one standard deviation from the honest mean."""
    X = attacked(rng)
    X[N - F :] = X[: N - F].mean(axis=0) - 1.2 * X[: N - F].std(axis=0)
    return X


def offset(rng: np.random.Generator) -> Array:
    X = attacked(rng)
    return X + 1e6 * spread(X) / math.sqrt(D)  # a vector of norm 1e6 × the spread


def huge(rng: np.random.Generator, factor: float = 1e30) -> Array:
    X = attacked(rng)
    X[-1] *= factor
    return X


def large(rng: np.random.Generator) -> Array:
    return huge(rng, factor=1e4)


def tiny(rng: np.random.Generator) -> Array:
    return attacked(rng) * 1e-30


CASES = [
    *((attacked, dtype) for dtype in DTYPES),
    *((colluding, dtype) for dtype in DTYPES),
    *((offset, dtype) for dtype in DTYPES[:2]),  # half precision cannot hold both offset and spread
    *((huge, dtype) for dtype in DTYPES[:3]),
    *((tiny, dtype) for dtype in DTYPES[:3]),
    (large, torch.float16),  # which ends at 65504
]


def rounding(value: Array, dtype: torch.dtype) -> Array:
    """What rounding to the dtype moves a value by; in float64, also the rounding of the sums before it."""
    info = torch.finfo(dtype)
    units = 4 if dtype is torch.float64 else 0.505
    return units * info.eps * np.abs(value) + info.eps * info.smallest_normal


def assert_close(got: Any, answer: Answer, X: torch.Tensor, honest: int = N - F) -> None:
    error = np.maximum(np.abs(float64(got) - answer.value) - answer.slack, 0)
    allowed = TOLERANCE * spread(float64(X), honest) + np.linalg.norm(rounding(answer.value, got.dtype))
    assert np.linalg.norm(error) <= allowed, f"off by {np.linalg.norm(error):.3g}, allowed {allowed:.3g}"


# ---------------------------------------------------------------------------------- equal to reference


@pytest.mark.parametrize(("make", "dtype"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
@pytest.mark.parametrize("subject", with_reference(SUBJECTS))
def test_equals_the_reference(subject: str, make: Callable[[np.random.Generator], Array], dtype: torch.dtype):
    X = torch.from_numpy(make(np.random.default_rng(11))).to(dtype)
    answer = expected(subject, float64(X), F)
    out = build(subject, F)(X)
    assert_close(out.value, answer, X)
    if answer.weights is not None and not answer.slack.any():
        same = (X[:, None] == X).all(dim=2).double().numpy()  # equal rows share what they have
        np.testing.assert_allclose(same @ float64(out.weights), same @ answer.weights, atol=TOLERANCE)


@pytest.mark.parametrize("subject", with_reference(SUBJECTS))
def test_equals_the_reference_for_other_shapes(subject: str):
    compared = 0
    for n, f, d in [(9, 2, 1), (10, 2, 3), (11, 1, 40), (23, 4, 5), (12, 0, 6), (16, 3, 9)]:
        X = sample(n, n=n, f=f, d=d).float()
        # several subsets often share the smallest diameter: see test_minimum_diameter_whatever_the_tie
        tied = subject == "mda" and len(ref.minimum_diameter_subsets(float64(X), f)) > 1
        if n >= fewest(subject, f) and not tied:
            assert_close(build(subject, f)(X).value, expected(subject, float64(X), f), X, n - f)
            compared += 1
    assert compared >= 3


@pytest.mark.parametrize("subject", ["caf", "smea", "filter", "krum", "geomed", "nnm+cwmed", "nnm+caf"])
def test_equals_the_reference_for_many_inputs(subject: str):
    for seed in range(25):
        n = 5 + seed % 6
        f = 1 + seed % ((n - 3) // 2)
        X = sample(seed, n=n, f=f, d=1 + seed % 7).float()
        if n < fewest(subject, f) or n - f - 2 < 2:  # one neighbour each: Krum's nearest pair always ties
            continue
        assert_close(build(subject, f)(X).value, expected(subject, float64(X), f), X, n - f)


def test_the_reference_of_caf_removes_a_row_in_every_step():
    """As the paper says of Algorithm 2: so that at most 2f steps have weight left above n − 2f."""
    for seed in range(20):
        X = float64(sample(seed))
        removed = [(np.sum(c == 0), c.sum(), variance) for c, variance in ref.reweightings(X)]
        assert [count for count, _, _ in removed] == list(range(len(removed)))
        assert sum(left > N - 2 * F for _, left, _ in removed) <= 2 * F
        assert removed[0][1] == N
        top = np.linalg.eigvalsh(np.cov(X.T, bias=True))[-1]
        assert removed[0][2] == pytest.approx(top)


def test_the_reference_of_the_geometric_median_is_optimal():
    """Zero is a subgradient of Σ‖x_i − m‖ at its m: unit vectors to the other rows sum to at most its own."""
    for seed in range(20):
        X = float64(sample(seed, n=4 + seed % 9, f=1, d=2 + seed % 5))
        m = ref.geomed(X, 1).value
        distance = np.linalg.norm(X - m, axis=1)
        far = distance > 0
        pull = ((X[far] - m) / distance[far, None]).sum(axis=0)
        assert np.linalg.norm(pull) <= np.sum(~far) + 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_minimum_diameter_whatever_the_tie(seed: int):
    """Uniform weights on n − f rows, of the smallest diameter there is; which ones, a tie may leave open."""
    X = sample(seed, n=9, f=3, d=2)
    weights = float64(build("mda", 3)(X).weights)
    chosen = tuple(np.flatnonzero(weights))
    np.testing.assert_allclose(weights[list(chosen)], 1 / 6)
    assert chosen in ref.minimum_diameter_subsets(float64(X), 3)


@pytest.mark.parametrize("rule", ["mean", "cwmed", "caf"])
def test_bucketing_is_one_of_all_bucketings(rule: str):
    n, f = 6, 1
    X = sample(3, n=n, f=f, d=4)
    size = agg.mixings["bucketing"](f=f).bucket_size(n)
    assert 2 <= size < n
    assert math.ceil(n / size) > 2 * f, "as many buckets as a minority of f needs"
    possible = [
        ref.chain([lambda Y, f, A=A: A], bare(rule), float64(X), f).value for A in ref.bucketings(n, size)
    ]
    seen = set()
    for i in range(20):
        out = build(f"bucketing+{rule}", f)(X, key=KEY.fold(i))
        errors = [np.linalg.norm(float64(out.value) - value) for value in possible]
        assert min(errors) <= 1e-9
        seen.add(int(np.argmin(errors)))
    assert rule == "mean" or len(seen) > 3, "different keys give different buckets"


@pytest.mark.parametrize("subject", ["krum", "multikrum", "bulyan"])
def test_the_first_row_of_a_tied_pair_wins(subject: str):
    """With one neighbour each, as in Bulyan's last picks for f ≤ 2, the nearest pair always ties."""
    for seed in range(40):
        f = 1 + seed % 2
        n = 4 * f + 3 + seed % 3 if subject == "bulyan" else 2 * f + 1 if f == 2 else 4
        X = sample(seed, n=n, f=f).float()
        answer = expected(subject, float64(X), f)
        rule = build(subject, f)
        assert_close(rule(X).value, answer, X, n - f)
        assert_close(agg.stream(rule, list(X.split(7, dim=1))).value, answer, X, n - f)


# ------------------------------------------------------------------------------------------ robustness


def published_kappa(name: str, n: int, f: int) -> float:
    """The coefficients of the papers: CAF Prop. 4.1, SMEA Prop. 5.1, Filter Prop. B.1."""
    ratio = f / (n - 2 * f)
    return {
        "caf": 6 * f / (n - f) * (1 + ratio) ** 2,
        "smea": 4 * f / (n - f) * (1 + ratio) ** 2,
        "filter": 6 * f / (n - 2 * f) * (1 + ratio),
    }[name]


CLIMBED = [(3, 1, 2), (5, 1, 2), (5, 2, 1)]
"""Sizes at which the search is quick; the others are left to the slow tests."""


@pytest.mark.parametrize(
    ("n", "f", "d"),
    [
        *CLIMBED,
        *(
            pytest.param(*size, marks=pytest.mark.slow)
            for size in [*((n, f, 2) for n, f in SIZES), (9, 4, 1), (7, 2, 3)]
            if size not in CLIMBED
        ),
    ],
)
@pytest.mark.parametrize("name", ["caf", "smea"])
def test_propositions_4_1_and_5_1_against_an_adversary(name: str, n: int, f: int, d: int):
    """For all S of n − f rows, ‖F(x) − x̄_S‖² ≤ κ λ_max(Cov_S), on the worst input a search finds."""
    reference = bare(name)
    ratio, worst = climb(lambda X: reference(X, f).value, n, f, d, spectral=True, starts=5, patience=16)
    kappa = published_kappa(name, n, f)
    rule = agg.rules[name](f=f)
    assert rule.criterion == "spectral"
    assert rule.kappa(n=n) == pytest.approx(kappa)
    assert 0.1 * f / (n - 2 * f) < ratio <= kappa  # the search found something, and not too much
    assert robustness_ratio(rule(worst).value, worst, f, spectral=True) <= kappa


@pytest.mark.parametrize(("n", "f"), SIZES)
def test_filter_with_a_known_bound(n: int, f: int):
    """‖Filter(x) − x̄_S‖² ≤ κ σ₀² for every S with λ_max(Cov_S) ≤ σ₀²."""
    rng = np.random.default_rng(n)
    for X in itertools.islice(starting_points(rng, n, f, 2), 10):
        _, means, _, tops = subset_moments(X, f)
        for bound in np.quantile(tops, [0, 0.5, 1]):
            rule = agg.rules["filter"](f=f, bound=float(bound))
            assert rule.kappa(n=n) == pytest.approx(published_kappa("filter", n, f))
            error = ((rule(X).value - means[tops <= bound]) ** 2).sum(axis=1)
            assert error.max() <= published_kappa("filter", n, f) * bound


def test_only_bulyan_needs_more_than_a_majority_of_honest_clients():
    for name in RULES:
        n = 4 * F + 1 if name == "bulyan" else 2 * F + 1
        agg.rules[name](f=F).check(n)
        with pytest.raises(UserError):
            agg.rules[name](f=F).check(n - 1)


def test_monna_follows_its_pivot_in_any_order_of_the_others():
    X = sample(1)
    order = np.concatenate([[0], 1 + np.random.default_rng(1).permutation(N - 1)])
    straight, permuted = build("monna", F)(X), build("monna", F)(X[order])
    np.testing.assert_allclose(permuted.weights, straight.weights[order], atol=1e-9)
    np.testing.assert_allclose(permuted.value, straight.value, atol=1e-9)

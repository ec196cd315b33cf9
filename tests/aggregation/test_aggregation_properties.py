"""One suite for every registered rule, every mixing step and a set of chains.

The tests read the registries: what is registered is tested. Against `reference.py` a rule is compared where
`TRAITS` names its reference; a rule that is in neither fails `test_every_rule_is_accounted_for`.

Two lengths recur. The *spread* of an input is the root mean square distance of the honest rows to their
mean. An answer may be off by 1e-4 of it, plus what rounding the exact answer to the input's dtype costs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import reference as ref
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from reference import Answer, Array

from trilemma import aggregation as agg
from trilemma.errors import UserError
from trilemma.keys import Key

KEY = Key(seed=7)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = 1e-4


# -------------------------------------------------------------------------- what is known of each rule


@dataclass(frozen=True)
class Traits:
    """What the definition of a rule or mixing step promises, beyond what all of them promise."""

    # Its slow version, given the built rule (for its parameters); for a mixing step, the matrix.
    reference: Callable[[Any, Array, int], Any] | None = None
    no_reference: str = ""  # why there is none
    translates: bool = True  # F(X + b) = F(X) + b
    scales: bool = True  # F(aX) = a F(X), a of either sign
    stays: bool = True  # the value lies in the coordinate range of the rows, without counting zero as a row
    permutes: bool = True  # permuting clients permutes weights
    pivot: bool = False  # row 0 plays a special part: it stays first when rows are permuted
    fewest: Callable[[int], int] = lambda f: 2 * f + 1  # the smallest n it is defined for
    needs_minority: bool = True  # 2f ≥ n is refused


def plain(function: Callable[[Array, int], Any]) -> Callable[[Any, Array, int], Any]:
    return lambda rule, X, f: function(X, f)


RULES = {
    "mean": Traits(plain(ref.mean), needs_minority=False),
    "cwmed": Traits(plain(ref.cwmed)),
    "cwtm": Traits(plain(ref.cwtm)),
    "meamed": Traits(plain(ref.meamed)),
    "krum": Traits(plain(ref.krum), fewest=lambda f: 2 * f + 3),
    "multikrum": Traits(plain(ref.multikrum), fewest=lambda f: 2 * f + 3),
    "mda": Traits(plain(ref.mda)),
    "geomed": Traits(plain(ref.geomed)),
    "cc": Traits(
        lambda rule, X, f: ref.cc(X, f, rule.radius, rule.steps),
        translates=False,
        scales=False,
        stays=False,
        needs_minority=False,
    ),
    "caf": Traits(plain(ref.caf)),
    "smea": Traits(plain(ref.smea)),
    "filter": Traits(lambda rule, X, f: ref.filter_(X, f, rule.bound)),
    "bulyan": Traits(plain(ref.bulyan), fewest=lambda f: 4 * f + 3),
    "monna": Traits(plain(ref.monna), pivot=True),
}
MIXINGS = {
    "nnm": Traits(plain(ref.nnm)),
    "bucketing": Traits(no_reference="drawn; see test_bucketing_is_one_of_all_bucketings", permutes=False),
    "clip": Traits(
        lambda mixing, X, f: ref.clip(X, f, mixing.radius),
        translates=False,
        scales=False,
        stays=False,
        needs_minority=False,
    ),
    "arc": Traits(plain(ref.arc), translates=False, stays=False),
}
UNKNOWN = Traits(fewest=lambda f: 4 * f + 3)

CHAINS = [f"{mixing}+{rule}" for mixing in agg.mixings for rule in ("mean", "cwmed", "krum", "caf")]
CHAINS += ["nnm+cwtm", "nnm+geomed", "nnm+smea", "arc+nnm+cwmed", "clip+nnm+cwtm"]
CHAINS = [c for c in CHAINS if all(name in {**agg.rules, **agg.mixings} for name in c.split("+"))]
SUBJECTS = [*agg.rules, *CHAINS]


def traits_of(subject: str) -> list[Traits]:
    *mixings, rule = subject.split("+")
    return [*(MIXINGS.get(name, UNKNOWN) for name in mixings), RULES.get(rule, UNKNOWN)]


def every(subject: str, trait: str) -> bool:
    return all(getattr(traits, trait) for traits in traits_of(subject))


def fewest(subject: str, f: int) -> int:
    return max(traits.fewest(f) for traits in traits_of(subject))


def build(subject: str, f: int) -> Any:
    return agg.parse(subject, f=f)


def parts(subject: str, f: int) -> list[Any]:
    """The mixing steps and the rule of a subject, each built alone, for their parameters."""
    *mixings, rule = subject.split("+")
    return [*(agg.mixings[name](f=f) for name in mixings), agg.rules[rule](f=f)]


def expected(subject: str, X: Array, f: int) -> Answer:
    steps = [
        functools.partial(traits.reference, part)  # type: ignore[arg-type]
        for traits, part in zip(traits_of(subject), parts(subject, f), strict=True)
    ]
    return ref.chain(steps[:-1], steps[-1], X, f)


def bare(name: str) -> ref.Rule:
    """The reference of a rule that has no parameters."""
    return functools.partial(RULES[name].reference, None)  # type: ignore[arg-type]


def with_reference(subjects: list[str]) -> list[str]:
    return [s for s in subjects if all(traits.reference is not None for traits in traits_of(s))]


def test_every_rule_is_accounted_for():
    for registry, table in ((agg.rules, RULES), (agg.mixings, MIXINGS)):
        missing = [n for n in registry if n not in table or not (table[n].reference or table[n].no_reference)]
        assert not missing, f"neither a reference nor a reason why there is none: {missing}"
        assert not set(table) - set(registry), "the table names rules that are not registered"


# ---------------------------------------------------------------------------------------------- inputs

N, F, D = 15, 3, 24  # n ≥ 4f + 3, and f = 3 leaves Bulyan's last Krum two neighbours, hence no ties


def attack(rng: np.random.Generator, n: int = N, f: int = F, d: int = D) -> Array:
    """Honest rows around a mean, Byzantine ones (the last f) around another."""
    X = rng.standard_normal((n, d)) * rng.uniform(0.5, 2, d) + rng.standard_normal(d)
    X[n - f :] = X[n - f :] * 0.5 + 3
    return X


def colluding(rng: np.random.Generator) -> Array:
    """All Byzantine rows equal, one standard deviation from the honest mean."""
    X = attack(rng)
    X[N - F :] = X[: N - F].mean(axis=0) - 1.2 * X[: N - F].std(axis=0)
    return X


def offset(rng: np.random.Generator) -> Array:
    X = attack(rng)
    return X + 1e6 * spread(X) / math.sqrt(D)  # a vector of norm 1e6 × the spread


def huge(rng: np.random.Generator, factor: float = 1e30) -> Array:
    X = attack(rng)
    X[-1] *= factor
    return X


def large(rng: np.random.Generator) -> Array:
    return huge(rng, factor=1e4)


def tiny(rng: np.random.Generator) -> Array:
    return attack(rng) * 1e-30


CASES = [
    *((attack, dtype) for dtype in DTYPES),
    *((colluding, dtype) for dtype in DTYPES),
    *((offset, dtype) for dtype in DTYPES[:2]),  # half precision cannot hold both offset and spread
    *((huge, dtype) for dtype in DTYPES[:3]),
    *((tiny, dtype) for dtype in DTYPES[:3]),
    (large, torch.float16),  # which ends at 65504
]


def spread(X: Array, honest: int = N - F) -> float:
    H = X[:honest]
    return float(np.sqrt(((H - H.mean(axis=0)) ** 2).sum(axis=1).mean()))


def rounding(value: Array, dtype: torch.dtype) -> Array:
    """What rounding to the dtype moves a value by; in float64, also the rounding of the sums before it."""
    info = torch.finfo(dtype)
    units = 4 if dtype is torch.float64 else 0.505
    return units * info.eps * np.abs(value) + info.eps * info.smallest_normal


def float64(x: Any) -> Array:
    return x.double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, np.float64)


def assert_close(got: Any, answer: Answer, X: torch.Tensor, honest: int = N - F) -> None:
    error = np.maximum(np.abs(float64(got) - answer.value) - answer.slack, 0)
    allowed = TOLERANCE * spread(float64(X), honest) + np.linalg.norm(rounding(answer.value, got.dtype))
    assert np.linalg.norm(error) <= allowed, f"off by {np.linalg.norm(error):.3g}, allowed {allowed:.3g}"


def sample(seed: int = 0, **shape: int) -> torch.Tensor:
    return torch.from_numpy(attack(np.random.default_rng(seed), **shape))


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


@pytest.mark.slow
def test_smea_past_its_budget_says_so_and_bounds_the_optimum():
    X = torch.from_numpy(np.random.default_rng(0).standard_normal((20, 3)))
    subsets, means, _, tops = ref.subset_moments(float64(X), 8)  # 125,970 of them
    for budget, exact in ((1, False), (1000, False), (10**6, True)):
        out = agg.rules["smea"](f=8, budget=budget)(X)
        chosen = int(np.flatnonzero((subsets == np.flatnonzero(float64(out.weights))).all(axis=1))[0])
        np.testing.assert_allclose(float64(out.value), means[chosen], atol=1e-9)
        assert out.info.objective == pytest.approx(tops[chosen])
        assert out.info.exact is exact
        assert 0 < out.info.lower_bound <= tops.min() * (1 + 1e-9)
        if exact:
            assert out.info.objective == pytest.approx(tops.min())


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


# -------------------------------------------------------------------------------------------- symmetry


def same_bits(a: Any, b: Any) -> bool:
    return bool(np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_same_input_same_bits_and_input_untouched(subject: str, dtype: torch.dtype):
    X = sample(1, d=300).to(dtype)
    before = X.clone()
    first, second = (build(subject, F)(X, key=KEY) for _ in range(2))
    for field in ("value", "weights", "scores"):
        assert same_bits(getattr(first, field), getattr(second, field)), field
    assert torch.equal(X, before)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("subject", [s for s in SUBJECTS if every(s, "permutes")])
def test_permuting_clients_permutes_weights(subject: str, seed: int):
    X = sample(seed)
    order = np.random.default_rng(seed).permutation(N)
    if any(traits.pivot for traits in traits_of(subject)):
        order = np.concatenate([[0], order[order != 0]])
    rule = build(subject, F)
    straight, permuted = rule(X), rule(X[order])
    np.testing.assert_allclose(float64(permuted.weights), float64(straight.weights)[order], atol=1e-9)
    np.testing.assert_allclose(
        float64(permuted.scores), float64(straight.scores)[order], rtol=1e-6, atol=1e-9
    )
    np.testing.assert_allclose(
        float64(permuted.value), float64(straight.value), atol=1e-9 * spread(float64(X))
    )


@pytest.mark.parametrize("subject", [s for s in SUBJECTS if every(s, "translates")])
def test_shifting_the_rows_shifts_the_value(subject: str):
    X, shift = sample(2), torch.linspace(-40, 60, D, dtype=torch.float64)
    rule = build(subject, F)
    plain, shifted = rule(X, key=KEY), rule(X + shift, key=KEY)
    np.testing.assert_allclose(shifted.value, plain.value + shift, atol=1e-8)
    np.testing.assert_allclose(shifted.weights, plain.weights, atol=1e-8)


@pytest.mark.parametrize("factor", [-3.0, 1e-20, 5e15])
@pytest.mark.parametrize("subject", [s for s in SUBJECTS if every(s, "scales")])
def test_scaling_the_rows_scales_the_value(subject: str, factor: float):
    X = sample(2)
    rule = build(subject, F)
    plain, scaled = rule(X, key=KEY), rule(X * factor, key=KEY)
    np.testing.assert_allclose(scaled.value / factor, plain.value, atol=1e-8)
    np.testing.assert_allclose(scaled.weights, plain.weights, atol=1e-8)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_memory_layout_does_not_matter(subject: str):
    X = sample(4).float()
    rule = build(subject, F)
    straight = float64(rule(X, key=KEY).value)
    wide = torch.full((N, 2 * D), math.nan)
    wide[:, ::2] = X
    for same in (X.T.contiguous().T, wide[:, ::2]):
        np.testing.assert_allclose(
            float64(rule(same, key=KEY).value), straight, atol=1e-5 * spread(float64(X))
        )


# ------------------------------------------------------------------------------------------- bad input

BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_rows_that_are_not_finite_are_byzantine(subject: str):
    X = sample(5).float()
    X[4, 7], X[9, 0] = math.nan, -math.inf
    X[9, 1] = math.inf
    good = [i for i in range(N) if i not in (4, 9)]
    out = build(subject, F)(X, key=KEY)
    assert out.info.nonfinite == 2
    assert out.weights[4] == 0
    assert out.weights[9] == 0
    assert not torch.isnan(torch.as_tensor(out.scores)).any()
    assert min(out.scores[4], out.scores[9]) >= max(out.scores[i] for i in good)
    if subject in with_reference(SUBJECTS):
        assert_close(out.value, expected(subject, float64(X[good]), F - 2), X[good], N - F)
    else:
        assert torch.isfinite(out.value).all()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_more_bad_rows_than_f_are_refused(subject: str, bad: float):
    X = sample(5)
    X[1 : F + 2] = bad
    with pytest.raises(UserError, match=rf"{F + 1}"):
        build(subject, F)(X, key=KEY)


@pytest.mark.parametrize("d", [0, 1, 5])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_single_row_is_its_own_aggregate(subject: str, d: int):
    X = torch.arange(1.0, d + 1.0)[None] / 64
    out = build(subject, 0)(X, key=KEY)
    assert out.value.shape == (d,)
    if every(subject, "stays"):
        np.testing.assert_allclose(out.value, X[0], rtol=1e-6)
        np.testing.assert_allclose(out.weights, [1.0], rtol=1e-6)
    assert torch.isfinite(out.value).all()


@pytest.mark.parametrize("row", [0.0, 1.0, -1e30, 1e-30, 0.1])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_identical_rows_give_that_row(subject: str, row: float):
    X = torch.full((N, 5), row)
    out = build(subject, F)(X, key=KEY)
    if every(subject, "stays"):
        np.testing.assert_allclose(out.value, X[0], rtol=1e-6)
    assert torch.isfinite(out.value).all()
    assert torch.isfinite(out.weights).all()


@pytest.mark.parametrize("subject", SUBJECTS)
def test_no_columns_give_an_empty_value(subject: str):
    out = build(subject, F)(torch.zeros(N, 0), key=KEY)
    assert out.value.shape == (0,)
    assert out.weights.shape == (N,)
    assert torch.isfinite(out.weights).all()


@pytest.mark.parametrize(("n", "f"), [(2, 1), (6, 3), (5, 4), (4, 5), (1, 1)])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_byzantine_majority_is_refused(subject: str, n: int, f: int):
    X = torch.from_numpy(np.random.default_rng(n).standard_normal((n, 3)))
    if any(traits.needs_minority for traits in traits_of(subject)):
        with pytest.raises(UserError, match=str(f)):
            build(subject, f)(X, key=KEY)
        return
    with contextlib.suppress(UserError):
        assert torch.isfinite(build(subject, f)(X, key=KEY).value).all()


@pytest.mark.parametrize("f", [-1, 1.5, "two", None])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_f_is_a_count(subject: str, f: object):
    with pytest.raises(UserError):
        build(subject, f)(sample(0), key=KEY)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "X",
    [
        torch.zeros(5),
        torch.zeros(3, 3, 3),
        torch.zeros(0, 4),
        np.zeros((2, 2, 2)),
        [],
        [torch.zeros(3), torch.zeros(4), torch.zeros(3)],
        torch.zeros(15, 3, dtype=torch.complex64),
        np.array([["a", "b"]] * 15),
        "rows",
        None,
    ],
    ids=["1-D", "3-D", "no rows", "numpy 3-D", "empty list", "ragged", "complex", "text", "string", "None"],
)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_wrong_shapes_are_refused(subject: str, X: Any):
    with pytest.raises(UserError):
        build(subject, 1)(X, key=KEY)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_lists_and_numpy_give_what_tensors_give(subject: str):
    X = sample(6).float()
    rule = build(subject, F)
    tensor = rule(X, key=KEY)
    rows = rule(list(X), key=KEY)
    array = rule(X.numpy(), key=KEY)
    arrays = rule(list(X.numpy()), key=KEY)
    assert isinstance(tensor.value, torch.Tensor)
    assert isinstance(rows.value, torch.Tensor)
    assert isinstance(array.value, np.ndarray)
    assert isinstance(array.weights, np.ndarray)
    assert isinstance(arrays.value, np.ndarray)
    for other in (rows, array, arrays):
        np.testing.assert_array_equal(other.value, tensor.value)
        np.testing.assert_array_equal(other.weights, tensor.weights)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_mixed_dtypes_give_an_answer_or_a_clear_error(subject: str):
    X = sample(6).float()
    rows = [row.double() if i % 2 else row for i, row in enumerate(X)]
    rule = build(subject, F)
    try:
        mixed = rule(rows, key=KEY)
    except UserError:
        with pytest.raises(UserError, match="dtype"):
            rule(rows, key=KEY)
    else:
        np.testing.assert_allclose(float64(mixed.value), float64(rule(X, key=KEY).value), atol=1e-5)


@pytest.mark.parametrize("name", ["cfa", "nnm+", "+cwmed", "", "cwmed+nnm", "nnm+nnn+mean", "nnm"])
def test_names_that_mean_nothing_are_refused(name: str):
    with pytest.raises(UserError):
        agg.parse(name, f=1)


# ------------------------------------------------------------------------------- finite in, finite out

extremes = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, 1.0, -1.0, 3.4e38, -3.4e38, 1e-45, -1e-38, 1e30, 1e-30]),
)


@st.composite
def finite_inputs(draw: st.DrawFn) -> tuple[int, Array]:
    n, d = draw(st.integers(1, 8)), draw(st.integers(0, 3))
    values = hnp.arrays(np.float32, (n, d), elements=extremes.map(lambda x: float(np.float32(x))))
    return draw(st.integers(0, (n - 1) // 2)), draw(values)


def check_finite(subject: str, f: int, X: np.ndarray) -> None:
    """The value is within its coordinates' range (with zero, where rows are shortened), shares are shares."""
    try:
        out = build(subject, f)(X, key=KEY)
    except UserError:
        assert len(X) < fewest(subject, f) or "bucketing" in subject
        return
    low, high = X.min(axis=0).astype(np.float64), X.max(axis=0).astype(np.float64)
    if not every(subject, "stays"):
        low, high = np.minimum(low, 0), np.maximum(high, 0)
    room = 1e-5 * np.maximum(np.abs(low), np.abs(high)) + 1e-44
    value = out.value.astype(np.float64)
    assert np.isfinite(value).all(), value
    assert (value >= low - room).all()
    assert (value <= high + room).all()
    weights = out.weights.astype(np.float64)
    assert np.isfinite(weights).all()
    assert (weights >= 0).all()
    assert weights.sum() <= 1 + 1e-5
    assert not np.isnan(out.scores).any()


@pytest.mark.parametrize("subject", SUBJECTS)
def test_finite_rows_never_give_nan(subject: str):
    @settings(derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(finite_inputs())
    def run(case: tuple[int, Array]) -> None:
        check_finite(subject, *case)

    run()


@pytest.mark.parametrize("scale", [1e308, 1e-308])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_double_precision_extremes_never_give_nan(subject: str, scale: float):
    X = np.random.default_rng(8).uniform(-1.7, 1.7, (N, 4)) * scale
    check_finite(subject, F, X)


# ------------------------------------------------------------------------------------ weights and Gram


def geometric(subjects: list[str]) -> list[str]:
    return [s for s in subjects if build(s, 1).geometric]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_weights_are_shares(subject: str, dtype: torch.dtype):
    X = sample(9).to(dtype)
    out = build(subject, F)(X, key=KEY)
    weights = float64(out.weights)
    assert out.weights.shape == (N,)
    assert out.scores.shape == (N,)
    assert (weights >= 0).all()
    if every(subject, "stays"):
        assert weights.sum() == pytest.approx(1, abs=1e-6)
    if build(subject, F).geometric:
        np.testing.assert_allclose(weights @ float64(X), float64(out.value), atol=1e-5)


@pytest.mark.parametrize("subject", geometric(SUBJECTS))
def test_weights_come_from_the_gram_matrix(subject: str):
    X = sample(10).float()
    rule = build(subject, F)
    from_gram = rule.weights_from_gram(agg.gram(X))
    np.testing.assert_allclose(float64(from_gram), float64(rule(X).weights), atol=1e-6)


def test_gram_matrices_of_shards_add_up():
    X = sample(12, d=1000).float()
    shards = [X[:, i : i + 137] for i in range(0, 1000, 137)]
    together = float64(sum(agg.gram(shard) for shard in shards))
    whole = float64(agg.gram(X))
    np.testing.assert_allclose(together, whole, atol=1e-9 * np.abs(whole).max())


@pytest.mark.parametrize("subject", geometric(SUBJECTS))
def test_weights_from_shards_are_those_of_the_whole(subject: str):
    X = sample(13, d=200).float()
    rule = build(subject, F)
    G = agg.gram(X[:, :70]) + agg.gram(X[:, 70:])
    np.testing.assert_allclose(float64(rule.weights_from_gram(G)), float64(rule(X).weights), atol=1e-6)


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


def spoiled(rng: np.random.Generator) -> Array:
    X = attack(rng)
    X[2, 20], X[6, 1] = math.nan, math.inf  # bad in one chunk, fine in the others
    return X


@pytest.mark.parametrize("make", [attack, offset, huge, spoiled], ids=lambda make: make.__name__)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_streaming_equals_in_memory(subject: str, make: Callable[[np.random.Generator], Array]):
    X = torch.from_numpy(make(np.random.default_rng(14))).float()
    rule = build(subject, F)
    whole = rule(X, key=KEY)
    chunks = X.split(7, dim=1)
    answer = Answer(float64(whole.value), None, np.zeros(D))
    for source in (chunks, lambda: iter(chunks)):
        streamed = agg.stream(rule, source, key=KEY)
        assert_close(streamed.value, answer, X[torch.isfinite(X).all(dim=1)])
        np.testing.assert_allclose(float64(streamed.weights), float64(whole.weights), atol=1e-6)
        assert streamed.info.nonfinite == whole.info.nonfinite


# ------------------------------------------------------------------------------------------ robustness

SIZES = [(3, 1), (5, 1), (5, 2), (6, 2), (7, 3), (9, 2), (9, 4)]


def published_kappa(name: str, n: int, f: int) -> float:
    """The coefficients of the papers: CAF Prop. 4.1, SMEA Prop. 5.1, Filter Prop. B.1."""
    ratio = f / (n - 2 * f)
    return {
        "caf": 6 * f / (n - f) * (1 + ratio) ** 2,
        "smea": 4 * f / (n - f) * (1 + ratio) ** 2,
        "filter": 6 * f / (n - 2 * f) * (1 + ratio),
    }[name]


def starting_points(rng: np.random.Generator, n: int, f: int, d: int) -> Iterator[Array]:
    """Inputs that hurt: noise, a tight and a far Byzantine cluster, equal Byzantine rows, rows on a grid."""
    while True:
        yield rng.standard_normal((n, d))
        for tightness, distance in ((0.1, 2.0), (0.0, 5.0), (0.3, 1.0)):
            X = rng.standard_normal((n, d))
            X[n - f :] = tightness * X[n - f :] + distance * rng.standard_normal(d)
            yield X
        yield np.sign(rng.standard_normal((n, d))) * (rng.random((n, d)) < 0.4) + 1e-3 * rng.standard_normal(
            (n, d)
        )


def climb(
    value: Callable[[Array], Array], n: int, f: int, d: int, *, spectral: bool, starts: int, patience: int
) -> tuple[float, Array]:
    """The input of largest ratio ‖F(X) − x̄_S‖² / variance of S, over all S, found by random hill climbing."""
    rng = np.random.default_rng(1000 * n + 10 * f + d)
    best, worst = -1.0, np.zeros((n, d))
    for X in itertools.islice(starting_points(rng, n, f, d), starts):
        ratio = ref.robustness_ratio(value(X), X, f, spectral=spectral)
        step, failures = X.std(), 0
        while failures < patience:
            touched = rng.random((n, d)) < rng.uniform(0.05, 0.6)
            Y = X + step * touched * rng.standard_normal((n, d))
            higher = ref.robustness_ratio(value(Y), Y, f, spectral=spectral)
            if higher > ratio:
                X, ratio, failures = Y, higher, 0
            else:
                failures += 1
                step *= 0.93
        if ratio > best:
            best, worst = ratio, X
    return best, worst


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
    assert ref.robustness_ratio(rule(worst).value, worst, f, spectral=True) <= kappa


@pytest.mark.parametrize(("n", "f"), SIZES)
def test_filter_with_a_known_bound(n: int, f: int):
    """‖Filter(x) − x̄_S‖² ≤ κ σ₀² for every S with λ_max(Cov_S) ≤ σ₀²."""
    rng = np.random.default_rng(n)
    for X in itertools.islice(starting_points(rng, n, f, 2), 10):
        _, means, _, tops = ref.subset_moments(X, f)
        for bound in np.quantile(tops, [0, 0.5, 1]):
            rule = agg.rules["filter"](f=f, bound=float(bound))
            assert rule.kappa(n=n) == pytest.approx(published_kappa("filter", n, f))
            error = ((rule(X).value - means[tops <= bound]) ** 2).sum(axis=1)
            assert error.max() <= published_kappa("filter", n, f) * bound


def proven(subjects: list[str]) -> Iterator[Any]:
    """The rules and sizes for which a coefficient is stated; with many S the search is slow."""
    for subject, (n, f) in itertools.product(subjects, SIZES):
        with contextlib.suppress(UserError):
            if build(subject, f).kappa(n=n) is not None:
                yield pytest.param(subject, n, f, marks=[pytest.mark.slow] if n > 6 else [])


@pytest.mark.parametrize(("subject", "n", "f"), list(proven(SUBJECTS)))
def test_kappa_bounds_the_error(subject: str, n: int, f: int):
    """Every rule that names a κ keeps it, for all S and for inputs searched to break it."""
    rule = build(subject, f)
    spectral = rule.criterion == "spectral"
    ratio, _ = climb(
        lambda X: float64(rule(X, key=KEY).value), n, f, 2, spectral=spectral, starts=5, patience=6
    )
    assert ratio <= rule.kappa(n=n) * (1 + 1e-6)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_kappa_without_byzantine_rows(subject: str):
    """κ, where there is one, is a finite number ≥ 0."""
    for n, f in [(9, 0), (9, 1), (15, 3)]:
        kappa = build(subject, f).kappa(n=n)
        assert kappa is None or (math.isfinite(kappa) and kappa >= 0)

"""What every rule, every mixing step and every chain of them must do, whoever wrote it.

Permutation, translation, scale, dtypes, layout, determinism, bad input, shares, streaming, and a search for
messages that break the κ it states. What a definition does not promise (`aggregation.rule.Promise`) it says
in `lacks`. A rule is tested alone and after `nnm`, a mixing step before four rules, a stage before one.

Longer than most modules, so that the one name a user's own tests import has all that is asked of a rule.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trilemma import aggregation as agg
from trilemma.aggregation.steps.rule import Promise
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.learning.defences.stage import Stage
from trilemma.testing import chosen
from trilemma.testing.adversary import Array, climb
from trilemma.testing.inputs import D, F, N, attacked, float64, sample, spread

KEY = Key(seed=7)
BAD = [math.nan, math.inf, -math.inf]
SIZES = [(3, 1), (5, 1), (5, 2), (6, 2), (7, 3), (9, 2), (9, 4)]


def subjects() -> list[str]:
    """Return the rules and chains under test."""
    rules = chosen.names("rule")
    chains = [
        f"{mixing}+{rule}"
        for mixing in chosen.names("mixing")
        for rule in ("mean", "cwmed", "krum", "caf")
        if rule == "mean" or not issubclass(agg.mixings[mixing], Stage)
    ]
    if chosen.everything():
        chains += ["nnm+cwtm", "nnm+geomed", "nnm+smea", "arc+nnm+cwmed", "clip+nnm+cwtm"]
    else:
        chains += [f"nnm+{rule}" for rule in rules if "+" not in rule]
    return [*rules, *chains]


def parts(subject: str) -> list[type[agg.Mixing] | type[agg.Rule]]:
    """Return the classes of a subject's mixing steps and of its rule."""
    *mixings, rule = (part.split("(")[0].strip() for part in subject.split("+"))
    return [*(agg.mixings[name] for name in mixings), agg.rules[rule]]


def keeps(subject: str, promise: Promise) -> bool:
    """Whether every step of a subject makes a promise."""
    return all(promise not in part.lacks for part in parts(subject))


def keeping(promise: Promise) -> list[str]:
    """Return the subjects that make a promise."""
    return [subject for subject in SUBJECTS if keeps(subject, promise)]


def build(subject: str, f: int) -> Any:
    """Return the rule or chain."""
    return agg.parse(subject, f=f)


def geometric() -> list[str]:
    """Return the subjects that are a map from the Gram matrix to weights."""
    return [subject for subject in SUBJECTS if build(subject, 1).geometric]


SUBJECTS = subjects()


@pytest.mark.parametrize("subject", SUBJECTS)
def test_what_is_not_promised_has_a_name(subject: str) -> None:
    for part in parts(subject):
        assert part.lacks <= set(get_args(Promise)), f"{part.__name__}.lacks: allowed are {get_args(Promise)}"


@pytest.mark.parametrize("subject", SUBJECTS)
def test_it_is_defined_where_liars_are_few(subject: str) -> None:
    for f in range(4):
        assert build(subject, f)(sample(f, n=4 * f + 3, f=f), key=KEY).info.n == 4 * f + 3


# -------------------------------------------------------------------------------------------- symmetry


def same_bits(a: Any, b: Any) -> bool:
    return bool(np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_same_input_same_bits_and_input_untouched(subject: str, dtype: torch.dtype) -> None:
    X = sample(1, d=300).to(dtype)
    before = X.clone()
    first, second = (build(subject, F)(X, key=KEY) for _ in range(2))
    for field in ("value", "weights", "scores"):
        assert same_bits(getattr(first, field), getattr(second, field)), field
    assert torch.equal(X, before)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("subject", keeping("permutation"))
def test_permuting_clients_permutes_weights(subject: str, seed: int) -> None:
    X = sample(seed)
    order = np.random.default_rng(seed).permutation(N)
    rule = build(subject, F)
    straight, permuted = rule(X), rule(X[order])
    np.testing.assert_allclose(float64(permuted.weights), float64(straight.weights)[order], atol=1e-9)
    np.testing.assert_allclose(
        float64(permuted.scores), float64(straight.scores)[order], rtol=1e-6, atol=1e-9
    )
    np.testing.assert_allclose(
        float64(permuted.value), float64(straight.value), atol=1e-9 * spread(float64(X))
    )


@pytest.mark.parametrize("subject", keeping("translation"))
def test_shifting_the_rows_shifts_the_value(subject: str) -> None:
    X, shift = sample(2), torch.linspace(-40, 60, D, dtype=torch.float64)
    rule = build(subject, F)
    plain, shifted = rule(X, key=KEY), rule(X + shift, key=KEY)
    np.testing.assert_allclose(shifted.value, plain.value + shift, atol=1e-8)
    np.testing.assert_allclose(shifted.weights, plain.weights, atol=1e-8)


@pytest.mark.parametrize("factor", [-3.0, 1e-20, 5e15])
@pytest.mark.parametrize("subject", keeping("scale"))
def test_scaling_the_rows_scales_the_value(subject: str, factor: float) -> None:
    X = sample(2)
    rule = build(subject, F)
    plain, scaled = rule(X, key=KEY), rule(X * factor, key=KEY)
    np.testing.assert_allclose(scaled.value / factor, plain.value, atol=1e-8)
    np.testing.assert_allclose(scaled.weights, plain.weights, atol=1e-8)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_memory_layout_does_not_matter(subject: str) -> None:
    X = sample(4).float()
    rule = build(subject, F)
    straight = float64(rule(X, key=KEY).value)
    wide = torch.full((N, 2 * D), math.nan)
    wide[:, ::2] = X
    for same in (X.T.contiguous().T, wide[:, ::2]):
        np.testing.assert_allclose(
            float64(rule(same, key=KEY).value), straight, atol=1e-5 * spread(float64(X))
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_value_is_that_of_double_precision_rounded_to_the_dtype(subject: str, dtype: torch.dtype) -> None:
    X = sample(4).to(dtype)
    rule = build(subject, F)
    out, exact = rule(X, key=KEY), rule(X.double(), key=KEY)
    assert out.value.dtype == dtype
    allowed = 1e-4 * spread(float64(X)) + torch.finfo(dtype).eps * np.linalg.norm(float64(exact.value))
    assert np.linalg.norm(float64(out.value) - float64(exact.value)) <= allowed


# ------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("subject", SUBJECTS)
def test_rows_that_are_not_finite_are_byzantine(subject: str) -> None:
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
    assert torch.isfinite(out.value).all()
    if keeps(subject, "permutation"):  # without them, f is smaller by so many
        np.testing.assert_allclose(out.value, build(subject, F - 2)(X[good], key=KEY).value, atol=1e-5)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_more_bad_rows_than_f_are_refused(subject: str, bad: float) -> None:
    X = sample(5)
    X[1 : F + 2] = bad
    with pytest.raises(UserError, match=rf"{F + 1}"):
        build(subject, F)(X, key=KEY)


@pytest.mark.parametrize("d", [0, 1, 5])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_single_row_is_its_own_aggregate(subject: str, d: int) -> None:
    X = torch.arange(1.0, d + 1.0)[None] / 64
    out = build(subject, 0)(X, key=KEY)
    assert out.value.shape == (d,)
    if keeps(subject, "range"):
        np.testing.assert_allclose(out.value, X[0], rtol=1e-6)
        np.testing.assert_allclose(out.weights, [1.0], rtol=1e-6)
    assert torch.isfinite(out.value).all()


@pytest.mark.parametrize("row", [0.0, 1.0, -1e30, 1e-30, 0.1])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_identical_rows_give_that_row(subject: str, row: float) -> None:
    X = torch.full((N, 5), row)
    out = build(subject, F)(X, key=KEY)
    if keeps(subject, "range"):
        np.testing.assert_allclose(out.value, X[0], rtol=1e-6)
    assert torch.isfinite(out.value).all()
    assert torch.isfinite(out.weights).all()


@pytest.mark.parametrize("subject", SUBJECTS)
def test_no_columns_give_an_empty_value(subject: str) -> None:
    out = build(subject, F)(torch.zeros(N, 0), key=KEY)
    assert out.value.shape == (0,)
    assert out.weights.shape == (N,)
    assert torch.isfinite(out.weights).all()


@pytest.mark.parametrize(("n", "f"), [(2, 1), (6, 3), (5, 4), (4, 5), (1, 1)])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_byzantine_majority_is_refused(subject: str, n: int, f: int) -> None:
    X = torch.from_numpy(np.random.default_rng(n).standard_normal((n, 3)))
    with pytest.raises(UserError, match=str(f)):
        build(subject, f)(X, key=KEY)


@pytest.mark.parametrize("f", [-1, 1.5, "two", None])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_f_is_a_count(subject: str, f: Any) -> None:
    with pytest.raises(UserError):
        build(subject, f)(sample(0), key=KEY)


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
def test_wrong_shapes_are_refused(subject: str, X: Any) -> None:
    with pytest.raises(UserError):
        build(subject, 1)(X, key=KEY)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_lists_and_numpy_give_what_tensors_give(subject: str) -> None:
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
def test_mixed_dtypes_give_an_answer_or_a_clear_error(subject: str) -> None:
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
    rule = build(subject, f)
    try:
        rule.check(len(X))
    except UserError:
        assert len(X) < 4 * f + 3
        return
    out = rule(X, key=KEY)
    low, high = X.min(axis=0).astype(np.float64), X.max(axis=0).astype(np.float64)
    if not keeps(subject, "range"):
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
def test_finite_rows_never_give_nan(subject: str) -> None:
    @settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(finite_inputs())
    def run(case: tuple[int, Array]) -> None:
        check_finite(subject, *case)

    run()


@pytest.mark.parametrize("scale", [1e308, 1e-308])
@pytest.mark.parametrize("subject", SUBJECTS)
def test_double_precision_extremes_never_give_nan(subject: str, scale: float) -> None:
    X = np.random.default_rng(8).uniform(-1.7, 1.7, (N, 4)) * scale
    check_finite(subject, F, X)


# ------------------------------------------------------------------------------------ weights and Gram


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_weights_are_shares(subject: str, dtype: torch.dtype) -> None:
    X = sample(9).to(dtype)
    out = build(subject, F)(X, key=KEY)
    weights = float64(out.weights)
    assert out.weights.shape == (N,)
    assert out.scores.shape == (N,)
    assert (weights >= 0).all()
    if keeps(subject, "range"):
        assert weights.sum() == pytest.approx(1, abs=1e-6)
    if build(subject, F).geometric:
        np.testing.assert_allclose(weights @ float64(X), float64(out.value), atol=1e-5)


@pytest.mark.parametrize("subject", geometric())
def test_weights_come_from_the_gram_matrix(subject: str) -> None:
    X = sample(10).float()
    rule = build(subject, F)
    from_gram = rule.weights_from_gram(agg.gram(X))
    np.testing.assert_allclose(float64(from_gram), float64(rule(X).weights), atol=1e-6)


@pytest.mark.parametrize("subject", geometric())
def test_weights_from_shards_are_those_of_the_whole(subject: str) -> None:
    X = sample(13, d=200).float()
    rule = build(subject, F)
    G = agg.gram(X[:, :70]) + agg.gram(X[:, 70:])
    np.testing.assert_allclose(float64(rule.weights_from_gram(G)), float64(rule(X).weights), atol=1e-6)


def offset(rng: np.random.Generator) -> Array:
    X = attacked(rng)
    return X + 1e6 * spread(X) / math.sqrt(D)  # a vector of norm 1e6 × the spread


def huge(rng: np.random.Generator) -> Array:
    X = attacked(rng)
    X[-1] *= 1e30
    return X


def spoiled(rng: np.random.Generator) -> Array:
    X = attacked(rng)
    X[2, 20], X[6, 1] = math.nan, math.inf  # bad in one chunk, fine in the others
    return X


@pytest.mark.parametrize("make", [attacked, offset, huge, spoiled], ids=lambda make: make.__name__)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_streaming_equals_in_memory(subject: str, make: Callable[[np.random.Generator], Array]) -> None:
    X = torch.from_numpy(make(np.random.default_rng(14))).float()
    rule = build(subject, F)
    whole = rule(X, key=KEY)
    chunks = torch.split(X, 7, dim=1)
    allowed = 1e-4 * spread(float64(X[torch.isfinite(X).all(dim=1)]))
    allowed += float(np.finfo(np.float32).eps * np.linalg.norm(float64(whole.value)))
    for source in (chunks, lambda: iter(chunks)):
        streamed = agg.stream(rule, source, key=KEY)
        assert np.linalg.norm(float64(streamed.value) - float64(whole.value)) <= allowed
        np.testing.assert_allclose(float64(streamed.weights), float64(whole.weights), atol=1e-6)
        assert streamed.info.nonfinite == whole.info.nonfinite


# ------------------------------------------------------------------------------------------ robustness


def proven() -> Iterator[Any]:
    """The rules and sizes for which a coefficient is stated; with many S the search is slow."""
    for subject, (n, f) in itertools.product(SUBJECTS, SIZES):
        with contextlib.suppress(UserError):
            if build(subject, f).kappa(n=n) is not None:
                yield pytest.param(subject, n, f, marks=[pytest.mark.slow] if n > 6 else [])


@pytest.mark.parametrize(("subject", "n", "f"), list(proven()))
def test_kappa_bounds_the_error(subject: str, n: int, f: int) -> None:
    """Every rule that names a κ keeps it, for all S and for inputs searched to break it."""
    rule = build(subject, f)
    spectral = rule.criterion == "spectral"
    ratio, _ = climb(
        lambda X: float64(rule(X, key=KEY).value), n, f, 2, spectral=spectral, starts=5, patience=6
    )
    assert ratio <= rule.kappa(n=n) * (1 + 1e-6)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_kappa_without_byzantine_rows(subject: str) -> None:
    """κ, where there is one, is a finite number ≥ 0."""
    for n, f in [(9, 0), (9, 1), (15, 3)]:
        kappa = build(subject, f).kappa(n=n)
        assert kappa is None or (math.isfinite(kappa) and kappa >= 0)

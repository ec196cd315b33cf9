"""The passes over X: every way to the geometry and to a weighted sum agrees with plain float64."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from rule_costs import extra_memory
from trilemma import aggregation as agg
from trilemma.aggregation.passes import blocks
from trilemma.aggregation.passes.combine import weighted_sum
from trilemma.aggregation.passes.gram import WIDE, Geometry, geometry
from trilemma.base.errors import UserError

gram = importlib.import_module(
    "trilemma.aggregation.passes.gram"
)  # the package exports a function of that name

N = 7


def normal(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def distances(X: torch.Tensor) -> np.ndarray:
    """Squared distances by differences, row by row, in float64."""
    Y = X.double().numpy()
    return np.array([[np.square(a - b).sum() for b in Y] for a in Y])


@pytest.fixture(params=["numba", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(blocks, "compiled", lambda *_: None)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("d", [1, 50, 20_000, 33_001])
def test_distances_and_norms(kernels: str, d: int, dtype: torch.dtype):
    X = normal(N, d).to(dtype)
    found = geometry(X)
    np.testing.assert_allclose(found.distances, distances(X), rtol=1e-12, atol=1e-12 * d)
    np.testing.assert_allclose(found.norms, X.double().norm(dim=1), rtol=1e-12)
    np.testing.assert_allclose(agg.gram(X), X.double() @ X.double().T, rtol=1e-10, atol=1e-10 * d)


@pytest.mark.parametrize("asked", [False, True], ids=["wide", "single"])
@pytest.mark.parametrize("case", ["plain", "offset", "huge", "tiny", "mixed scales"])
def test_wide_messages(case: str, asked: bool):
    """From 2²⁰ columns on products are float32, where they can be; before that where it is asked for."""
    X = normal(5, 70_000 if asked else WIDE + 1000)
    if case == "offset":
        X += 1e6
    elif case == "huge":
        X[2] *= 1e30
    elif case == "tiny":
        X *= 1e-30
    elif case == "mixed scales":
        X *= torch.tensor([1e-3, 1.0, 1.0, 1.0, 1e3])[:, None]
    true, found = distances(X), geometry(X, single=asked).distances
    np.testing.assert_allclose(found, true, rtol=1e-6)
    honest = [0, 1, 3, 4] if case == "huge" else [1, 2, 3] if case == "mixed scales" else list(range(5))
    inner = np.ix_(honest, honest)
    np.testing.assert_allclose(found[inner], true[inner], rtol=1e-7)


@pytest.mark.parametrize("d", [30_000, WIDE])
@pytest.mark.parametrize("distance", [1e3, 1e9, 1e30])
def test_a_reference_row_that_hides_from_the_sample(d: int, distance: float):
    """A row close to all others in the columns looked at first, and far away in the rest."""
    X = normal(N, d)
    X[0] = X[1:].mean(0)
    X[0, 3 * d // 100 : 10 * d // 100] += distance
    X[1, 3 * d // 100 : 10 * d // 100] -= distance / 3
    found = geometry(X)
    assert distance < 1e4 or found.base not in (0, 1)
    np.testing.assert_allclose(found.distances[2:, 2:], distances(X)[2:, 2:], rtol=1e-6)


@pytest.mark.parametrize("further", [2.5, 10.0])
def test_a_reference_row_of_one_long_coordinate_spoils_no_products_of_others(further: float):
    """It is central but for one column, whose square swallows what float32 adds to it in that block."""
    X = normal(9, 1 << 17)
    X[0] = 0.0
    X[0, 2048] = further * X.shape[1] ** 0.5
    found = geometry(X, single=True)
    np.testing.assert_allclose(found.distances[1:, 1:], distances(X)[1:, 1:], rtol=1e-5)
    np.testing.assert_allclose(found.norms[1:], np.linalg.norm(X[1:].double().numpy(), axis=1), rtol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("d", [40, 30_000, WIDE])
def test_rows_that_are_not_finite(kernels: str, d: int, bad: float):
    if kernels == "torch" and d == WIDE:
        pytest.skip("the same code as for 30,000 columns")
    X = normal(N, d)
    X[1, d - 1] = X[4, d // 2] = bad
    found = geometry(X)
    assert found.finite.tolist() == [i not in (1, 4) for i in range(N)]
    kept = np.flatnonzero(found.finite)
    inner = found.select(kept).distances
    np.testing.assert_allclose(inner, distances(X[kept]), rtol=1e-6)


def test_equal_rows_get_equal_bits():
    for n, d in ((6, 100), (9, 5000), (9, WIDE)):
        X = normal(n, d)
        X[5] = X[2]
        inner = geometry(X).inner
        np.testing.assert_array_equal(inner[5], inner[2])
        assert geometry(X).distances[2, 5] == 0


@pytest.mark.parametrize(("wide", "off"), [(0, 1e-6), (WIDE, 1e-14)], ids=["float32", "float64"])
def test_tiles_do_not_matter(monkeypatch, wide: int, off: float):
    """A processor with few registers multiplies three rows by three, others four by four: the same sums.

    The compiler chooses how many of their terms it adds side by side, so the last bits may differ.
    """
    kernels = pytest.importorskip("trilemma.aggregation.kernels.cpu")
    X, found = normal(11, 30_000), []
    X[7] = X[2]
    for tile in (3, 4):
        monkeypatch.setattr(kernels, "TILE", tile)
        inner = gram.measure(X, wide).inner
        np.testing.assert_array_equal(inner[7], inner[2])
        found.append(inner)
    largest = np.abs(found[0]).max()
    np.testing.assert_allclose(*found, rtol=0, atol=off * largest)


def test_the_number_of_threads_does_not_matter():
    X = normal(N, 200_000)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append((geometry(X).inner, agg.cwtm(f=2)(X), agg.caf(f=2)(X)))
    finally:
        torch.set_num_threads(threads)
    (one, trimmed, caf), (three, trimmed_3, caf_3) = results
    np.testing.assert_array_equal(one, three)
    assert torch.equal(trimmed.value, trimmed_3.value)
    assert torch.equal(trimmed.weights, trimmed_3.weights)
    assert torch.equal(caf.value, caf_3.value)


def test_mixing_in_the_geometry_is_mixing_the_rows():
    X = normal(N, 500, seed=1) + 1e3
    rng = np.random.default_rng(0)
    A = rng.random((4, N))  # rows that do not sum to one: the origin takes the rest
    A[0] /= A[0].sum()
    mixed = geometry(X).mixed(A)
    direct = geometry(torch.from_numpy(A) @ X.double())
    np.testing.assert_allclose(mixed.distances, direct.distances, rtol=1e-9)
    np.testing.assert_allclose(mixed.norms, direct.norms, rtol=1e-9)


def test_clipped_outliers_keep_their_direction():
    """A row of 1e30 clipped to the length of the others is an ordinary row again."""
    X = normal(N, 300, seed=2).double()
    unit = X / X.norm(dim=1, keepdim=True)
    X[3] *= 1e30
    clipped = geometry(X).mixed(np.diag(1.0 / X.norm(dim=1).numpy()))
    np.testing.assert_allclose(clipped.distances, distances(unit), rtol=1e-6)


def test_sums_of_shards_choose_a_base_that_is_central_in_both():
    X = normal(N, 4000)
    X[0, :2000] = X[1:, :2000].mean(0)  # central in the first shard
    X[0, 2000:] = 1e25
    first, second = geometry(X[:, :2000]), geometry(X[:, 2000:])
    assert first.base == 0
    total = first + second
    assert total.base != 0
    np.testing.assert_allclose(total.distances[1:, 1:], distances(X)[1:, 1:], rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weighted_sums_are_rounded_once(kernels: str, dtype: torch.dtype):
    X = (normal(N, 40_001) + 1000).to(dtype)
    weights = np.array([0.3, 0.0, 0.1, 0.2, 0.15, 0.05, 0.2])
    X[1] = torch.nan
    used = weights > 0
    exact = torch.from_numpy(weights[used]) @ X[torch.from_numpy(used)].double()
    found = weighted_sum(X, weights)
    assert found.dtype == dtype
    error = (found.double() - exact).abs() / exact.abs()
    assert error.max() <= 0.501 * torch.finfo(dtype).eps * (4 if dtype == torch.float64 else 1)


def test_strided_and_transposed_messages():
    X = normal(N, 40_000)
    for same in (X.T.contiguous().T, torch.stack([X, X], 2)[:, :, 0]):
        assert not same.is_contiguous()
        np.testing.assert_allclose(geometry(same).distances, geometry(X).distances, rtol=1e-12)


@pytest.mark.parametrize("rule", ["mean", "caf", "nnm+cwmed", "cwmed", "geomed", "bulyan"])
def test_messages_whose_sign_is_a_flag_or_that_meet_another_default_device(rule):
    """torch negates a conjugate's imaginary part where it is read; a program may want tensors elsewhere."""
    X = normal(11, 300)
    turned = torch.complex(X, -X).conj().imag
    assert turned.is_neg()
    wanted = agg.parse(rule, f=2)(X).value
    for same in (turned, turned.contiguous(), torch._neg_view(-X)):
        np.testing.assert_allclose(agg.parse(rule, f=2)(same).value, wanted, rtol=1e-5, atol=1e-6)
    with torch.device("meta"):
        for other in (X, X.T.contiguous().T, X.half()):
            found = agg.parse(rule, f=2)(other).value
            assert torch.equal(found, wanted) or other is not X


def test_copies_of_columns_stand_in_one_place(monkeypatch):
    """Whatever was copied before, wider or of another type; and nothing is held once a pass is over."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    half, wide = normal(N, 90).to(torch.bfloat16), torch.stack([normal(N, 90).double()] * 2, 2)[:, :, 0]

    def check(lo: int, hi: int) -> None:
        for X, columns in (
            (half, slice(lo, hi)),
            (half, slice(0, 2 * hi)),
            (half, slice(3, 5)),
            (wide, slice(lo, hi)),
        ):
            copy, a, b = blocks.window(X, columns.start, columns.stop)
            assert copy.dtype == (np.float64 if X is wide else np.float32)
            np.testing.assert_array_equal(copy[:, a:b], X[:, columns].to(torch.float64).numpy())

    blocks.over_spans(check, 40, copies=True)
    assert not blocks._own.__dict__
    blocks.window(half, 0, 40)
    first = blocks._own.held.data_ptr()
    assert blocks.window(half, 7, 30)[0].ctypes.data == first
    blocks._own.__dict__.clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["caf", "krum", "geomed", "nnm+caf", "cwmed", "nnm+cwmed"])
@pytest.mark.parametrize(("dtype", "d"), [(torch.float32, 1_500_000), (torch.bfloat16, 3_000_000)], ids=str)
def test_little_memory_beside_the_messages(name: str, dtype: torch.dtype, d: int):
    X = normal(30, d).to(dtype)
    rule = agg.parse(name, f=3)
    rule(X)
    if extra_memory(lambda: None, X) is None:
        pytest.skip("the peak of memory cannot be read here")
    # The peak of the whole process is read: what else happens to be allocated meanwhile counts too.
    assert any(extra_memory(lambda: rule(X), X) <= 0.12 for _ in range(3))


def test_gram_matrices_that_make_no_sense():
    for bad in (np.zeros((2, 3)), np.zeros(4), np.full((2, 2), np.nan), np.zeros((0, 0))):
        with pytest.raises(UserError, match="Gram matrix"):
            agg.krum(f=0).weights_from_gram(bad)


def test_featureless_geometry_has_no_distances():
    assert Geometry(np.zeros((4, 4))).distances.max() == 0


def test_one_pass_suffices_although_everything_is_far_from_the_origin(monkeypatch):
    """The base row is chosen around the median: 1e12 away, products of the rows themselves say nothing."""
    X = normal(20, 5000).double()
    X[:9] += 1e3 * normal(9, 5000, seed=1)
    bases, one_pass = [], gram.fast_pass

    def counted(X: torch.Tensor, k: int, precise: bool) -> np.ndarray:
        bases.append(k)
        return one_pass(X, k, precise)

    monkeypatch.setattr(gram, "fast_pass", counted)
    geometry(X + 1e12)
    assert len(bases) == 1
    assert bases[0] >= 9


def test_gram_matrices_of_shards_add_up():
    X = normal(15, 1000)
    together = sum(agg.gram(X[:, i : i + 137]) for i in range(0, 1000, 137)).numpy()
    whole = agg.gram(X).numpy()
    np.testing.assert_allclose(together, whole, atol=1e-9 * np.abs(whole).max())

"""Many Gram matrices at once give the weights that one at a time gives."""

import numpy as np
import pytest
import torch

from trilemma import aggregation as agg
from trilemma.aggregation.passes import many
from trilemma.aggregation.passes.spectral import top_eigenpair

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]


def noisy_rows(seed: int, n: int, f: int, d: int, shift: float, offset: float) -> torch.Tensor:
    """Noise around an offset; the last f rows are equal and `shift` deviations away."""
    rows = torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + offset
    rows[n - f :] = rows[: n - f].mean(0) + shift * rows[: n - f].std(0)
    return rows


@pytest.mark.parametrize("device", DEVICES)
def test_top_eigenpairs_are_those_of_lapack(device: str) -> None:
    x = torch.randn(7, 40, 2000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    M = torch.bmm(x, x.mT)  # eigenvalues close to each other, as those of noise are
    values, vectors = many.top_eigenpairs(M.to(device))
    for one, value, vector in zip(M.numpy(), values.cpu(), vectors.cpu().numpy(), strict=True):
        expected, direction = top_eigenpair(one)
        assert float(value) == pytest.approx(expected, rel=1e-12)
        assert abs(direction @ vector) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_eigenvalues_above_an_edge_are_those_of_lapack(device: str) -> None:
    """Far above it and just above, in noise whose eigenvalues hardly differ; below it nothing is found."""
    x = torch.randn(40, 30, 3000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x[:20, :4, 0] += torch.logspace(0, 4, 20, dtype=torch.float64)[:, None]
    M = torch.bmm(x, x.mT)
    tops, across = torch.linalg.eigh(M)
    tops, across = tops[:, -1], across[:, :, -1]
    for away in (1e-3, 0.1, 0.9):
        for edges in (tops / (1 + away), tops * (1 + away)):
            values, vectors = (part.cpu() for part in many.top_eigenpairs(M.to(device), edges.to(device)))
            found = many.any_above(M.to(device), edges.to(device)).cpu()
            assert torch.equal(values > edges, edges < tops)
            assert torch.equal(found, edges < tops)
            if bool((edges < tops).all()):
                torch.testing.assert_close(values, tops, rtol=1e-12, atol=0.0)
                assert float((vectors * across).sum(1).abs().min()) > 1 - 1e-9


def test_equal_eigenvalues_and_nothing_at_all_have_an_answer() -> None:
    M = torch.stack([torch.eye(3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)])
    values, vectors = many.top_eigenpairs(M)
    assert values.tolist() == [1.0, 0.0]
    assert bool(vectors.isfinite().all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("least", [0.0, 1e-9, 1.0, 2.0, 4.0, 1e300, torch.inf])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_wherever_the_edge_is_there_is_an_answer(n: int, least: float, device: str) -> None:
    """Of nothing, of one direction, of equal ones; and what is no number spoils nobody else's."""
    one = torch.zeros(n, n, dtype=torch.float64)
    one[0, 0] = 3.0
    M = torch.stack([torch.zeros_like(one), one, 3.0 * torch.eye(n).double(), one * torch.nan]).to(device)
    edges = torch.full((4,), least, dtype=torch.float64)
    values, vectors = (part.cpu()[:3] for part in many.top_eigenpairs(M, edges.to(device)))
    assert bool(values.isfinite().all())
    assert float(torch.linalg.vector_norm(vectors, dim=1).max()) <= 1 + 1e-12
    assert (values > least).tolist() == [False, least < 3.0, least < 3.0]
    if least < 3.0:
        assert values[1:].tolist() == pytest.approx([3.0, 3.0], rel=1e-12)
    if least > 0.0:
        found = many.any_above(M, edges.to(device)).cpu()
        assert found[:3].tolist() == [False, least < 3.0, least < 3.0]
        assert bool(found[3]), "what is no number is looked at again"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize(
    "name", ["mean", "caf", "krum", "multikrum", "nnm+caf", "nnm+krum", "nnm+nnm+multikrum"]
)
def test_rules_weigh_many_as_they_weigh_one(name: str, offset: float, device: str) -> None:
    n, f = 21, 4
    shifts = np.geomspace(0.01, 100.0, 15)
    rows = [noisy_rows(seed, n, f, 400, float(shift), offset) for seed, shift in enumerate(shifts)]
    grams = torch.stack([one @ one.T for one in rows])
    rule = agg.parse(name, f=f)
    assert rule.weights_from_grams is not None
    together = rule.weights_from_grams(grams.to(device)).cpu()
    for X, gram, weights in zip(rows, grams, together, strict=True):
        # Equal messages share what any of them would get: which of them does is rounding's choice.
        expected = rule.weights_from_gram(gram)
        torch.testing.assert_close(weights @ X, expected @ X, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(weights[: n - f], expected[: n - f], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["bucketing+caf", "nnm+geomed", "nnm+cwmed", "cwmed", "smea"])
def test_a_rule_that_takes_one_at_a_time_says_so(name: str) -> None:
    assert agg.parse(name, f=1).weights_from_grams is None


def test_rows_that_agree_and_no_liars_have_equal_weights() -> None:
    rule = agg.caf(f=2)
    assert rule.weights_from_grams is not None
    assert rule.weights_from_grams(torch.ones(1, 5, 5, dtype=torch.float64)).tolist() == [[0.2] * 5]
    trusting = agg.caf(f=0).weights_from_grams
    assert trusting is not None
    assert trusting(torch.eye(4, dtype=torch.float64)[None]).tolist() == [[0.25] * 4]


@pytest.mark.parametrize("name", ["caf", "nnm+caf", "krum", "nnm+krum"])
def test_gram_matrices_in_float32_are_weighed_too(name: str) -> None:
    rows = noisy_rows(5, 12, 3, 60, 3.0, 0.0)
    grams = torch.stack([rows @ rows.T, 1e-3 * rows @ rows.T]).float()
    weigh = agg.parse(name, f=3).weights_from_grams
    assert weigh is not None
    torch.testing.assert_close(weigh(grams).double(), weigh(grams.double()), rtol=1e-4, atol=1e-5)

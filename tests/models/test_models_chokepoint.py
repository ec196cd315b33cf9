"""What every private contribution passes: a bound on its norm that holds, and a factor that sums keep to."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from trilemma import models
from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.models import Clip
from trilemma.models.engines.clipping import DOUBLE, MARGIN, Lengths, gamma
from trilemma.models.engines.terms import (
    Lookup,
    Product,
    Shift,
    Term,
    Whole,
    lengths_of,
    together,
)
from trilemma.models.layers.convolution import KernelGradients, Stencil, example_gradients
from trilemma.models.modules.convolutions import ConvolutionWindow, Convolved
from trilemma.testing.examples import Stack

SHAPES = [(1, 3, 5), (2, 40, 30), (9, 3, 2), (16, 24, 24), (64, 6, 200), (40, 64, 48)]
"""Positions, m, n: one position; Gram matrices; formed and kept; formed for its norm alone."""


def exact(terms: list[Term]) -> Tensor:
    """Return the norms (k, b) of the sum of all terms, of what is summed of them, in double precision.

    That is a small product as it is formed, and the factors of others.
    """
    total: Tensor | float = 0.0
    for term in terms:
        if isinstance(term, Product) and not term.small:
            part = torch.einsum("kbpm,kbpn->kbmn", term.left.double(), term.right.double())
        elif isinstance(term, Lookup):
            wide = Lookup(term.ids, term.right.double(), term.rows)
            part = wide.formed()
        else:
            part = term.formed().double()
        total = total + part
    assert isinstance(total, Tensor)
    return total.flatten(2).norm(dim=2)


def ordinary(shape: tuple[int, int, int], seed: int = 1, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    positions, m, n = shape
    generator = Key(seed).torch()
    return scale * torch.randn(2, 3, positions, m, generator=generator), torch.randn(
        2, 3, positions, n, generator=generator
    )


def cancelling(shape: tuple[int, int, int], near: float, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Positions in pairs: inputs that hardly differ, gradients that are opposite."""
    positions, m, n = shape
    generator = Key(seed).torch()
    left = torch.randn(2, 3, (positions + 1) // 2, m, generator=generator)
    right = torch.randn(2, 3, (positions + 1) // 2, n, generator=generator)
    other = right + near * torch.randn(right.shape, generator=generator)
    return torch.cat([left, -left], 2)[:, :, :positions], torch.cat([right, other], 2)[:, :, :positions]


FACTORS = {
    "ordinary": ordinary,
    "small": lambda shape: ordinary(shape, scale=1e-23),
    "both small": lambda shape: tuple(part * 1e-14 for part in ordinary(shape)),
    "smallest": lambda shape: ordinary(shape, scale=1e-38),
    "small and large": lambda shape: tuple(
        part * scale for part, scale in zip(ordinary(shape), (1e-24, 1e16), strict=True)
    ),
    "large": lambda shape: tuple(part * 3e17 for part in ordinary(shape)),
    "cancelling": lambda shape: cancelling(shape, 0.0),
    "nearly cancelling": lambda shape: cancelling(shape, 1e-4),
    "all but cancelling": lambda shape: cancelling(shape, 1e-7),
}


@pytest.mark.parametrize("kind", FACTORS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bound_of_a_product_holds_for_what_is_summed(shape, kind):
    left, right = FACTORS[kind](shape)
    term = Product(left, right)
    lengths = term.lengths()
    true = exact([term])
    # What is formed is compared in its own precision; it may overflow, and then counts as zero.
    assert bool((lengths.norms >= true * (1 - 1e-12)).logical_or(~torch.isfinite(true)).all())
    assert bool((lengths.masses >= true * (1 - 1e-12)).logical_or(~torch.isfinite(true)).all())
    if not term.small:
        mass = (left.double().norm(dim=3) * right.double().norm(dim=3)).sum(2)
        assert bool(
            (lengths.norms <= mass * (1 + 1e-4) + 1e-16 * (1 + left.norm() + right.norm()) ** 2).all()
        )
        assert bool(torch.isfinite(lengths.norms).all())
    if kind == "ordinary":
        assert bool((lengths.norms <= 1.01 * true).all())


@pytest.mark.parametrize(
    ("positions", "m", "n", "most"),
    [(128, 768, 768, 1.01), (512, 768, 3072, 1.03), (64, 50257, 768, 1.01)],
)
def test_what_the_bound_costs_an_ordinary_example(positions, m, n, most):
    generator = Key(1).torch()
    left, right = (torch.randn(1, 1, positions, size, generator=generator) for size in (m, n))
    term = Product(left, right)
    assert 1 <= float(term.lengths().norms / exact([term])) <= most


def test_what_the_bound_costs_a_gradient_that_is_formed():
    term = Product(*ordinary((40, 64, 48)))
    assert not term.small
    assert not term.ghost
    assert bool((term.lengths().norms <= 1.001 * exact([term])).all())


@pytest.mark.parametrize("positions", [3, 40])
@pytest.mark.parametrize("near", [0.0, 1e-7, 1e-4])
def test_the_bound_of_an_embedding(positions, near):
    left, right = cancelling((2 * positions, 2, 6), near)
    ids = torch.zeros(left.shape[:3], dtype=torch.long)
    right = torch.cat([right[:, :, :positions], -right[:, :, positions:]], 2)
    term = Lookup(ids, right, 5)
    true = exact([term])
    assert bool((term.lengths().norms >= true * (1 - 1e-12)).all())
    assert bool((term.lengths().norms <= true + 1e-5 * term.mass).all())


@pytest.mark.parametrize("near", [0.0, 1e-7, 1e-3])
@pytest.mark.parametrize(
    "kinds", [("lookup", "product"), ("product", "whole"), ("lookup", "lookup"), ("small", "lookup")]
)
def test_the_bound_of_uses_that_cancel(kinds, near):
    """Tied weights: each use takes away what the other one brings."""
    generator = Key(3).torch()
    positions, rows, n = (40, 6, 5) if "small" in kinds else (4, 20, 30)
    ids = torch.randint(rows, (1, 3, positions), generator=generator)
    right = torch.randn(1, 3, positions, n, generator=generator)
    close = right + near * torch.randn(right.shape, generator=generator)
    hot = torch.nn.functional.one_hot(ids, rows).float()
    made: dict[str, list[Term]] = {
        "lookup": [Lookup(ids, right, rows), Lookup(ids, -close, rows)],
        "product": [Product(hot, right), Product(-hot, close)],
        "small": [Product(hot, right), Product(-hot, close)],
        "whole": [Whole(Product(hot, right).formed()), Whole(-Product(hot, close).formed())],
    }
    one, other = made[kinds[0]][0], made[kinds[1]][1]
    terms = together([one, other])
    lengths = lengths_of(terms)
    true = torch.stack([term.formed().double() for term in terms]).sum(0)
    assert bool((lengths.norms >= exact(terms) * (1 - 1e-12)).all())
    assert bool((lengths.norms >= true.flatten(2).norm(dim=2) * (1 - 1e-6)).all())


def test_products_of_one_matrix_are_one_product():
    left, right = ordinary((4, 3, 5))
    terms = together([Product(left, right), Whole(torch.zeros(2, 3, 3, 5)), Product(left, -right)])
    assert [type(term) for term in terms] == [Product, Whole]
    assert terms[0].lengths().positions in (1, 8)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_bound_of_a_convolution_that_cancels(groups):
    generator = Key(4).torch()
    one = torch.randn(1, 2, 1, 4, 6, generator=generator)
    x = torch.cat([one, one + 1e-6 * torch.randn(one.shape, generator=generator)], 4)
    grad = torch.randn(1, 2, 1, 2, 10, generator=generator)
    grad[..., 5:] = -grad[..., :5]
    window = ConvolutionWindow((2, 4 // groups, 3), (1,), (0,), (1,), groups)
    term = Convolved(x, grad, window)
    wide = Convolved(x.double(), grad.double(), window).formed().flatten(2).norm(dim=2)
    assert bool((term.lengths().norms >= wide * (1 - 1e-5)).all())
    summed = term.summed(torch.ones(1, 2, dtype=torch.float64))
    assert summed.dtype == torch.float64


def test_biases_and_convolutions_of_layers_are_measured_as_they_are_summed():
    generator = Key(5).torch()
    grad = torch.randn(2, 3, 4, 8, 8, generator=generator)
    found = example_gradients(torch.randn(2, 3, 2, 10, 10, generator=generator), grad, Stencil(3))
    for term in (found, Shift(1e-25 * torch.randn(2, 3, 7, 5, generator=generator))):
        each = term.formed().double()
        norms = each.flatten(2).norm(dim=2)
        assert bool((term.lengths().norms >= norms * (1 - 1e-14)).all())
        assert bool((term.lengths().norms <= norms * (1 + 1e-4) + 1e-17).all())
        factor = torch.rand(2, 3, generator=generator, dtype=torch.float64)
        expected = torch.einsum("kb,kb...->k...", factor, each)
        torch.testing.assert_close(term.summed(factor), expected, rtol=1e-12, atol=0.0)


# --- factors ----------------------------------------------------------------------------------------------


def test_a_factor_keeps_to_the_threshold_and_to_what_rounding_may_move():
    weight = torch.tensor([[0.25, 0.25, 0.0, 0.5]])
    norms = torch.tensor([[1e-3, 8.0, 7.0, 1e3]], dtype=torch.float64)
    masses = norms.clone()
    masses[0, 0] = 1e15  # its gradient is what is left of terms that cancel
    lengths = Lengths(norms, masses, positions=9)
    least = torch.tensor([[0.25]])
    plain, careful = (
        Clip.example(2.0, careful).factor(lengths, weight, least, 4) for careful in (False, True)
    )
    assert plain.dtype == torch.float32
    assert careful.dtype == torch.float64
    assert plain[0, :3].tolist() == [1.0, 0.0625, 1.0]
    assert float(plain[0, 3]) == pytest.approx(1e-3)
    errors = gamma(4 * 9 + 4, DOUBLE) * masses
    assert bool((careful * norms <= 2.0 * weight * (1 + 1e-12))[weight > 0].all())
    assert bool((careful * errors <= MARGIN * 2.0 * 0.25 / 4 * (1 + 1e-12))[weight > 0].all())
    assert careful[0, 0] < 1e-3
    assert careful[0, 1] == pytest.approx(0.0625)


def test_nothing_is_clipped_by_infinity():
    lengths = Lengths.formed(torch.full((1, 2, 3), 1e30))
    weight = torch.full((1, 2), 0.5)
    assert Clip.example(math.inf).factor(lengths, weight, weight[:, :1], 2).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("name", ["mnist-mlp", "module"])
def test_a_careful_sum_is_double_and_in_parts_what_it_is_whole(name):
    if name == "module":
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))
        model, shape = models.from_module(net, nn.CrossEntropyLoss()), (8,)
    else:
        model, shape = models.build(name, (8,), 10), (8,)
    generator = Key(6).torch()
    x, y = torch.randn(2, 12, *shape, generator=generator), torch.randint(10, (2, 12), generator=generator)
    theta, clip = model.init(Key(1)), Clip.example(0.1, careful=True)
    whole = models.gradients(model, theta, Stack(x, y), clip=clip)
    parts = models.gradients(model, theta, Stack(x, y), clip=clip, memory=1)
    assert whole.value.dtype == parts.value.dtype == torch.float64
    torch.testing.assert_close(parts.value, whole.value, rtol=1e-5, atol=1e-8)


def _summed() -> dict[str, tuple[Term, Tensor]]:
    """Return terms, and what their examples contribute, as it is summed."""
    (left, right), (low, wide) = ordinary((4, 20, 30)), ordinary((40, 3, 5))
    ids = torch.randint(7, (2, 3, 4), generator=Key(3).torch())
    x, grad = torch.randn(2, 3, 1, 2, 9), torch.randn(2, 3, 1, 4, 7)
    several = Convolved(x, grad[:, :, :, :, :3], ConvolutionWindow((4, 1, 3), (3,), (0,), (1,), 2))
    doubled = {
        "product": (Product(left, right), Product(left.double(), right.double())),
        "lookup": (Lookup(ids, right, 7), Lookup(ids, right.double(), 7)),
        "convolution": (
            Convolved(x, grad, ConvolutionWindow((4, 2, 3), (1,), (0,), (1,), 1)),
            Convolved(x.double(), grad.double(), ConvolutionWindow((4, 2, 3), (1,), (0,), (1,), 1)),
        ),
    }
    kept: dict[str, Term] = {
        "small product": Product(low, wide),
        "shift": Shift(right),
        "whole": Whole(right),
        "groups": several,
        "kernel": KernelGradients(torch.randn(2, 3, 2, 5, 5), torch.randn(2, 3, 4, 3, 3), Stencil(3)),
    }
    for term in kept.values():
        term.lengths()
    return {name: (term, wide.formed()) for name, (term, wide) in doubled.items()} | {
        name: (term, term.formed().double()) for name, term in kept.items()
    }


@pytest.mark.parametrize("name", _summed())
def test_a_careful_sum_is_double_whatever_is_summed(name):
    term, each = _summed()[name]
    factor = torch.rand(2, 3, generator=Key(5).torch(), dtype=torch.float64)
    found = term.summed(factor)
    expected = torch.einsum("kb,kb...->k...", factor, each)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.reshape(expected.shape), expected, rtol=0, atol=1e-13)


# --- precision --------------------------------------------------------------------------------------------


@pytest.fixture
def precision():
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def test_what_rounds_to_bfloat16_is_refused(precision):
    precision("medium")
    with pytest.raises(UserError, match="bfloat16"):
        Product(*ordinary((4, 30, 30))).lengths()


def tf32(x: Tensor) -> Tensor:
    """Round to 10 bits of mantissa, as tensor cores do with factors."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("kind", ["ordinary", "cancelling", "nearly cancelling"])
@pytest.mark.parametrize("shape", [*SHAPES, (128, 768, 768)], ids=str)
def test_tf32_counts_with_what_it_rounds(precision, monkeypatch, shape, kind):
    """Products of rounded factors stand in for tensor cores; careful sums multiply the factors themselves."""
    left, right = FACTORS[kind](shape)
    product = torch.bmm
    precision("high")
    monkeypatch.setattr(torch, "bmm", lambda one, other: product(tf32(one), tf32(other)))
    term = Product(left, right)
    found, true = term.lengths(), exact([Whole(term.formed()) if term.small else term])
    assert bool((found.norms >= true * (1 - 1e-12)).all())
    if kind == "ordinary":
        assert bool((found.norms <= true * 1.04).all())


def test_tf32_costs_a_long_example_three_points_more_at_most(precision):
    precision("high")
    generator = Key(1).torch()
    term = Product(*(torch.randn(1, 1, 512, size, generator=generator) for size in (768, 3072)))
    assert float(term.lengths().norms / exact([term])) <= 1.09


# --- the promise as a whole -------------------------------------------------------------------------------


def replaced(model: models.Model, theta: Tensor, size: int, heads: Tensor, tails: Tensor, y: Tensor) -> float:
    """Return the move of the mean of `size` examples over 2C/b when the first is another one."""
    moved = []
    for first in (heads, tails):
        x = torch.stack([first] + [tails] * (size - 1))[None]
        clip = Clip.example(1.0, careful=True)
        moved.append(models.gradients(model, theta, Stack(x, y.expand(1, size)), clip=clip).value[0])
    return float((moved[0] - moved[1]).norm()) / (2.0 / size)


class Means(nn.Module):
    """A linear layer at two positions, whose outputs pull in opposite directions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4, bias=False)
        self.pull = nn.Parameter(torch.tensor([1.0, -1.0]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.pull[:, None]).sum(1)


def test_a_record_whose_positions_cancel_moves_no_more_than_declared():
    model = models.from_module(Means(), nn.CrossEntropyLoss())
    generator, found = Key(8).torch(), []
    for large, near in itertools.product((1e2, 1e5), (1e-2, 1e-4, 1e-6)):
        theta = large * torch.randn(model.dim, generator=generator)
        one = torch.randn(6, generator=generator)
        heads = torch.stack([one, one + near * torch.randn(6, generator=generator)])
        tails = torch.stack([one, one])
        found.append(replaced(model, theta, 50, heads, tails, torch.tensor(1)))
    assert max(found) <= 1 + MARGIN

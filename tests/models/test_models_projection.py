"""Projections from a seed: their law, their two forms, and that nobody needs to store them."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.models.coordinates import projection as module
from trilemma.models.coordinates.projection import (
    IdentityProjection,
    Seeded,
    gaussian,
    orthonormal,
    projection,
)

MAKERS = {"gaussian": gaussian, "orthonormal": orthonormal}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("columns", [7, 4096, 9001])
def test_blocks_and_stored_matrix_agree(kind: str, columns: int) -> None:
    stored = MAKERS[kind](5, columns, Key(3))
    drawn = MAKERS[kind](5, columns, Key(3), memory=0)
    assert stored.stored is not None
    assert drawn.stored is None
    x = torch.randn(4, columns, generator=Key(4).torch())
    c = torch.randn(4, 5, generator=Key(5).torch())
    torch.testing.assert_close(stored.apply(x), drawn.apply(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(stored.lift(c), drawn.lift(c), rtol=1e-4, atol=1e-6)
    for p in (stored, drawn):
        moved, image = p.advance(x, 0.1 * x, 0.3 * c)
        torch.testing.assert_close(moved, 0.9 * x + p.lift(0.3 * c), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(image, p.apply(moved), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [gaussian, orthonormal])
def test_lift_is_the_transpose_of_apply(make: object) -> None:
    p = make(6, 5000, Key(1), memory=0)  # type: ignore[operator]
    x = torch.randn(3, 5000, generator=Key(2).torch())
    c = torch.randn(3, 6, generator=Key(3).torch())
    torch.testing.assert_close((p.apply(x) * c).sum(1), (x * p.lift(c)).sum(1), rtol=1e-3, atol=1e-4)


def test_rows_are_on_the_unit_sphere() -> None:
    p = gaussian(21, 610, Key(1))
    torch.testing.assert_close(p.stored.norm(dim=1), torch.ones(21))
    # Singular values of a d × D row-normalised Gaussian lie in about 1 ± √(d/D).
    values = torch.linalg.svdvals(p.stored)
    assert 1 - 1.2 * (21 / 610) ** 0.5 < values.min() < values.max() < 1 + 1.2 * (21 / 610) ** 0.5


def test_entries_have_the_gaussian_law() -> None:
    """Mean, variance and fourth moment of √D·P over 10⁶ entries, each within five standard errors."""
    entries = gaussian(50, 20_000, Key(9)).stored.double().flatten() * 20_000**0.5
    count = entries.numel()
    assert abs(entries.mean()) < 5 / count**0.5
    assert abs(entries.pow(4).mean() - 3) < 5 * (96 / count) ** 0.5


def test_orthonormal_rows() -> None:
    p = orthonormal(40, 9000, Key(1), memory=0)
    torch.testing.assert_close(p.apply(p.lift(torch.eye(40))), torch.eye(40), rtol=0, atol=1e-5)


def test_orthonormal_is_gram_schmidt_of_the_gaussian_rows() -> None:
    rows = gaussian(4, 300, Key(2)).stored.double()
    basis: list[torch.Tensor] = []
    for row in rows:
        for other in basis:
            row = row - (row @ other) * other
        basis.append(row / row.norm())
    torch.testing.assert_close(
        orthonormal(4, 300, Key(2)).stored.double(), torch.stack(basis), atol=1e-5, rtol=0
    )


def test_the_seed_is_all_there_is_to_share() -> None:
    here = projection("gaussian", 8, 5000, seed=77)
    module._remembered.cache_clear()
    there = projection("gaussian", 8, 5000, seed=77)
    other = projection("gaussian", 8, 5000, seed=78)
    assert torch.equal(here.stored, there.stored)
    assert not torch.equal(here.stored, other.stored)


def test_a_projection_too_large_to_store_is_not_stored() -> None:
    p = gaussian(16, 1_000_000, Key(1), memory=1 << 20)
    x = torch.ones(2, 1_000_000)
    tracemalloc.start()
    p.apply(x)
    tracemalloc.stop()
    assert isinstance(p, Seeded)
    assert p.stored is None
    assert p.mixing.numel() == 16


def test_identity() -> None:
    p = projection("identity", 3, 5, seed=0)
    x = torch.randn(2, 5)
    assert isinstance(p, IdentityProjection)
    assert p.rows == 5
    assert torch.equal(p.apply(x), x)
    assert torch.equal(p.lift(x), x)


@pytest.mark.parametrize("rows", [0, 11])
def test_impossible_sizes_are_refused(rows: int) -> None:
    with pytest.raises(UserError, match="allowed are 1 to 10"):
        gaussian(rows, 10, Key(1))


def test_wrong_shapes_are_refused() -> None:
    p = gaussian(2, 10, Key(1))
    with pytest.raises(UserError, match=r"\(k, 10\)"):
        p.apply(torch.zeros(3, 9))
    with pytest.raises(UserError, match=r"\(k, 2\)"):
        p.lift(torch.zeros(2))

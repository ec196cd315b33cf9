"""The chokepoint of clipping: nothing else scales what a client or an example contributes.

    clip(g, C) = s g,    s = min(1, C/N̄),    N̄ ≥ ‖g‖ of what is really summed

An example's gradient G of one parameter is often never formed: it is Σ_p l_p ⊗ r_p over positions p, and its
norm a sum in which large terms may cancel. So whoever makes gradients says of every example (`Lengths`)

    N̄ ≥ ‖G‖                  an upper bound, rounding, underflow and flushing to zero included
    S = Σ_p ‖l_p‖ ‖r_p‖      what rounding errors of sums are proportional to

of the values that the summing product multiplies. A *careful* sum over a batch is in double precision. One of
b examples with P positions errs there by at most Σ_j s_j E_j, E = γ_{bP+4} S, γ_k = ku/(1 − ku), u = 2⁻⁵³.
That is a sum over all examples: another record's cancellation would move it. So every example keeps

    s E ≤ 2⁻⁸ w C / b

too, which ordinary ones do by far, and replacing an example of weight w moves a careful sum by at most
2wC (1 + 2⁻⁸). docs/privacy.md has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trilemma.base.errors import UserError

PER_CLIENT = 'clip per client (Clip.client; in a configuration [algorithm] unit = "user")'
"""What to do where no example has a gradient of its own, as refusals say it."""

DOUBLE = 2.0**-53
"""The unit roundoff of double precision."""

MARGIN = 2.0**-8
"""The share of C that rounding may move a careful sum by, beside what clipping allows."""

BLOCK = 256
"""How many numbers of a long row are added up in single precision."""

_ABOVE = 1 + 2.0**-40  # what a few roundings in double precision, or a long sum of squares, may take away


def gamma(count: float, unit: float) -> float:
    """Return γ_k = ku/(1 − ku): by how much a sum of k terms errs, relative to the sum of their sizes.

    >>> gamma(2**20, 2.0**-24) == 2.0**-4 / (1 - 2.0**-4), gamma(2**24, 2.0**-24)
    (True, inf)
    """
    return count * unit / (1 - count * unit) if count * unit < 1 else math.inf


def norms_of_rows(rows: Tensor) -> Tensor:
    """Return the norms along the last axis in double precision, where no float32 over- or underflows at once.

    Of long rows, blocks of 256 numbers are added up in the precision they have: several times as fast, and
    off by 8e-6 at most.
    """
    end = rows.shape[-1] // BLOCK * BLOCK
    if end <= BLOCK or rows.dtype != torch.float32:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
        return norms
    blocks = torch.linalg.vector_norm(rows[..., :end].view(*rows.shape[:-1], -1, BLOCK), dim=-1)
    norms = torch.linalg.vector_norm(blocks, dim=-1, dtype=torch.float64)
    if end < rows.shape[-1]:
        norms = torch.hypot(norms, torch.linalg.vector_norm(rows[..., end:], dim=-1).double())
    return norms


def lengths_of_rows(rows: Tensor, loosely: bool = False) -> Tensor:
    """Return upper bounds of the norms along the last axis, in double precision.

    But for a few roundings in double precision, which are made up for once: by `Lengths.together`.
    `loosely`: all in single precision. A sum of n squares errs by γ_{n+2} of itself, its root by half of that
    and of what underflow takes from squares and sums, 2n 2⁻¹²⁶.

    >>> one = torch.full((1, 300), 0.1)
    >>> 3**0.5 < float(lengths_of_rows(one)) <= float(lengths_of_rows(one, loosely=True)) < 1.0001 * 3**0.5
    True
    """
    length = rows.shape[-1]
    if rows.dtype != torch.float32 or not (loosely or length >= 2 * BLOCK):
        return norms_of_rows(rows)
    norms = torch.linalg.vector_norm(rows, dim=-1).double() if loosely else norms_of_rows(rows)
    added = length if loosely else BLOCK
    return norms.mul_(1 + gamma(added + 8, 2.0**-24) / 2).add_(math.sqrt(2 * length) * 2.0**-63)


@dataclass(frozen=True)
class Lengths:
    """N̄ and S of examples (k, b), in double precision, and the most positions P one is summed over.

    What the terms of a gradient say of themselves is put `together` before anything is clipped by it.
    """

    norms: Tensor
    masses: Tensor
    positions: int = 1

    @staticmethod
    def formed(value: Tensor) -> Lengths:
        """Of gradients (k, b, …) that are summed as they are."""
        if value.dim() != 3:
            value = value.flatten(2) if value.dim() > 3 else value.unsqueeze(2)
        return Lengths.exactly(lengths_of_rows(value))

    @staticmethod
    def exactly(norms: Tensor) -> Lengths:
        """Of gradients with nothing to cancel: S is their norm."""
        return Lengths(norms, norms)

    @staticmethod
    def bounded(squares: Tensor, mass: Tensor, positions: int) -> Lengths:
        """Of gradients with ‖G‖² ≤ `squares`, which may have overflown, and ‖G‖ ≤ S = `mass`."""
        return Lengths(torch.fmin(squares.sqrt(), mass), mass, positions)

    @staticmethod
    def together(parts: Sequence[Lengths]) -> Lengths:
        """Of several parameters, or disjoint parts of one."""
        norms = _root([part.norms for part in parts])
        same = all(part.masses is part.norms for part in parts)
        masses = norms if same else _root([part.masses for part in parts])
        return Lengths(norms, masses, max(part.positions for part in parts))


def _root(norms: Sequence[Tensor]) -> Tensor:
    """Return √Σ n², from above."""
    return torch.stack(tuple(norms)).square_().sum(0).sqrt_().mul_(_ABOVE)


@dataclass(frozen=True)
class Clip:
    """What is clipped to norm C: nothing, each client's gradient, or each example's.

    `careful`: sums over examples are in double precision, and stay so: see the head of this module.

    >>> Clip.example(2.25)
    Clip(unit='example', threshold=2.25, careful=False)
    >>> Clip.client(-1.0)
    Traceback (most recent call last):
    trilemma.base.errors.UserError: a clipping threshold must be positive (infinity: no clipping), got -1.0
    """

    unit: Literal["none", "client", "example"]
    threshold: float
    careful: bool = False

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise UserError(
                f"a clipping threshold must be positive (infinity: no clipping), got {self.threshold}"
            )

    @staticmethod
    def none() -> Clip:
        """Clip nothing."""
        return Clip("none", math.inf)

    @staticmethod
    def client(threshold: float) -> Clip:
        """Clip each client's mean gradient."""
        return Clip("client", threshold)

    @staticmethod
    def example(threshold: float, careful: bool = False) -> Clip:
        """Clip each example's gradient before the mean."""
        return Clip("example", threshold, careful)

    @property
    def finite(self) -> bool:
        """Whether anything is clipped."""
        return math.isfinite(self.threshold)

    def factor(self, lengths: Lengths, weight: Tensor, least: Tensor | None, size: int) -> Tensor:
        """Return every example's s (k, b); double precision, and so the sum's, if `careful`.

        Args:
            lengths: Those of the gradients of w_i ℓ_i.
            weight: w_i (k, b); where it is 0, s is 1.
            least: The least positive weight of each client's batch (k, 1); only a `careful` sum asks.
            size: How many examples a client's batch has, padding included.

        >>> one = torch.ones(1, 1)
        >>> long = Lengths.formed(torch.full((1, 1, 4), 4.0))
        >>> Clip.example(2.0).factor(long, one, one, 1)
        tensor([[0.2500]])
        """
        if not self.finite:
            return torch.ones_like(weight)
        factor = (self.threshold * weight / lengths.norms).clamp(max=1.0)
        if self.careful:
            assert least is not None
            errors = gamma(size * lengths.positions + 4, DOUBLE) * lengths.masses
            factor = torch.fmin(factor, MARGIN / size * self.threshold * least / errors)
        factor = torch.where(weight > 0, factor, 1.0)
        return factor if self.careful else factor.to(weight.dtype)


NO_CLIP = Clip.none()


def clip_rows(vectors: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Clip every row to norm `threshold`; also return the norms before (k,).

    >>> clip_rows(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)[0]
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    norms = norms_of_rows(vectors)
    if math.isinf(threshold):
        return vectors, norms
    exact = (threshold / norms).clamp(max=1.0)  # a zero row divides to infinity and is clamped to 1
    factor = exact.to(vectors.dtype)  # rounded down: one below 1e-38 has few bits
    factor = torch.where(factor.double() > exact, factor.nextafter(torch.zeros_like(factor)), factor)
    return vectors * factor[:, None], norms

"""Clipping: clip(g, C) = g · min(1, C/‖g‖), per client or per example."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trilemma.errors import UserError

PER_CLIENT = 'clip per client (Clip.client; in a configuration [algorithm] unit = "user")'
"""What to do where no example has a gradient of its own, as refusals say it."""


@dataclass(frozen=True)
class Clip:
    """What is clipped to norm C: nothing, each client's gradient, or each example's.

    `careful` sums examples so that rounding in single precision moves the mean over a batch of b by less than
    2⁻⁸ C/b, however large the batch: see `together`.

    >>> Clip.example(2.25)
    Clip(unit='example', threshold=2.25, careful=False)
    >>> Clip.client(-1.0)
    Traceback (most recent call last):
    trilemma.errors.UserError: a clipping threshold must be positive (infinity: no clipping), got -1.0
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

    def together(self, batch: int) -> int:
        """Return how many of `batch` examples may be added up in single precision.

        A sum of m numbers in single precision errs by at most m 2⁻²⁴ of the sum of their sizes, in whatever
        order they are added, and the mean of clipped gradients has Σ ‖w_i g_i‖ ≤ C: an error of m 2⁻²⁴ C. The
        parts are added in double precision and the total is rounded once: (m + 2) b ≤ 2¹⁶ keeps all of it
        below 2⁻⁸ C/b.

        >>> [Clip.example(1.0, careful=True).together(batch) for batch in (100, 250, 1000, 4096)]
        [100, 250, 63, 14]
        >>> Clip.example(1.0).together(4096)
        4096
        """
        return min(batch, max(1, 2**16 // batch - 2)) if self.careful else batch

    def factor(self, norms: Tensor) -> Tensor:
        """Return min(1, C/‖g‖): 1 at norm 0, NaN at norm NaN, exactly 1 everywhere for C = ∞.

        >>> Clip.client(2.0).factor(torch.tensor([0.0, 1.0, 8.0]))
        tensor([1.0000, 1.0000, 0.2500])
        """
        if math.isinf(self.threshold):
            return torch.ones_like(norms)
        return (self.threshold / norms).clamp(max=1.0)


NO_CLIP = Clip.none()

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

    >>> Clip.example(2.25)
    Clip(unit='example', threshold=2.25)
    >>> Clip.client(-1.0)
    Traceback (most recent call last):
    trilemma.errors.UserError: a clipping threshold must be positive (infinity: no clipping), got -1.0
    """

    unit: Literal["none", "client", "example"]
    threshold: float

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
    def example(threshold: float) -> Clip:
        """Clip each example's gradient before the mean."""
        return Clip("example", threshold)

    def factor(self, norms: Tensor) -> Tensor:
        """Return min(1, C/‖g‖): 1 at norm 0, NaN at norm NaN, exactly 1 everywhere for C = ∞.

        >>> Clip.client(2.0).factor(torch.tensor([0.0, 1.0, 8.0]))
        tensor([1.0000, 1.0000, 0.2500])
        """
        if math.isinf(self.threshold):
            return torch.ones_like(norms)
        return (self.threshold / norms).clamp(max=1.0)


NO_CLIP = Clip.none()

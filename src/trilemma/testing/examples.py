"""Batches of examples, and clipping as it is defined."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Stack:
    """A batch per client."""

    x: Tensor
    y: Tensor
    weight: Tensor | None = None


def clip(vector: Tensor, threshold: float) -> Tensor:
    """Return g · min(1, C/‖g‖)."""
    norm = float(vector.norm())
    return vector * min(1.0, threshold / norm) if norm > 0 else vector

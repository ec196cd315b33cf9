"""Slow, obvious rules to attack, and what an attacker sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trilemma.attacks import View
from trilemma.base.keys import Key

Target = Callable[..., Any]
"""(messages, key=None) -> what has the aggregate as `value`."""


def gram_krum(f: int) -> Callable[[Tensor], Tensor]:
    """Return Krum as a map from the Gram matrix to weights."""

    def weights(gram: Tensor) -> Tensor:
        squares = gram.diagonal()
        distances = squares[:, None] + squares[None, :] - 2 * gram
        distances.fill_diagonal_(float("inf"))
        scores = distances.sort(dim=1).values[:, : max(1, len(gram) - f - 2)].sum(dim=1)
        return torch.nn.functional.one_hot(scores.argmin(), len(gram)).double()

    return weights


@dataclass
class GramRule:
    """A geometric rule; counts how often it was asked what."""

    weights: Callable[[Tensor], Tensor]
    geometric: bool = True
    aggregations: int = 0
    candidates: int = 0

    def weights_from_gram(self, gram: Tensor) -> Tensor:
        """Return the weights."""
        self.candidates += 1
        return self.weights(gram)

    def __call__(self, vectors: Tensor, *, key: Key | None = None) -> Any:
        """Return the aggregate."""
        self.aggregations += 1
        wide = vectors.double()
        return SimpleNamespace(value=self.weights(wide @ wide.T) @ wide)


def plain_mean(vectors: Tensor, *, key: Key | None = None) -> Any:
    """Return the mean."""
    return SimpleNamespace(value=vectors.mean(dim=0))


def trimmed_mean(f: int) -> Target:
    """Return the mean without the f largest and f smallest values."""

    def rule(vectors: Tensor, *, key: Key | None = None) -> Any:
        return SimpleNamespace(value=vectors.sort(dim=0).values[f : len(vectors) - f].mean(dim=0))

    return rule


def view_of(honest: Tensor, byzantine: int = 2, **changes: Any) -> View:
    """Return what `byzantine` liars see of the honest messages."""
    given: dict[str, Any] = {"own": None, "target": plain_mean, "round": 0, "key": Key(7)}
    return View(honest=honest, byzantine=byzantine, **(given | changes))


def gaussian_rows(h: int, d: int, seed: int = 1, mean: float = 0.0) -> Tensor:
    """Return h honest messages."""
    return torch.randn(h, d, generator=torch.Generator().manual_seed(seed)) + mean

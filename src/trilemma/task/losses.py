"""Losses where none is given, and whether a loss couples the examples of a batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trilemma.data.types import Dataset
from trilemma.models.modules import token_cross_entropy

Loss = Callable[[Any, Tensor], Tensor]
"""(outputs, targets) -> the mean loss of a batch, or the loss of every example."""


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error of numbers, whatever axes they have.

    >>> float(squared_error(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 3.0])))
    0.5
    """
    return nn.functional.mse_loss(outputs.flatten(), targets.to(outputs.dtype).flatten())


def default_loss(dataset: Dataset | None) -> Loss:
    """Return cross entropy where there are classes (of examples, or of tokens), else the squared error."""
    if dataset is None:
        return nn.CrossEntropyLoss()
    if dataset.classes is None:
        return squared_error
    return nn.CrossEntropyLoss() if dataset.y_train.dim() == 1 else token_cross_entropy


def couples(loss: Loss, outputs: Tensor, targets: Tensor) -> bool:
    """Tell whether a loss looks at several examples at once, by comparing a batch with its single examples.

    A loss that does not is the mean, or the sum, of its examples' own. torch's own losses do not; a mean
    weighted by classes is taken without its mean (`models.from_module`).

    >>> torch.manual_seed(0) and couples(squared_error, torch.randn(4, 1), torch.randn(4))
    False
    >>> couples(lambda out, y: (out - out.mean()).square().mean(), torch.randn(4, 1), torch.randn(4))
    True
    """
    if len(targets) < 2 or isinstance(loss, nn.modules.loss._Loss) or loss is token_cross_entropy:
        return False
    noise = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs)
    # Where a model starts from zero its outputs are all alike and may hide what a loss does: try others too.
    for tried in (outputs, outputs + noise):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                together = loss(tried, targets).double()
                alone = torch.stack(
                    [loss(tried[i : i + 1], targets[i : i + 1]).double().mean() for i in range(len(targets))]
                )
            except (RuntimeError, ValueError):
                if tried is outputs:
                    raise
                continue  # a loss of probabilities, say: other outputs are none
        fits = [alone.mean(), alone.sum()] if together.dim() == 0 else [alone]
        if not any(
            _close(together.reshape(one.shape), one) for one in fits if together.numel() == one.numel()
        ):
            return True
    return False


def _close(one: Tensor, other: Tensor) -> bool:
    return bool(torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True))

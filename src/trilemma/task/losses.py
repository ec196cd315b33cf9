"""The loss where none is given, and what a loss asks of a model's outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from trilemma.base.errors import UserError
from trilemma.data.types import Dataset
from trilemma.models.modules import token_cross_entropy

Loss = Callable[[Any, Tensor], Tensor]
"""(outputs, targets) -> the mean loss of a batch, or the loss of every example."""


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error of numbers, whatever axes they have.

    >>> import torch
    >>> float(squared_error(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 3.0])))
    0.5
    """
    if outputs.numel() != targets.numel():
        raise UserError(
            f"the squared error of outputs {tuple(outputs.shape)} from targets {tuple(targets.shape)}: each "
            "target needs one output; give a loss of your own, or class labels as whole numbers"
        )
    return nn.functional.mse_loss(outputs.flatten(), targets.to(outputs.dtype).flatten())


def refuse_missing_outputs(
    loss: Loss, outputs: Tensor, classes: int | None, model: str, first: Callable[[int], str]
) -> None:
    """Refuse a model that has fewer outputs than there are classes, where the loss takes one for each.

    The examples on which a loss is tried need not show every class: those of a sorted table show one.
    `first` tells where the first label is that has no output.
    """
    by_class = (isinstance(loss, nn.CrossEntropyLoss) and outputs.dim() == 2) or loss is token_cross_entropy
    if by_class and classes is not None and outputs.shape[-1] < classes:
        raise UserError(
            f"{model} has outputs {tuple(outputs.shape)} for {classes} classes{first(outputs.shape[-1])}: "
            "cross entropy takes one for each class, in the last axis; for one logit of two classes give "
            "targets 0.0 and 1.0 of the outputs' shape, with loss = nn.BCEWithLogitsLoss(); if the targets "
            'are numbers to predict and no classes, say target = "values"'
        )


def default_loss(dataset: Dataset | None) -> Loss:
    """Return cross entropy where there are classes (of examples, or of tokens), else the squared error.

    Of several yes-or-no labels it is the binary cross entropy of one logit for each.
    """
    if dataset is None:
        return nn.CrossEntropyLoss()
    if dataset.multilabel:
        return nn.BCEWithLogitsLoss()
    if dataset.classes is None:
        return squared_error
    return nn.CrossEntropyLoss() if dataset.y_train.dim() == 1 else token_cross_entropy

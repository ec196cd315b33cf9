"""What is to be predicted: class labels, several labels at once, a label per token, or any other numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.data.own.columns import Column, ColumnPlace, numbers_in
from trilemma.data.types import IGNORED

Target = Literal["classes", "multi-label", "tokens", "values"]
"""One class per example; several yes-or-no labels; one class per token; any other numbers."""


@dataclass(frozen=True)
class Targets:
    """How targets are read: what they are (None: as their type says) and their classes.

    `classes` is a number, or the names in order; None: one more than the largest label.
    """

    kind: Target | None = None
    classes: int | Sequence[Any] | None = None

    def read(
        self, given: Sequence[tuple[ColumnPlace, Column]], length: int | None = None
    ) -> tuple[list[Tensor], int | None]:
        """Return everybody's targets and the number of classes, if there are any.

        >>> Targets(classes=["no", "yes"]).read([(ColumnPlace("client 0"), Column(np.array(["yes", "no"])))])
        ([tensor([1, 0])], 2)
        >>> Targets(classes=3).read([(ColumnPlace("client 0"), Column(torch.tensor([0, 2, 3])))])
        Traceback (most recent call last):
        trilemma.base.errors.UserError: client 0, row 2: label 3; allowed: 0 to 2
        """
        kind = self.settled(given[0][1], sequences=True).kind
        assert kind is not None
        numbers = [(place, self._numbered(place, column)) for place, column in given]
        if kind == "tokens":
            dense = [(place, values) for place, values in _padded(numbers, length)]
        else:
            dense = [(place, _stacked(place, column)) for place, column in numbers]
        read = {"classes": _class, "tokens": _class, "multi-label": _several, "values": _values}[kind]
        targets = [read(place, values, kind) for place, values in dense]
        for place, target in zip([place for place, _ in dense], targets, strict=True):
            if target.shape[1:] != targets[0].shape[1:]:
                raise UserError(
                    f"{place.who}: targets of shape {tuple(target.shape[1:])}, {dense[0][0].who} has "
                    f"{tuple(targets[0].shape[1:])}; all must be alike"
                )
        if kind in ("multi-label", "values"):
            return targets, None
        classes = self.classes if isinstance(self.classes, int) else self._count(targets)
        for (place, _), target in zip(dense, targets, strict=True):
            _check_range(place, target, classes, kind)
        return targets, classes

    def settled(self, first: Column, sequences: bool) -> Targets:
        """Return the same with what the targets are, where that was not said: by type and shape alone.

        `sequences` says whether examples are sequences: several whole numbers are then one for each token,
        else yes-or-no labels.

        >>> labels = Column(torch.tensor([[0, 1, 1], [1, 0, 0]]))
        >>> Targets().settled(labels, sequences=True).kind, Targets().settled(labels, sequences=False).kind
        ('tokens', 'multi-label')
        """
        if self.kind is not None and self.kind not in get_args(Target):
            raise UserError(f"target = {self.kind!r}; allowed: {', '.join(get_args(Target))}")
        named = self.classes is not None and not isinstance(self.classes, int)
        return replace(self, kind=self.kind or _kind(first, sequences, named))

    def _numbered(self, place: ColumnPlace, column: Column) -> Column:
        """Replace names of classes by their numbers."""
        if self.classes is None or isinstance(self.classes, int):
            if isinstance(column.values, np.ndarray):
                cure = f"is text; name the classes, in order, with classes = [{column.values[0]!r}, …]"
                return Column(numbers_in(column.values, lambda row: f"{place.at(row)}: label", cure))
            return column
        names = [*self.classes]
        if isinstance(column.values, Tensor) and all(isinstance(name, str) for name in names):
            return column  # numbers are the names' places, from 0
        numbers = {name: number for number, name in enumerate(names)}
        if isinstance(column.values, list):
            return Column([self._look_up(place, row.tolist(), numbers) for row in column.values])
        return Column(self._look_up(place, column.values.tolist(), numbers))

    def _look_up(self, place: ColumnPlace, labels: Sequence[Any], numbers: dict[Any, int]) -> Tensor:
        for row, label in enumerate(labels):
            if label not in numbers:
                raise UserError(f"{place.at(row)}: label {label!r}; allowed: {', '.join(map(repr, numbers))}")
        return torch.tensor([numbers[label] for label in labels])

    def _count(self, targets: Sequence[Tensor]) -> int:
        if self.classes is not None and not isinstance(self.classes, int):
            return len(self.classes)
        return 1 + max((int(target.max()) for target in targets if target.numel()), default=0)


def _kind(column: Column, sequences: bool, named: bool) -> Target:
    """Tell what targets are by their type and shape, never by their values; `named`: they are names."""
    values = column.values
    if isinstance(values, list):
        return "tokens" if named or values[0].dtype == torch.int64 else "values"
    one = values.ndim == 1 or math.prod(values.shape[1:]) == 1
    if named or isinstance(values, np.ndarray):
        return "classes" if one else "tokens"
    if values.dtype == torch.int64:
        return "classes" if one else "tokens" if sequences else "multi-label"
    if values.dtype == torch.bool:
        return "classes" if one else "multi-label"
    return "values"


def _stacked(place: ColumnPlace, column: Column) -> Tensor:
    lengths = column.lengths
    if lengths is not None and len(set(lengths.tolist())) > 1:
        row = int(np.flatnonzero(lengths != lengths[0])[0])
        raise UserError(f"{place.at(row)}: {lengths[row]} targets, row 0 has {lengths[0]}; all must be alike")
    return column.dense(None, 0)


def _padded(
    given: Sequence[tuple[ColumnPlace, Column]], length: int | None
) -> list[tuple[ColumnPlace, Tensor]]:
    longest = max((int(c.lengths.max()) for _, c in given if c.lengths is not None and len(c)), default=0)
    return [(place, column.dense(length or longest, IGNORED)) for place, column in given]


def _class(place: ColumnPlace, values: Tensor, kind: str) -> Tensor:
    """Read class labels: whole numbers, one per example unless they are the tokens'."""
    if kind == "classes" and values.dim() > 1:
        if values.shape[1:].numel() != 1:
            raise UserError(
                f"{place.who}: targets of shape {tuple(values.shape[1:])} where classes are one number each; "
                "allowed with target = 'multi-label', 'tokens' or 'values'"
            )
        values = values.flatten()
    place.check_finite(values, "the label")
    whole = values.round() if values.is_floating_point() else values
    if bool((whole != values).any()):
        row, *index = (int(number) for number in (whole != values).nonzero()[0])
        raise UserError(
            f"{place.at(row)}: label {float(values[row][tuple(index)]):g}; class labels are whole numbers "
            "(say target = 'values' if these are not classes)"
        )
    return whole.to(torch.int64)


def _several(place: ColumnPlace, values: Tensor, kind: str) -> Tensor:
    """Read yes-or-no labels."""
    if values.dim() != 2:
        raise UserError(f"{place.who}: multi-label targets are a matrix, a row for each example")
    wrong = (values != 0) & (values != 1)
    if bool(wrong.any()):
        row, index = (int(number) for number in wrong.nonzero()[0])
        raise UserError(
            f"{place.at(row, '', (index,))}: label {float(values[row, index]):g}; allowed: 0 and 1 (or say "
            "target = 'tokens' for a class per token, 'values' for other numbers)"
        )
    return values.to(torch.float32)


def _values(place: ColumnPlace, values: Tensor, kind: str) -> Tensor:
    """Read any numbers."""
    place.check_finite(values, "the target")
    return values.to(torch.float32)


def _check_range(place: ColumnPlace, target: Tensor, classes: int, kind: str) -> None:
    wrong = (target < 0) | (target >= classes)
    if kind == "tokens":
        wrong &= target != IGNORED
    if bool(wrong.any()):
        row, *index = (int(number) for number in wrong.nonzero()[0])
        token = f", token {index[0]}" if index else ""
        raise UserError(
            f"{place.at(row)}{token}: label {int(target[row][tuple(index)])}; allowed: 0 to {classes - 1}"
        )

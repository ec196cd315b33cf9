"""What a directed search begins with: records and broadcasts that arithmetic finds hard.

Records stay within a declaration (`trilemma.data.own.declared`), but for those that are not numbers: a client
counts them as zero, and a release must not show them either. Broadcasts stay within the public bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trilemma.base.keys import Key
from trilemma.data.own.declared import Declaration, Kind, Values, made_up
from trilemma.data.types import Features, columns_of, each
from trilemma.models import Model, unflatten

MOST = torch.finfo(torch.float32).max

SIZES = (1e-42, 1e-30, 1e-20, 1e13, 1e19, 1e25, MOST)
"""Numbers whose squares, or products, underflow or overflow in single precision."""

ODD = (0.0, -0.0, math.nan, math.inf, -math.inf)
"""Numbers that are none, or no numbers."""

REST = (1e-4, 3e-4, 1e-3)
"""What is left where two parts nearly cancel: its square is about the rounding of theirs."""

MARGINS = (50.0, 52.0, 100.0)
"""Biases of a class at which the gradient of a loss is tiny, or nothing."""

ORDINARY = 12
"""Records that are made up as usual."""


@dataclass(frozen=True)
class Pool:
    """Records by name: features (n, …) and targets (n, …), the `tame` ones of ordinary size first."""

    names: tuple[str, ...]
    x: Features
    y: Tensor
    tame: int

    def __len__(self) -> int:
        return len(self.names)

    def first(self, count: int) -> Pool:
        """Return the first few."""
        return Pool(self.names[:count], each(self.x, lambda part: part[:count]), self.y[:count], count)

    def with_(self, name: str, x: Features, y: Tensor) -> Pool:
        """Return the pool with one more record, (1, …)."""
        more = columns_of(x)
        grown = {key: torch.cat([old, more[key]]) for key, old in columns_of(self.x).items()}
        return Pool((*self.names, name), features_of(grown), torch.cat([self.y, y]), self.tame)


def records(declaration: Declaration, key: Key) -> Pool:
    """Return ordinary records, then repeated, cancelling, ragged, tiny, huge ones, and what is no number.

    >>> pool = records(Declaration(Values("whole", (4,), 0, 9), Values("whole", high=1)), Key(1))
    >>> [(name, row.tolist()) for name, row in zip(pool.names, pool.x)][ORDINARY:][:2]
    [('alike', [5, 5, 5, 5]), ('two in turn', [3, 0, 3, 0])]
    """
    x, y = made_up(declaration, ORDINARY, key)
    columns = columns_of(x)
    changes = list(_changes(max(column.dim() - 1 for column in columns.values()), declaration.columns))
    parts = {name: [column] for name, column in columns.items()}
    for number, (_, kind, change) in enumerate(changes):
        for name, column in columns.items():
            values, row = declaration.columns[name], column[number % ORDINARY, None]
            changed = values.kind == kind and bool(values.shape) and not values.mask
            parts[name].append(_within(values, change(row)) if changed else row)
    names = (*["ordinary"] * ORDINARY, *(name for name, *_ in changes))
    # Classes of ordinary records take turns; all others are of one, so that a broadcast can be sure of it.
    turns = torch.arange(len(names)) % ORDINARY
    if declaration.y.kind == "whole":
        turns[ORDINARY:] = int(y.flatten(1).amin(1).argmin()) if y.dim() > 1 else int(y.argmin())
    tame = next((place for place, name in enumerate(names) if name == f"all {ODD[0]:g}"), len(names))
    return Pool(names, features_of({name: torch.cat(rows) for name, rows in parts.items()}), y[turns], tame)


def features_of(columns: dict[str, Tensor]) -> Features:
    """Return columns by name as a model takes them."""
    return columns[""] if [*columns] == [""] else columns


def _within(values: Values, row: Tensor) -> Tensor:
    endless = values.low is None and values.high is None
    return row if endless or not bool(torch.isfinite(row).all()) else row.clamp(values.low, values.high)


Change = tuple[str, Kind, Callable[[Tensor], Tensor]]


def _changes(axes: int, columns: Mapping[str, Values]) -> Iterator[Change]:
    """Yield what may become of a record's columns (1, …) of a kind."""
    kinds = {one.kind for one in columns.values()}
    if "whole" in kinds:
        yield "alike", "whole", lambda row: row.flatten()[0].expand(row.shape)
        yield "two in turn", "whole", _alternating
        for length in (0, 1, 2):
            yield f"length {length}", "whole", partial(_cut, length=length)
    if "numbers" in kinds:
        for axis in range(1, axes + 1):
            for factor in (1.0, 1 + 1e-4, -1.0):
                yield (
                    f"alike along axis {axis}, ×{factor}",
                    "numbers",
                    partial(_along, axis=axis, factor=factor),
                )
        for size in (*ODD, *SIZES):
            yield f"all {size:g}", "numbers", partial(torch.full_like, fill_value=size)
        for size in SIZES:
            yield f"one {size:g}", "numbers", partial(_single, size=size)
            yield f"times {size:g}", "numbers", partial(torch.mul, other=size)


def _alternating(row: Tensor) -> Tensor:
    flat = row.flatten()
    return flat[[0, -1]].repeat(flat.numel())[: flat.numel()].view_as(row)


def _cut(row: Tensor, length: int) -> Tensor:
    return torch.where(torch.arange(row.numel()).view_as(row) < length, row, 0)


def _along(row: Tensor, axis: int, factor: float) -> Tensor:
    """Repeat the first slice along an axis, every second time times a factor."""
    if row.dim() <= axis:
        return row
    first = row.narrow(axis, 0, 1)
    odd = torch.arange(row.shape[axis]).remainder(2).view([-1 if i == axis else 1 for i in range(row.dim())])
    return first * torch.where(odd == 1, factor, 1.0)


def _single(row: Tensor, size: float) -> Tensor:
    found = torch.zeros_like(row)
    found.view(-1)[0] = size
    return found


def broadcasts(model: Model, bound: float, key: Key) -> Iterator[tuple[str, Tensor]]:
    """Yield parameter vectors within a bound, by name: the more promising ones first."""
    start, generator = model.init(key), key.fold("broadcasts").torch()
    drawn = torch.randn(model.dim, generator=generator)
    # Those under which nothing overflows come first: a record that fails once is not tried again.
    for margin in MARGINS:
        for size in (1.0, bound):
            theta = torch.zeros(model.dim)
            parts = list(unflatten(model, theta).values())
            parts[0].view(-1)[0] = size
            parts[-1].view(-1)[0] = margin
            yield f"a margin of {margin:g} and one weight of {size:g}", theta
    yield "first", start
    yield "zero", torch.zeros(model.dim)
    for scale in (1e2, 1e5):
        yield f"drawn, ×{scale:g}", (scale * drawn).clamp(-bound, bound)
    yield "largest", bound * (1 - 2.0 * torch.arange(model.dim).remainder(2))
    tensors = unflatten(model, start)
    matrices = [name for name, part in tensors.items() if part.dim() > 1 and part[0].numel() % 2 == 0]
    for name in matrices[:-4:-1]:
        for scale, rest in ((1e3, 1e-4), (1e5, 3e-4), (1e5, 1e-2)):
            for others in (torch.zeros(model.dim), start):
                theta = others.clone()
                part = unflatten(model, theta)[name].flatten(1)
                half = scale * torch.randn(part.shape[0], part.shape[1] // 2, generator=generator)
                part.copy_(torch.cat([half, -(1 - rest) * half], 1).clamp(-bound, bound))
                yield f"{name} of opposite halves, ×{scale:g}", theta

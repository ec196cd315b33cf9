"""What users hand over: a tensor, an array, or a list of vectors; checked once, here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trilemma.aggregation.steps.types import Aggregate, Array, Info, Vectors
from trilemma.base.errors import UserError


@dataclass(frozen=True)
class RuleInputs:
    """The messages as one (n, d) tensor, and how to give results back in the kind they came in."""

    X: Tensor
    numpy: bool

    def deliver(self, value: Tensor, weights: Array, scores: Array, info: Info) -> Aggregate[Any]:
        """Return an `Aggregate` of tensors on X's device, or of arrays."""
        if self.numpy:
            return Aggregate(value.numpy(), weights, scores, info)
        back: Callable[[Array], Tensor] = lambda a: torch.from_numpy(a).to(self.X.device)  # noqa: E731
        return Aggregate(value, back(weights), back(scores), info)


def messages(X: Vectors) -> RuleInputs:
    """Check and stack the messages.

    >>> messages([[1.0, 2.0], [3.0, 4.0]]).X.shape
    torch.Size([2, 2])
    >>> messages(torch.zeros(3))
    Traceback (most recent call last):
    trilemma.base.errors.UserError: messages must have shape (n, d), one row per client; got shape (3,)
    """
    if isinstance(X, Tensor):
        return RuleInputs(_checked(X.detach()), numpy=False)
    if isinstance(X, np.ndarray):
        return RuleInputs(_checked(_tensor(X)), numpy=True)
    anything: object = X
    if isinstance(anything, str) or not isinstance(anything, Iterable):
        raise UserError(f"messages must be a tensor, an array or a list of vectors; got {type(X).__name__}")
    rows = [row if isinstance(row, Tensor) else _tensor(np.asarray(row)) for row in X]
    if not rows:
        raise UserError("no messages: a rule needs at least one row")
    shapes = sorted({tuple(row.shape) for row in rows})
    if len(shapes) > 1 or len(shapes[0]) != 1:
        raise UserError(f"messages in a list must be vectors of equal length; got shapes {shapes}")
    devices = sorted({str(row.device) for row in rows})
    if len(devices) > 1:
        raise UserError(f"all messages must be on one device; got {', '.join(devices)}")
    dtype = functools.reduce(torch.promote_types, (row.dtype for row in rows))
    stacked = torch.stack([row.detach().to(dtype) for row in rows])
    return RuleInputs(_checked(stacked), numpy=not any(isinstance(row, Tensor) for row in X))


def _tensor(array: Any) -> Tensor:
    if array.dtype == object or array.dtype.kind not in "fiu":
        raise UserError(f"messages must be real numbers; got an array of dtype {array.dtype}")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    writable = array if array.flags.writeable and all(s >= 0 for s in array.strides) else array.copy()
    return torch.from_numpy(writable.astype(writable.dtype.newbyteorder("="), copy=False))


def _checked(X: Tensor) -> Tensor:
    if X.ndim != 2:
        raise UserError(f"messages must have shape (n, d), one row per client; got shape {tuple(X.shape)}")
    if X.shape[0] == 0:
        raise UserError("no messages: a rule needs at least one row")
    if X.is_complex() or X.dtype == torch.bool:
        raise UserError(f"messages must be real numbers; got dtype {X.dtype}")
    if not X.is_floating_point():
        return X.to(torch.float64)
    return X.resolve_neg()  # of a conjugate's imaginary part, say: kernels read what lies in memory

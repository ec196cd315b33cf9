"""Gains and shifts that are broadcast over what they change: z = γ x + β, as authors of networks write it.

G_γ = Σ ∂ℓ/∂z x and G_β = Σ ∂ℓ/∂z, over all the axes along which γ and β are broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trilemma.models.engines.engine import Part
from trilemma.models.engines.terms import Whole
from trilemma.models.modules.flat import FlatFrame
from trilemma.models.modules.owners import NotFlat
from trilemma.models.modules.recorder import Recorder, Slot, at_least_single


def scaled(recorder: Recorder, func: Any, one: Any, other: Any, **options: Any) -> Any:
    """Z = γ x, or x γ, in place perhaps."""
    found = _sides(recorder, one, other, options)
    if found is None:
        return NotImplemented
    slot, x = found
    output = spread(recorder, "mul", x, x * slot.value, _aligned(slot, x), gain=slot)
    return x.copy_(output) if func in _IN_PLACE else output


def shifted(recorder: Recorder, func: Any, one: Any, other: Any, **options: Any) -> Any:
    """Z = x + β, or β + x, in place perhaps; a number is added to a parameter without losing sight of it."""
    slot = recorder.slot(one) or recorder.slot(other)
    number = other if recorder.slot(one) else one
    if slot is not None and isinstance(number, int | float) and not options and slot.own is not None:
        return recorder.same(slot, lambda part: part + number)
    found = _sides(recorder, one, other, options)
    if found is None:
        return NotImplemented
    slot, x = found
    output = spread(recorder, "add", x, x + slot.value, _aligned(slot, x), shift=slot)
    return x.copy_(output) if func in _IN_PLACE else output


def spread(
    recorder: Recorder,
    name: str,
    input: Tensor,
    output: Tensor,
    shape: tuple[int, ...],
    gain: Slot | None = None,
    shift: Slot | None = None,
    normalise: Callable[[Tensor], Tensor] | None = None,
    held: bool = False,
) -> Tensor:
    """Write down z = γ x̂ + β, x̂ = x if not `normalise`d; γ and β have `shape` beside x, 1 where broadcast.

    `held`: autograd holds x too, and sees to it that nothing changes it.
    """
    frame = recorder.frame
    assert frame is not None
    inputs = frame.plain(input) if gain is not None or isinstance(frame, FlatFrame) else input
    axis = frame.layouts[-1].axis if isinstance(frame, FlatFrame) else None
    if axis is not None and shape[axis] != 1:
        raise NotFlat(f"{name} has a parameter for every example")
    if recorder.log.guarded and gain is not None and not held:
        inputs = inputs.clone()  # the module changes tensors in place

    def summed(values: Tensor, slot: Slot) -> Whole:
        full = (1,) * (values.dim() - 2 - len(shape)) + shape
        over = [2 + axis for axis, size in enumerate(full) if size == 1 and values.shape[2 + axis] > 1]
        return Whole((values.sum(over) if over else values).reshape(*values.shape[:2], *slot.value.shape))

    def terms(grad: Tensor) -> list[Part]:
        parts: list[Part] = []
        if gain is not None:
            values = at_least_single(inputs)
            values = values if normalise is None else normalise(values)
            # What was nobody's has become the examples', with an axis of its own.
            values = values if values.dim() == grad.dim() else values.unsqueeze(2)
            parts.append((gain.block, summed(grad * values, gain)))
        if shift is not None:
            parts.append((shift.block, summed(grad, shift)))
        return parts

    return recorder.write(name, [each for each in (gain, shift) if each is not None], output, terms)


def _sides(recorder: Recorder, one: Any, other: Any, options: Any) -> tuple[Slot, Tensor] | None:
    """Return the parameter and what it is spread over, where this is such a use."""
    slot, x = recorder.slot(one), other
    if slot is None:
        slot, x = recorder.slot(other), one
    if options or not isinstance(recorder.frame, FlatFrame) or not recorder.recording(slot):
        return None
    if not isinstance(x, Tensor) or recorder.slot(x) is not None or slot is None or slot.transposed:
        return None
    last = x.shape[x.dim() - slot.value.dim() :] if x.dim() >= slot.value.dim() else None
    fits = last is not None and all(
        size in (1, full) for size, full in zip(slot.value.shape, last, strict=True)
    )
    return (slot, x) if fits and x.is_floating_point() else None


def _aligned(slot: Slot, x: Tensor) -> tuple[int, ...]:
    return (1,) * (x.dim() - slot.value.dim()) + tuple(slot.value.shape)


def _functions(*names: str) -> tuple[Any, ...]:
    plain = [getattr(torch, name) for name in names if hasattr(torch, name)]
    return (*plain, *(getattr(Tensor, name) for name in names if hasattr(Tensor, name)))


_IN_PLACE = {*_functions("mul_", "__imul__", "add_", "__iadd__")}

PRODUCTS = _functions("mul", "multiply", "__mul__", "__rmul__", "mul_", "__imul__")
SUMS = _functions("add", "__add__", "__radd__", "add_", "__iadd__")

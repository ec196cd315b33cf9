"""How many clients and examples go through a model at a time.

The answer follows from shapes, device and the memory allowed, never from a clock: the same call is cut up,
and therefore rounds, the same way in every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import torch

from trilemma.base.errors import UserError
from trilemma.models.engines.saved import SavedActivations
from trilemma.models.flat import unflatten
from trilemma.models.types import Examples, Model

MEMORY = 4 << 30
"""Least default bound, in bytes, on what one group of clients keeps besides the result."""

SHARE = 8
"""On a GPU the default bound is one part in so many of its memory: each further group is launched anew."""

CACHE = 64 << 20
"""On a CPU, groups that need about this many bytes run fastest (docs/gradients-speed.md)."""


def allowed(device: torch.device) -> int:
    """Return the default bound, in bytes, on what one group of clients keeps besides the result.

    >>> allowed(torch.device("cpu")) == MEMORY
    True
    """
    if device.type != "cuda":
        return MEMORY
    return max(MEMORY, torch.cuda.get_device_properties(device).total_memory // SHARE)


def groups(model: Model, batch: Examples, memory: int) -> Iterator[tuple[slice, slice]]:
    """Cut the (client, example) plane into groups: whole clients, or parts of one where one is too large.

    The cut is the same for every kind of clipping, so that infinite thresholds change no rounding.
    """
    assert isinstance(batch.x, torch.Tensor)
    each = footprint(model, tuple(batch.x.shape[2:]))
    # Batch normalisation needs a client's whole batch, whatever it takes.
    return cut(batch, each, 4 * model.dim, memory, whole=bool(model.buffers))


def cut(batch: Examples, each: int, own: int, memory: int, whole: bool) -> Iterator[tuple[slice, slice]]:
    """Cut up examples of `each` bytes and clients of `own` more; `whole` clients stay in one piece."""
    clients, size = batch.y.shape[:2]
    # A client's gradient counts too: on a CPU it is best still in the cache when it is put in its place.
    together = (memory if batch.y.is_cuda else min(memory, CACHE)) // (each * size + own)
    within = size if whole else memory // each
    for rows in even(clients, max(1, together)):
        for columns in even(size, max(1, within)):
            yield rows, columns


def even(length: int, most: int) -> list[slice]:
    """Cut range(length) into as few slices of at most `most` as possible, of nearly equal length.

    >>> even(10, 4)
    [slice(0, 4, None), slice(4, 8, None), slice(8, 10, None)]
    """
    step = -(-length // -(-length // most)) if length else 1
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


@lru_cache(maxsize=64)
def footprint(model: Model, shape: tuple[int, ...]) -> int:
    """Return the bytes one example needs on its way through the layers and back.

    >>> from trilemma import models
    >>> footprint(models.build("multinomial", (60,), 10), (60,))
    600
    """
    # Clipping by example must not change the groups, so it counts wherever it is possible.
    saved = _trace(model, shape)
    return 4 * (saved.floats + (0 if model.buffers else saved.products) + math.prod(shape))


@lru_cache(maxsize=64)
def require_saved(model: Model, shape: tuple[int, ...]) -> None:
    """Refuse a model whose layers do not save their outputs, each once: its gradients would be wrong."""
    recorded = sorted(each.name for each in _trace(model, shape).outputs)
    layers = sorted(layer.name for layer in model.layers)
    if recorded != layers:
        raise UserError(
            f"model {model.name!r} must save the output of each of its layers {layers} once, not {recorded}: "
            "build it from trilemma.models.layers"
        )


def _trace(model: Model, shape: tuple[int, ...]) -> SavedActivations:
    """Send one example through the model, all parameters being the same zero.

    Shapes alone, on torch's device without memory, would do; but the first operation there imports a
    compiler, which takes longer than hundreds of examples.
    """
    saved = SavedActivations(record=True, train=True)
    params = unflatten(model, torch.zeros(1).expand(model.dim))
    model.forward(params, torch.zeros(1, 1, *shape), saved)
    return saved

"""Gradients that are asked for again and again, on a GPU: recorded once and replayed.

A step of a hundred small models is some hundreds of kernels (`trilemma.base.recordings`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from trilemma.base.recordings import Recordings, Tensors, unasked
from trilemma.models.engines import stacked
from trilemma.models.engines.clipping import NO_CLIP, Clip
from trilemma.models.engines.stacked import Gradients
from trilemma.models.types import Buffers, Examples, Model, Stacked

KEPT = 4
"""Recordings that are kept: full and padded batches of two models."""

BROKEN = "broken"
"""The result that says whether examples have no finite gradient."""

BUFFER = "buffer "
"""What names of running statistics begin with among the arguments and results of a recording."""


def gradients(
    model: Model,
    params: Tensor,
    batch: Examples,
    *,
    clip: Clip = NO_CLIP,
    weight_decay: float = 0.0,
    buffers: Buffers | None = None,
    keys: Any = None,
) -> Gradients:
    """Return what `trilemma.models.gradients` does, replayed where that has been recorded.

    Recorded is what runs on a GPU without asking it anything on the way and without drawing: models
    of layers. If examples are clipped, whether all have a finite gradient is asked afterwards. If not, the
    result is thrown away and computed as everywhere: without those examples, in a second pass.
    """
    compute = partial(stacked.gradients, model, clip=clip, weight_decay=weight_decay)

    def computed(of: Tensors) -> Tensors:
        examples = Stacked(of["x"], of["y"], of.get("weight"))
        running = None if buffers is None else {name: of[BUFFER + name] for name in buffers}
        with unasked(steps=1) as passes:
            found = compute(of["params"], examples, buffers=running)
        parts = {"value": found.value, "loss": found.loss, "clipped": found.clipped}
        norms = {} if found.norms is None else {"norms": found.norms}
        broken = {BROKEN: (torch.cat(passes) > 1).any()} if passes else {}
        return parts | norms | broken | {BUFFER + name: part for name, part in found.buffers.items()}

    x = batch.x
    if not params.is_cuda or not isinstance(x, Tensor) or model.engine is not None:
        return compute(params, batch, buffers=buffers, keys=keys)
    arguments = {"params": params, "x": x, "y": batch.y}
    if batch.weight is not None:
        arguments["weight"] = batch.weight
    for name, part in (buffers or {}).items():
        arguments[BUFFER + name] = part
    allowed = torch.get_float32_matmul_precision()
    found = _recordings.run((model, clip, weight_decay, allowed), computed, arguments)
    if BROKEN in found and bool(found[BROKEN]):
        return compute(params, batch, buffers=buffers, keys=keys)
    fresh = {name.removeprefix(BUFFER): part for name, part in found.items() if name.startswith(BUFFER)}
    return Gradients(found["value"], found["loss"], found["clipped"], found.get("norms"), fresh)


_recordings = Recordings(KEPT)

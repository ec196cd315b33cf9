"""Gradients that are asked for again and again, on a GPU: launched once, recorded, and replayed.

A local step of a hundred small models is some hundreds of kernels. Launching them one by one from Python
takes longer than they run; a CUDA graph of them is one launch. The first time that gradients of some shapes
are asked for they are computed as everywhere; the second time what is launched is recorded, and from then on
replayed on whatever the arguments are. These are the same kernels in the same order, so the same bits.

A recording keeps the memory that its kernels work in. Recordings share it, for no two run at a time, and only
the latest few are kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from trilemma.models import stacked
from trilemma.models.clipping import NO_CLIP, Clip
from trilemma.models.stacked import Gradients
from trilemma.models.types import Buffers, Examples, Model

KEPT = 4
"""Recordings that are kept: full and padded batches of two models."""

Arguments = dict[str, Tensor]


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

    Recorded is what runs on a GPU without asking it anything on the way and without drawing: models on the
    tape, not clipped per example.
    """

    def computed(of: Arguments) -> Gradients:
        examples = SimpleNamespace(x=of["x"], y=of["y"], weight=of.get("weight"))
        own = None if buffers is None else {name: of[f"buffer {name}"] for name in buffers}
        return stacked.gradients(
            model, of["params"], examples, clip=clip, weight_decay=weight_decay, buffers=own
        )

    x = batch.x
    if not params.is_cuda or not isinstance(x, Tensor) or model.engine is not None or clip.unit == "example":
        return stacked.gradients(
            model, params, batch, clip=clip, weight_decay=weight_decay, buffers=buffers, keys=keys
        )
    arguments = {"params": params, "x": x, "y": batch.y}
    if batch.weight is not None:
        arguments["weight"] = batch.weight
    for name, part in (buffers or {}).items():
        arguments[f"buffer {name}"] = part
    shapes = tuple((name, part.shape, part.dtype, part.device) for name, part in arguments.items())
    allowed = torch.get_float32_matmul_precision()
    return _recordings.run((model, clip, weight_decay, allowed, shapes), computed, arguments)


class _Recording:
    """What computing launched, the places it reads, and the places it writes."""

    def __init__(self, compute: Callable[[Arguments], Gradients], arguments: Arguments, pool: Any) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.arguments = {name: part.clone() for name, part in arguments.items()}
        stream = torch.cuda.current_stream(arguments["params"].device)
        try:
            with torch.cuda.graph(self.graph, pool=pool):
                self.found = compute(self.arguments)
        except RuntimeError:
            torch.cuda.set_stream(stream)  # a recording that fails leaves us on its own
            raise

    def replay(self, arguments: Arguments) -> Gradients:
        """Compute on these arguments."""
        for name, part in arguments.items():
            self.arguments[name].copy_(part)
        self.graph.replay()
        found = self.found
        return Gradients(
            found.value.clone(),
            found.loss.clone(),
            found.clipped.clone(),
            None if found.norms is None else found.norms.clone(),
            {name: part.clone() for name, part in found.buffers.items()},
        )


class _Recordings:
    """The latest recordings; None stands for what was computed once and is to be recorded next time.

    False stands for what cannot be recorded because it asks the GPU something on the way.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, _Recording | Literal[False] | None] = OrderedDict()
        self._one_at_a_time = threading.Lock()

    def run(
        self, signature: Hashable, compute: Callable[[Arguments], Gradients], arguments: Arguments
    ) -> Gradients:
        """Compute, or replay what was recorded under the same signature."""
        with self._one_at_a_time:
            if signature not in self._kept:
                found = compute(arguments)
                self._kept[signature] = None
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
                return found
            self._kept.move_to_end(signature)
            recording = self._kept[signature]
            if recording is None:
                try:
                    recording = _Recording(compute, arguments, self._pool(arguments["params"].device))
                except RuntimeError:
                    recording = False
                self._kept[signature] = recording
            return recording.replay(arguments) if recording else compute(arguments)

    def _pool(self, device: torch.device) -> Any:
        """Return the memory of recordings that are kept; None where there are none: it went with the last."""
        kept = (one for one in self._kept.values() if isinstance(one, _Recording))
        return next((one.graph.pool() for one in kept if one.arguments["params"].device == device), None)


_recordings = _Recordings()

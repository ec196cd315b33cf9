"""Which tensors of a model are trained, and where low-rank adapters stand in their place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trilemma.base.keys import Key
from trilemma.models.types import Model, Shapes, layer_of


@dataclass(frozen=True)
class Adapter:
    """W + s B A with B (out × r), A (r × in)."""

    rank: int
    scale: float


@dataclass(frozen=True)
class Parts:
    """Names of the tensors that are trained, and the adapters by layer."""

    trained: frozenset[str]
    adapters: Mapping[str, Adapter] = field(default_factory=dict)

    def init(self, model: Model, shapes: Shapes, key: Key) -> Tensor:
        """Draw what is trained: tensors as the model draws them, A uniform on ±1/√in, B zero."""
        whole = model.init(key)
        spans = {segment.name: segment.slice for segment in model.tensors}
        drawn = []
        for name, shape in shapes:
            if name in spans:
                drawn.append(whole[spans[name]])
            elif name.endswith(".lora_A"):
                bound = 1.0 / math.sqrt(shape[1])
                generator = key.fold("lora", layer_of(name)).torch()
                drawn.append(torch.empty(math.prod(shape)).uniform_(-bound, bound, generator=generator))
            else:
                drawn.append(torch.zeros(math.prod(shape)))
        return torch.cat(drawn)


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W + s B A."""
    return weight + scale * (b @ a)


@dataclass(frozen=True, eq=False)
class Placed:
    """A tensor, copied once to every device that asks for it."""

    value: Tensor
    copies: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)

    def at(self, device: torch.device) -> Tensor:
        """Return it on a device."""
        if device not in self.copies:
            self.copies[device] = self.value.to(device)
        return self.copies[device]

"""What a model is: named parameter shapes and a pure forward function on a flat parameter vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.base.keys import Key
from trilemma.models.engines.engine import Engine

Params = Mapping[str, Tensor]
"""Parameter tensors by name: of their own shape, or with a leading client axis (k, …) where personal."""

Buffers = Mapping[str, Tensor]
"""Running statistics by name, always with a leading client axis: (k, channels)."""

Inputs = Tensor | Mapping[str, Tensor]
"""Features: one tensor, or columns by name, which a module takes as keyword arguments."""

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def each_column(x: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Change features: the tensor, or every column."""
    return change(x) if isinstance(x, Tensor) else {name: change(column) for name, column in x.items()}


class Examples(Protocol):
    """One batch per client, stacked. `trilemma.data.types.Batch` is one.

    `x` is (k, b, …), or such columns by name, `y` (k, b, …). `weight` (k, b) sums to one per client; None
    means 1/b each, and weight 0 marks padding.
    """

    @property
    def x(self) -> Inputs:
        """Features."""

    @property
    def y(self) -> Tensor:
        """Labels."""

    @property
    def weight(self) -> Tensor | None:
        """Share of each example in its client's mean."""


@dataclass(frozen=True)
class Stacked:
    """See `Examples`."""

    x: Inputs
    y: Tensor
    weight: Tensor | None = None


@dataclass(frozen=True)
class Segment:
    """Where a tensor, or a whole layer, lies in the flat vector: `flat[..., segment.slice]`."""

    name: str
    start: int
    stop: int

    @property
    def slice(self) -> slice:
        """The slice of the flat vector."""
        return slice(self.start, self.stop)

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self.stop - self.start


@dataclass(frozen=True)
class Model:
    """A classifier as pure functions.

    Parameters travel as one flat vector: tensors flattened row-major and concatenated in the order of
    `shapes` (weight before bias, in model-definition order). `forward(params, x, saved)` maps a dict of
    parameter tensors and a batch to logits; `saved` is explained in `trilemma.models.engines.saved`.

    >>> from trilemma import models
    >>> model = models.build("mnist-mlp", (784,), 10)
    >>> model.dim, [(layer.name, layer.size) for layer in model.layers]
    (79510, [('fc1', 78500), ('fc2', 1010)])
    >>> model.last(1)
    Segment(name='fc2', start=78500, stop=79510)
    """

    name: str
    shapes: Shapes
    forward: Callable[[Params, Any, Any], Tensor]
    init: Callable[[Key], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    """(logits, labels) -> loss of every example."""
    predict: Callable[[Tensor], Tensor]
    """logits -> predicted labels."""
    buffers: Shapes = ()
    """Names and shapes of one client's running statistics; empty for models without batch normalisation."""
    statistics: Buffers = field(default_factory=dict, hash=False, compare=False)
    """Running statistics (…) to start from, by name; without them mean 0, variance 1."""
    engine: Engine | None = None
    """What computes the gradients; None: the layer engine (`trilemma.models.engines.layered`)."""
    export: Callable[[Tensor, Buffers | None], dict[str, Tensor]] | None = None
    """(parameters, running statistics) -> every tensor of the model by name, where those that are trained are
    not all of it (`trilemma.models.coordinates`); None: they are."""

    @cached_property
    def dim(self) -> int:
        """Number of parameters."""
        return sum(math.prod(shape) for _, shape in self.shapes)

    @cached_property
    def tensors(self) -> tuple[Segment, ...]:
        """Where every parameter tensor lies in the flat vector."""
        segments, start = [], 0
        for name, shape in self.shapes:
            segments.append(Segment(name, start, start + math.prod(shape)))
            start = segments[-1].stop
        return tuple(segments)

    @cached_property
    def layers(self) -> tuple[Segment, ...]:
        """Where every layer lies in the flat vector: tensors "fc1.weight" and "fc1.bias" are layer "fc1"."""
        groups = (
            (name, list(segments))
            for name, segments in groupby(self.tensors, lambda segment: layer_of(segment.name))
        )
        return tuple(Segment(name, segments[0].start, segments[-1].stop) for name, segments in groups)

    def last(self, count: int) -> Segment:
        """Return the segment of the last `count` layers; 0 means all of them."""
        if not 0 <= count <= len(self.layers):
            raise UserError(
                f"{self.name} has {len(self.layers)} layers: cannot take the last {count}, "
                f"allowed are 0 (all) to {len(self.layers)}"
            )
        first = self.layers[-count if count else 0]
        return Segment(first.name, first.start, self.dim)

    def initial_buffers(self, clients: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Return the running statistics `clients` clients start from; mean 0, variance 1 by default."""
        fresh = {
            name: torch.full(shape, float(name.endswith("variance")), dtype=torch.float32)
            for name, shape in self.buffers
        }
        return {
            name: part.repeat(clients, *[1] * part.dim()).to(device)
            for name, part in {**fresh, **self.statistics}.items()
        }


def layer_of(tensor: str) -> str:
    """Return the layer a parameter tensor belongs to: "unit1.conv1.weight" is of layer "unit1.conv1"."""
    return tensor.rpartition(".")[0]

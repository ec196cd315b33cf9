"""What a model is: named parameter shapes and a pure forward function on a flat parameter vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trilemma.keys import Key

Params = Mapping[str, Tensor]


@dataclass(frozen=True)
class Model:
    """A classifier as pure functions.

    Parameters travel as one flat vector: tensors flattened row-major and concatenated in the order of
    `shapes` (weight before bias, in model-definition order). `forward(params, x, tape)` maps a dict of
    parameter tensors and a batch to logits; `tape` is explained in `trilemma.models.layers`.
    """

    name: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    forward: Callable[[Params, Tensor, Any], Tensor]
    init: Callable[[Key], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    """(logits, labels) -> loss of every example."""
    predict: Callable[[Tensor], Tensor]
    """logits -> predicted labels."""

    @property
    def dim(self) -> int:
        """Number of parameters."""
        return sum(math.prod(shape) for _, shape in self.shapes)

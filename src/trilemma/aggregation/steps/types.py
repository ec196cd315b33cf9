"""The vocabulary of the aggregation room: what a rule returns and what is known about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Array: TypeAlias = NDArray[np.float64]
Numpy: TypeAlias = NDArray[Any]
Vectors: TypeAlias = Tensor | Numpy | Sequence[Tensor] | Sequence[Numpy]
"""What a rule accepts: (n, d), one row per client, or a list of n vectors."""

Criterion: TypeAlias = Literal["spectral", "trace"]
"""What κ multiplies in ‖value − mean_S‖² ≤ κ·(…): the top eigenvalue of Cov_S, or its trace (weaker)."""

T = TypeVar("T")


@dataclass(frozen=True)
class Info:
    """What a rule did. `f` is what was left of the rule's f after `nonfinite` rows were put aside.

    `exact` is False when a search ran out of its budget; then the answer is the best one found, whose
    objective is `objective`, and no answer whatsoever has an objective below `lower_bound`.
    """

    n: int
    f: int
    nonfinite: int = 0
    exact: bool = True
    iterations: int = 0
    objective: float | None = None
    lower_bound: float | None = None


@dataclass(frozen=True)
class Aggregate(Generic[T]):
    """The outcome of a rule; `value`, `weights` and `scores` are of the kind the messages were.

    `weights` (n,) is every client's share in the value: value = Σ weights_i x_i for geometric rules; the
    share averaged over coordinates for coordinate-wise ones. `scores` (n,) says how suspect a client is:
    the distance of its message from the value, infinite for a message that is not finite.
    """

    value: T
    weights: T
    scores: T
    info: Info


@dataclass(frozen=True)
class Weighing:
    """What a geometric rule makes of a geometry: the weights, and how it got there."""

    weights: Array
    exact: bool = True
    iterations: int = 0
    objective: float | None = None
    lower_bound: float | None = None

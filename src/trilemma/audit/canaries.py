"""Canaries: two data sets that a client might hold, made to be told apart, and who plays them.

On the canary model the loss of an example (x, y) is y (⟨w, x⟩ + b), so its gradient is y (x, 1) whatever is
broadcast: a canary's gradient points where it likes and is as long as it likes, which is the worst data there
can be for a mechanism that clips. Everything behind the gradient is the algorithm's own: clip, noise,
momentum, message. An example of zeros has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trilemma.base.keys import Key
from trilemma.data import Dataset, FederatedData, Holdings
from trilemma.data.types import Batch, Features, each
from trilemma.learning.protocol import Clients, State
from trilemma.models.layers.layers import Linear, Objective, sequential
from trilemma.models.types import Model
from trilemma.privacy.types import NoiseSource, Release
from trilemma.simulate.experiment import SimulatedClients

DIMENSIONS = 8
"""Coordinates of the canary model: few, so that many trials are quick; noise is the same in each."""

LOUD = 1e3
"""How long a canary's gradient is, in clips: whatever local steps make of it, it is clipped."""


def canary_model(dim: int = DIMENSIONS) -> Model:
    """Return the model of `dim` parameters whose gradient an example chooses.

    >>> from trilemma import models
    >>> x, y = canary(torch.tensor([1.0, -2.0, 0.5]))
    >>> models.gradients(canary_model(3), torch.full((3,), 7.0), Batch(x[None, None], y[None, None])).value
    tensor([[ 1.0000, -2.0000,  0.5000]])
    """
    objective = Objective(
        lambda outputs, y: outputs[..., 0] * y, lambda outputs: (outputs[..., 0] > 0).long()
    )
    return sequential("canaries", [Linear("canary", dim - 1, 1)], objective)


def canary(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the example, x and y, that has this gradient, whose last coordinate is not zero."""
    return gradient[:-1] / gradient[-1], gradient[-1]


@dataclass(frozen=True)
class CanaryExamples:
    """Examples of one client, (b, …), without a client axis."""

    x: Features
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Pair:
    """Two neighbouring data sets of one client, as its batches show them.

    `heads` and `tails` are a whole batch, the canary first where one example is at stake. `absent` says that
    the tails have no canary at all: the guarantee is about an example that comes or goes.
    """

    name: str
    model: Model
    heads: CanaryExamples
    tails: CanaryExamples
    absent: bool = False


def direction(dim: int, key: Key) -> Tensor:
    """Return a direction that is no axis, so that its coordinates are no round numbers."""
    drawn = torch.randn(dim, generator=key.fold("direction").torch())
    drawn[-1] = drawn.abs().max()  # not near zero: an example is a gradient divided by it
    return torch.nn.functional.normalize(drawn, dim=0)


def canary_pairs(release: Release, dim: int = DIMENSIONS, key: Key | None = None) -> list[Pair]:
    """Return the pairs on the canary model: opposite gradients, or one against nothing.

    >>> from trilemma.privacy.types import NoiseLaw
    >>> [pair.name for pair in canary_pairs(Release(1.0, NoiseLaw(1.0)))]
    ['opposite', 'blank']
    """
    loud = LOUD * release.clip * direction(dim, key or Key(0))
    model, batch = canary_model(dim), release.batch if release.unit == "example" else 1

    def held(sign: float) -> CanaryExamples:
        x, y = torch.zeros(batch, dim - 1), torch.zeros(batch)
        x[0], y[0] = canary(loud)
        return CanaryExamples(x, sign * y)

    if release.adjacency == "add-remove":
        return [Pair("absent", model, held(1.0), held(0.0), absent=True)]
    return [
        Pair("opposite", model, held(1.0), held(-1.0)),
        Pair("blank", model, held(1.0), held(0.0)),
    ]


@dataclass(frozen=True)
class WholeBatch:
    """k clients whose every batch is all they hold (`learning.protocol.Clients`): `x` (k, b, …), `y`.

    Where sampling amplifies nothing, or the adversary is lucky, this is what a batch is. `weight` (k, b) are
    the examples' shares where they are not alike.
    """

    ids: tuple[int, ...]
    model: Model
    noise: NoiseSource
    x: Features
    y: Tensor
    weight: Tensor | None = None

    def sample(self, size: int, key: Key) -> Batch:
        """Return everything."""
        return self.everything()

    def poisson(self, rate: float, size: int, key: Key) -> Batch:
        """Return everything; each example weighs 1/`size`, as in any Poisson batch."""
        return Batch(self.x, self.y, torch.full(self.y.shape[:2], 1.0 / size))

    def epochs(self, size: int, steps: int, key: Key) -> Iterator[Batch]:
        """Yield everything, `steps` times."""
        return iter([self.everything()] * steps)

    def everything(self) -> Batch:
        """Return everything."""
        return Batch(self.x, self.y, self.weight)


def whole(pair: Pair, coins: np.ndarray, noise: NoiseSource) -> WholeBatch:
    """Return one client per coin, with the pair's heads or tails as its whole data."""
    shown = torch.from_numpy((~np.asarray(coins, bool)).astype(np.int64))

    def both(heads: Tensor, tails: Tensor) -> Tensor:
        return torch.stack([heads, tails]).index_select(0, shown)

    x: Features = (
        {name: both(column, pair.tails.x[name]) for name, column in pair.heads.x.items()}
        if isinstance(pair.heads.x, Mapping)
        else both(pair.heads.x, pair.tails.x)
    )
    return WholeBatch(tuple(range(len(coins))), pair.model, noise, x, both(pair.heads.y, pair.tails.y))


def sampled(pair: Pair, coins: np.ndarray, noise: NoiseSource, examples: int) -> Clients:
    """Return one client per coin that holds the canary among `examples` and draws real batches."""
    shown = (pair.heads, pair.tails)
    x = torch.stack([*(one.x[0] for one in shown), torch.zeros_like(pair.heads.x[0])])
    y = torch.stack([*(one.y[0] for one in shown), torch.zeros(())])
    others = np.full(examples - 1, 2)
    tails = others if pair.absent else np.concatenate([[1], others])
    held = [np.concatenate([[0], others]) if coin else tails for coin in coins]
    dataset = Dataset("canaries", x, y, x[:1], y[:1], classes=None)
    return SimulatedClients(
        tuple(range(len(coins))), FederatedData(dataset, Holdings(held, [], [])), pair.model, noise
    )


def broadcasts(first: State, bound: float) -> dict[str, State]:
    """Return what a malicious server may broadcast in place of `first`, by name, within a public bound."""
    return {"first": first} | {
        name: {
            part: change(tensor, bound) if tensor.is_floating_point() else tensor
            for part, tensor in first.items()
        }
        for name, change in _CHANGES.items()
    }


def _place(tensor: Tensor, period: int) -> Tensor:
    return torch.arange(tensor.numel()).remainder(period).view_as(tensor).to(tensor.dtype)


_CHANGES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "zero": lambda tensor, _: torch.zeros_like(tensor),
    "near-constant": lambda tensor, _: 1 + 2.0**-20 * _place(tensor, 7),
    "large": lambda tensor, bound: torch.full_like(tensor, bound),
    "saturating": lambda tensor, bound: bound * (1 - 2 * _place(tensor, 2)),
}


def without_canary(pair: Pair) -> Pair:
    """Return the pair with an example of zeros where the tails' canary was."""

    def blank(column: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(column[:1]), column[1:]])

    return replace(pair, tails=CanaryExamples(each(pair.tails.x, blank), blank(pair.tails.y)))

"""What an engine is: it takes some clients' examples through a model, forward and backward.

There are two. The tape (`trilemma.models.engines.taped`) knows the layers of this library and is fastest on
them; the module engine (`trilemma.models.modules`) takes any `torch.nn.Module`. Weights, clipping and
regularisers are the same for both (`trilemma.models.engines.stacked`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from trilemma.base.keys import Key
from trilemma.models.engines.clipping import Lengths

if TYPE_CHECKING:
    from trilemma.models.types import Buffers, Examples, Inputs, Model


@dataclass(frozen=True)
class PassRequest:
    """Some clients' examples, and what is wanted of them.

    `params` is (d,) or (k, d); `share` (k, b) is every example's weight w_i. `by_example` asks for the
    lengths of single examples' gradients. `keys`, one per client, feed what the model draws.
    """

    params: Tensor
    x: Inputs
    y: Tensor
    share: Tensor
    padded: bool
    by_example: bool = False
    buffers: Buffers = field(default_factory=dict)
    keys: Sequence[Key] | None = None
    dropout: bool = True
    """Whether the model drops what it would drop in training."""
    first: int = 0
    """Number of the first example within its client's batch."""


class Pass(Protocol):
    """What a pass over k clients' b examples found, all of it for the losses w_i ℓ_i."""

    @property
    def loss(self) -> Tensor:
        """Each client's Σ_i w_i ℓ_i, (k,)."""

    @property
    def updated(self) -> Buffers:
        """New running statistics."""

    def lengths(self) -> Lengths:
        """Return how long every example's gradient is at most, (k, b)."""

    def write(self, out: Mapping[str, Tensor], factor: Tensor | None) -> None:
        """Write each client's Σ_i s_i w_i ∇ℓ_i over the tensors in `out` (k, …); `factor` (k, b), None: 1.

        The sums are taken in the precision of `factor`.
        """


class Engine(Protocol):
    """How a model's gradients are computed."""

    def require(self, model: Model, batch: Examples, by_example: bool) -> None:
        """Refuse a model or a batch for which the gradients asked for would be wrong."""

    def groups(
        self, model: Model, batch: Examples, memory: int, personal: bool
    ) -> Iterator[tuple[slice, slice]]:
        """Cut the (client, example) plane into groups that go through together."""

    def footprint(self, model: Model, x: Inputs, lead: int) -> int:
        """Return the bytes one example needs; `x` has `lead` axes before those of an example."""

    def run(self, model: Model, request: PassRequest) -> Pass:
        """Take a group through a forward and a backward pass."""

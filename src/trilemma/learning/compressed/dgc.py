"""DGC: only the largest coordinates travel; momentum and the rest wait at the client.

    u ← m u + g,   v ← v + u;   of every parameter tensor of n entries send the round((1−s_t) n) largest |v|
    (ties included); where sent, u = v = 0

The sparsity rises over a warm-up: s_t = min(0.999, 1 − (1−s_0) ρ^t). Message: `wire.encode_sparse`; in
scalars, a value and half a scalar for its position.

Reference: Lin, Han, Mao, Wang, Dally, "Deep gradient compression: reducing the communication bandwidth for
distributed training", ICLR 2018.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from trilemma.keys import Key
from trilemma.learning.compressed.gradient import CompressedSettings, compute, descending_server, start
from trilemma.learning.compressed.wire import sparse_bytes
from trilemma.learning.personal.presets import switches
from trilemma.learning.protocol import Algorithm, Clients, ClientStep, Messages, Start, State
from trilemma.learning.settings import Setup, algorithms
from trilemma.models.types import Model, Segment


def largest(vectors: Tensor, tensors: tuple[Segment, ...], density: float) -> Tensor:
    """Return where the round(density·n) largest magnitudes of every tensor lie, (k, D), ties included.

    >>> v = torch.tensor([[3.0, -4.0, 1.0, 0.0, 5.0]])
    >>> largest(v, (Segment("a", 0, 3), Segment("b", 3, 5)), 0.5).tolist()
    [[True, True, False, False, True]]
    """
    mask = torch.zeros_like(vectors, dtype=torch.bool)
    for segment in tensors:
        count = round(density * segment.size)
        if count:
            sizes = vectors[:, segment.slice].abs()
            least = sizes.topk(count, dim=1).values[:, -1:]
            mask[:, segment.slice] = sizes >= least
    return mask


@algorithms.register("dgc")
class DGC(CompressedSettings):
    """DGC: only the largest coordinates of the accumulated gradient travel."""

    sparsity: float = Field(default=0.75, ge=0, lt=1, description="initial share that is held back (s_0)")
    rising: float = Field(default=0.25, gt=0, le=1, description="factor of the density per round (ρ)")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum m")

    def density(self, round_: int) -> float:
        """Return 1 − s_t, the share that travels.

        >>> [DGC().density(t) for t in (0, 1, 9)]
        [0.25, 0.0625, 0.0010000000000000009]
        """
        return 1.0 - min(0.999, 1.0 - (1.0 - self.sparsity) * self.rising**round_)

    def build(self, setup: Setup) -> Algorithm:
        """See `AlgorithmSettings.build`."""
        carries = not switches(self.preset).clears_gradients

        def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
            return start(model, ids, key, "u", "v", *(["carried"] if carries else []))

        def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
            done = compute(self, broadcast, state, clients, key, carries)
            u = self.momentum * state["u"] + done.gradient
            v = state["v"] + u
            sent = largest(v, clients.model.tensors, self.density(round_))
            messages = Messages(torch.where(sent, v, 0.0), 1.5 * sent.sum(1), sparse_bytes(sent))
            kept = {**done.state, "u": torch.where(sent, 0.0, u), "v": torch.where(sent, 0.0, v)}
            return ClientStep(messages, kept, {"loss": done.loss, "density": sent.float().mean(1)})

        return Algorithm("dgc", init, client, descending_server(setup, self.lr))

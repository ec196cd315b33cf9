"""DGC: only the largest coordinates are sent; the rest accumulates at the client, with momentum.

    u ← m u + g,   v ← v + u
    of every parameter tensor with n entries, send the round((1−s_t) n) largest |v| (ties included)
    u = v = 0 where sent

The sparsity rises in a warm-up: s_t = min(0.999, 1 − (1−s_0) ρ^t). Messages are `wire.encode_sparse`; in
scalars, each coordinate counts as its value and half a scalar for its position.

Reference: Lin, Han, Mao, Wang, Dally, "Deep gradient compression: reducing the communication bandwidth for
distributed training", ICLR 2018.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from trilemma.base.keys import Key
from trilemma.learning.messages import (
    NOTHING_ASKED,
    Asked,
    Length,
    MessageLayout,
    MessageLengths,
    Messages,
    Part,
    Parts,
)
from trilemma.learning.protocol import Algorithm, Clients, ClientStep, Start, State
from trilemma.learning.settings import Setup, algorithms
from trilemma.models.types import Model, Segment
from trilemma_lab.compressed.gradient import CompressedSettings, compute, start
from trilemma_lab.compressed.wire import decode_sparse, encode_sparse, longest_sparse, sparse_bytes


def largest(vectors: Tensor, tensors: tuple[Segment, ...], density: float) -> Tensor:
    """Return a mask (k, D) of the round(density·n) largest magnitudes of every tensor, ties included.

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


@dataclass(frozen=True)
class SparseCodec:
    """Encodes a few coordinates of a vector: the values of `gradient` where the mask `sent` is true.

    >>> codec, sent = SparseCodec(4), torch.tensor([False, True, False, True])
    >>> message = codec.encode({"gradient": torch.tensor([0.0, 2.5, 0.0, 0.0]), "sent": sent})
    >>> len(message), codec.decode(message, {})["sent"].tolist()
    (14, [False, True, False, True])
    """

    dim: int

    @property
    def longest(self) -> Length:
        """See `Codec.longest`: every coordinate is sent."""
        return Length(1.5 * self.dim, longest_sparse(self.dim))

    def lengths(self, parts: Parts) -> MessageLengths:
        """See `Codec.lengths`: a value and half a scalar for its position."""
        return MessageLengths(1.5 * parts["sent"].sum(1), sparse_bytes(parts["sent"]))

    def encode(self, parts: Parts) -> bytes:
        """See `Codec.encode`."""
        return encode_sparse(parts["gradient"], parts["sent"])

    def decode(self, data: bytes, before: Parts, asked: Asked = NOTHING_ASKED) -> Parts:
        """See `Codec.decode`."""
        vector, sent = decode_sparse(data, self.dim)
        return {"gradient": vector, "sent": sent}


def sparse_message(model: Model) -> MessageLayout:
    """Declare DGC's messages: the largest coordinates of the accumulated gradient."""
    parts = Part("gradient", (model.dim,)), Part("sent", (model.dim,))
    return MessageLayout(parts, ("gradient",), SparseCodec(model.dim))


@algorithms.register("dgc")
class DGC(CompressedSettings):
    """DGC: clients send only the largest coordinates of their gradients; the rest waits and adds up."""

    sparsity: float = Field(default=0.75, ge=0, lt=1, description="initial share that is held back (s_0)")
    rising: float = Field(default=0.25, gt=0, le=1, description="factor of the density per round (ρ)")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum m")

    def density(self, round_: int) -> float:
        """Return 1 − s_t, the share of coordinates that is sent.

        >>> [DGC().density(t) for t in (0, 1, 9)]
        [0.25, 0.0625, 0.0010000000000000009]
        """
        return 1.0 - min(0.999, 1.0 - (1.0 - self.sparsity) * self.rising**round_)

    def build(self, setup: Setup) -> Algorithm:
        """See `AlgorithmSettings.build`."""
        carries = self.preset == "reference"

        def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
            return start(model, ids, key, "u", "v", *(["carried"] if carries else []))

        def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
            done = compute(self, broadcast, state, clients, key, carries)
            u = self.momentum * state["u"] + done.gradient
            v = state["v"] + u
            sent = largest(v, clients.model.tensors, self.density(round_))
            messages = Messages(torch.where(sent, v, 0.0), {"sent": sent})
            kept = {**done.state, "u": torch.where(sent, 0.0, u), "v": torch.where(sent, 0.0, v)}
            return ClientStep(messages, kept, {"loss": done.loss, "density": sent.float().mean(1)})

        return Algorithm("dgc", init, client, self.server(setup), sparse_message)

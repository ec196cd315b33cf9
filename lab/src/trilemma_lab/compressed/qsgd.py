"""QSGD: gradients rounded at random to a few levels, without bias.

The gradient is cut into buckets. With M the scale of a bucket and s levels 0 … s−1, for each coordinate

    a = (s−1) |g|/M,   q = ⌊a⌋ + Bernoulli(a − ⌊a⌋),   value = M sign(g) q/(s−1),   E value = g

M is the largest magnitude ("max", as the experiments of the paper use) or the Euclidean norm ("l2", as its
theory does). A bucket of zeros is sent as zeros. Message: `wire.QuantisedFormat`.

Reference: Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD: communication-efficient SGD via gradient
quantization and encoding", NeurIPS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
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
from trilemma.models.types import Model
from trilemma_lab.compressed.gradient import CompressedSettings, compute, start
from trilemma_lab.compressed.wire import Quantised, QuantisedFormat

Scale = Literal["max", "l2"]


def quantise(
    vectors: Tensor, coins: Tensor, layout: QuantisedFormat, scale: Scale = "max"
) -> tuple[Tensor, Tensor]:
    """Return scales (k, buckets) and signed codes (k, D) of k vectors; `coins` (k, D) is uniform on [0, 1).

    >>> layout = QuantisedFormat(dim=4, bucket=2, levels=3)
    >>> v = torch.tensor([[1.0, -0.5, 0.0, 0.0]])
    >>> scales, codes = quantise(v, torch.full((1, 4), 0.7), layout)
    >>> scales.tolist(), codes.tolist(), dequantise(scales, codes, layout).tolist()
    ([[1.0, 0.0]], [[2, -1, 0, 0]], [[1.0, -0.5, 0.0, 0.0]])
    """
    parts = _buckets(vectors, layout)
    scales = parts.abs().amax(-1) if scale == "max" else torch.linalg.vector_norm(parts, dim=-1)
    top = layout.levels - 1
    steps = torch.where(scales[..., None] > 0, parts.abs() / scales[..., None] * top, 0.0)
    steps = steps.flatten(1)[:, : layout.dim]
    codes = torch.sign(vectors) * torch.floor(steps + coins).clamp(max=top)
    return scales, codes.to(torch.int32)


def dequantise(scales: Tensor, codes: Tensor, layout: QuantisedFormat) -> Tensor:
    """Return the vectors (k, D) that scales and codes represent."""
    parts = _buckets(codes.to(scales.dtype), layout) * (scales[..., None] / (layout.levels - 1))
    return parts.flatten(1)[:, : layout.dim]


def _buckets(vectors: Tensor, layout: QuantisedFormat) -> Tensor:
    padding = layout.buckets * layout.bucket - layout.dim
    return F.pad(vectors, (0, padding)).view(len(vectors), layout.buckets, layout.bucket)


@dataclass(frozen=True)
class QuantisedCodec:
    """Sends scales and codes; the receiver computes the gradient from them."""

    layout: QuantisedFormat

    @property
    def longest(self) -> Length:
        """See `Codec.longest`: all messages are equally long."""
        return Length(self.layout.scalars, self.layout.size)

    def lengths(self, parts: Parts) -> MessageLengths:
        """See `Codec.lengths`."""
        return MessageLengths.of(len(parts["scales"]), self.longest)

    def encode(self, parts: Parts) -> bytes:
        """See `Codec.encode`."""
        return self.layout.encode(Quantised(parts["scales"], parts["codes"]))

    def decode(self, data: bytes, before: Parts, asked: Asked = NOTHING_ASKED) -> Parts:
        """See `Codec.decode`."""
        read = self.layout.decode(data)
        gradient = dequantise(read.scales[None], read.codes[None], self.layout)[0]
        return {"scales": read.scales, "codes": read.codes, "gradient": gradient}


@algorithms.register("qsgd")
class QSGD(CompressedSettings):
    """QSGD: clients round their gradients, at random and without bias, to a few levels."""

    levels: int = Field(default=5, ge=2, le=1 << 24, description="number of levels s, zero included")
    bucket: int = Field(default=500, ge=1, description="coordinates that share a scale")
    scale: Scale = Field(default="max", description="scale of a bucket: largest magnitude or norm")

    def layout(self, model: Model) -> QuantisedFormat:
        """Return the format of a model's quantised gradients."""
        return QuantisedFormat(model.dim, self.bucket, self.levels)

    def build(self, setup: Setup) -> Algorithm:
        """See `AlgorithmSettings.build`."""

        def message(model: Model) -> MessageLayout:
            layout = self.layout(model)
            sent = Part("scales", (layout.buckets,)), Part("codes", (layout.dim,))
            return MessageLayout(
                (Part("gradient", (layout.dim,)), *sent), ("gradient",), QuantisedCodec(layout)
            )

        carries = self.preset == "reference"

        def init(model: Model, ids: tuple[int, ...], key: Key) -> Start:
            return start(model, ids, key, *(["carried"] if carries else []))

        def client(broadcast: State, state: State, clients: Clients, round_: int, key: Key) -> ClientStep:
            done = compute(self, broadcast, state, clients, key, carries)
            layout = self.layout(clients.model)
            coins = torch.stack(
                [
                    torch.rand(layout.dim, generator=key.fold("client", i, "coins").torch())
                    for i in clients.ids
                ]
            )
            scales, codes = quantise(done.gradient, coins.to(done.gradient), layout, self.scale)
            messages = Messages(dequantise(scales, codes, layout), {"scales": scales, "codes": codes})
            return ClientStep(messages, done.state, {"loss": done.loss})

        return Algorithm("qsgd", init, client, self.server(setup), message)

"""Batch normalisation for k clients, each with the statistics of its own batch.

    z = γ (x − μ)/√(σ² + ε) + β        per client and channel, over the examples and positions of the client

(Ioffe and Szegedy 2015). Padding does not count in μ and σ².
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-5
"""Added to variances."""

AXES = (1, 3, 4)
"""Examples and positions of (k, b, c, h, w)."""


@dataclass(frozen=True)
class Statistics:
    """What each client's batch was normalised by, (k, c), over `count` (k,) values per channel."""

    mean: Tensor
    inverse: Tensor
    """1/√(σ² + ε)"""
    count: Tensor

    @property
    def unbiased(self) -> Tensor:
        """The variance with denominator count − 1, which running statistics keep."""
        variance = (self.inverse.pow(-2) - EPSILON).clamp(min=0.0)
        return variance * (self.count / (self.count - 1.0).clamp(min=1.0))[:, None]


def per_channel(values: Tensor) -> Tensor:
    """Shape (…, c) to broadcast against (…, b, c, h, w)."""
    return values[..., None, :, None, None]


def apply(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """Normalise (…, b, c, h, w) by given statistics (…, c): one multiplication and one addition."""
    scale = weight * inverse
    return torch.addcmul(per_channel(bias - mean * scale), x, per_channel(scale))


def train(x: Tensor, weight: Tensor, bias: Tensor, present: Tensor | None) -> tuple[Tensor, Statistics]:
    """Normalise (k, b, c, h, w) by each client's own statistics; `present` (k, b) is 0 at padding."""
    clients, size, channels, high, wide = x.shape
    if present is None and not x.is_cuda:
        # One fused call per client: on a CPU each is large enough to fill it.
        own = zip(x, weight.expand(clients, channels), bias.expand(clients, channels), strict=True)
        parts = [torch.native_batch_norm(a, w, b, None, None, True, 0.0, EPSILON) for a, w, b in own]
        z, mean, inverse = (torch.stack(part) for part in zip(*parts, strict=True))
        return z, Statistics(mean.detach(), inverse.detach(), x.new_full((clients,), size * high * wide))
    if present is None:
        present = x.new_ones((clients, size))
    real = present[:, :, None, None, None]
    count = present.sum(1) * (high * wide)
    mean = (x * real).sum(AXES) / count[:, None]
    variance = ((x - per_channel(mean)).square() * real).sum(AXES) / count[:, None]
    inverse = torch.rsqrt(variance + EPSILON)
    z = apply(x, weight, bias, mean, inverse)
    return z, Statistics(mean.detach(), inverse.detach(), count)

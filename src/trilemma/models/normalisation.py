"""Batch normalisation for k clients, each with the statistics of its own batch.

    z = γ (x − μ)/√(σ² + ε) + β        per client and channel, over the examples and positions of the client

(Ioffe and Szegedy 2015). Padding does not count in μ and σ².
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EPSILON = 1e-5
"""Added to variances."""

AXES = (1, 3, 4)
"""Examples and positions of (k, b, c, h, w)."""


@dataclass(frozen=True)
class Statistics:
    """What each client's batch was normalised by, (k, c), over `count` (k, 1) values per channel."""

    mean: Tensor
    inverse: Tensor
    """1/√(σ² + ε)"""
    count: Tensor

    @property
    def unbiased(self) -> Tensor:
        """The variance with denominator count − 1, which running statistics keep."""
        variance = (self.inverse.pow(-2) - EPSILON).clamp(min=0.0)
        return variance * (self.count / (self.count - 1.0).clamp(min=1.0))


def per_channel(values: Tensor) -> Tensor:
    """Shape (…, c) to broadcast against (…, b, c, h, w)."""
    return values[..., None, :, None, None]


def apply(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """Normalise (…, b, c, h, w) by given statistics (…, c): one multiplication and one addition."""
    scale = weight * inverse
    return torch.addcmul(per_channel(bias - mean * scale), x, per_channel(scale))


def train(x: Tensor, weight: Tensor, bias: Tensor, present: Tensor | None) -> tuple[Tensor, Statistics]:
    """Normalise (k, b, c, h, w) by each client's own statistics; `present` (k, b) is 0 at padding."""
    if x.is_cuda and present is None:
        return _fused(x, weight, bias)
    with torch.no_grad():
        area = x.shape[3] * x.shape[4]
        seen = x.new_full((len(x), 1), x.shape[1]) if present is None else present.sum(1, keepdim=True)
        count = seen * area
        least = count.clamp(min=1.0)  # a client that is all padding gets zeros, not NaN
        real = None if present is None else present[:, :, None, None, None]
        mean = _sum(x, real) / least
        centred = x - per_channel(mean)
        # Summed as torch sums, in blocks: the library's fused kernel is ten times less exact on a CPU when
        # channels are innermost, enough to put rectifiers behind it on the wrong side.
        variance = _sum(centred.square(), real) / least
        statistics = Statistics(mean, torch.rsqrt(variance + EPSILON), count)
    z: Tensor = _Normalise.apply(x, weight, bias, centred, real, statistics)  # type: ignore[no-untyped-call]
    return z, statistics


def _fused(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Statistics]:
    """The same by the library's kernel, which knows no padding but reads x twice and not ten times.

    Plain torch: 1.7 to 4.1 times as fast as autograd through the formula on an H200 (100 clients × 50
    examples, the ResNet's layers).
    """
    order, flat = _merged(x)
    gain, shift = (part.expand(len(x), x.shape[2]).flatten() for part in (weight, bias))
    z, mean, inverse = torch.native_batch_norm(flat, gain, shift, None, None, True, 0.0, EPSILON)
    mean, inverse = (part.detach().view(len(x), -1) for part in (mean, inverse))
    count = x.new_full((len(x), 1), x[0, :, 0].numel())
    return z.view(x.permute(order).shape).permute(order), Statistics(mean, inverse, count)


def parameter_gradients(x: Tensor, grad: Tensor, statistics: Statistics) -> tuple[Tensor, Tensor]:
    """Return Σ ∂ℓ/∂z · x̂ and Σ ∂ℓ/∂z of every client and channel, (k, c) each.

    On an H200 by the library's kernel: 2.1 and 1.6 times as fast as the formula on the ResNet's large layers,
    1.1 on its small ones.
    """
    if not x.is_cuda:
        scaled = (grad * (x - per_channel(statistics.mean))).sum(AXES) * statistics.inverse
        return scaled, grad.sum(AXES)
    order, flat = _merged(x)
    ones, mean, inverse = x.new_ones(flat.shape[1]), statistics.mean.flatten(), statistics.inverse.flatten()
    backward: Any = torch.ops.aten.native_batch_norm_backward
    given = grad.permute(order).reshape(flat.shape)
    asked = [False, True, True]
    _, scaled, summed = backward(given, flat, ones, None, None, mean, inverse, True, EPSILON, asked)
    return scaled.view(len(x), -1), summed.view(len(x), -1)


def _merged(x: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """(k, b, c, h, w) → (n, k·c, l): clients are further channels; a view where memory lies in such an order.

    Return the order of axes too, which is its own inverse: that of batched products, k c b, or else b k c.
    """
    clients, size, channels = x.shape[:3]
    if x.transpose(1, 2).is_contiguous():
        return (0, 2, 1, 3, 4), x.transpose(1, 2).reshape(1, clients * channels, -1)
    return (1, 0, 2, 3, 4), x.transpose(0, 1).reshape(size, clients * channels, -1)


def _sum(values: Tensor, real: Tensor | None) -> Tensor:
    """Sum per client and channel, padding left out."""
    return (values if real is None else values * real).sum(AXES)


class _Normalise(torch.autograd.Function):
    """z = γ x̂ + β and its gradient for x, with r = 1/√(σ² + ε), x̂ = r (x − μ) and n values per channel.

    ∂ℓ/∂x = γ r (g − (Σ g + x̂ Σ g x̂)/n), the bracket's second part only where there is no padding.

    Gain over autograd through the formula, on the ResNet's layers: 1.4 to 2.1 on two threads of a CPU
    (4 × 50), 1.0 to 1.7 on an H200, where only padded batches come here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        centred: Tensor,
        real: Tensor | None,
        statistics: Statistics,
    ) -> Tensor:
        scale = weight * statistics.inverse
        ctx.save_for_backward(centred, scale)
        ctx.real, ctx.statistics, ctx.shape = real, statistics, weight.shape
        return torch.addcmul(per_channel(bias), centred, per_channel(scale))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (centred, scale), inverse = grads, ctx.saved_tensors, ctx.statistics.inverse
        bias, weight = grad.sum(AXES), (grad * centred).sum(AXES) * inverse
        share = scale / ctx.statistics.count.clamp(min=1.0)
        common = torch.addcmul(per_channel(share * bias), centred, per_channel(share * weight * inverse))
        if ctx.real is not None:
            common *= ctx.real
        # The tape finds these two itself; they are for plain autograd through a model.
        own = [
            part.sum_to_size(ctx.shape) if need else None
            for part, need in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        ]
        return grad * per_channel(scale) - common, *own, None, None, None

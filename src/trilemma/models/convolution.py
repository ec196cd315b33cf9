"""Convolutions for k clients, with shared or personal weights, and their gradients per client and example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """A square kernel and how it moves."""

    kernel: int
    stride: int = 1
    padding: int = 0

    def output(self, size: int) -> int:
        """Return the output's height (width) for an input of that height (width)."""
        return (size + 2 * self.padding - self.kernel) // self.stride + 1


def forward(x: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry) -> Tensor:
    """Convolve (…, b, c, h, w) with shared weights (out, c, ·, ·) or personal ones (k, out, c, ·, ·)."""
    if weight.dim() == 5:
        return torch.stack(
            [
                F.conv2d(one, w, b, geometry.stride, geometry.padding)
                for one, w, b in zip(x, weight, bias, strict=True)
            ]
        )
    flat = x.flatten(0, -4)
    z = F.conv2d(flat, weight, bias, geometry.stride, geometry.padding)
    return z.view(*x.shape[:-3], *z.shape[1:])


def client_gradients(x: Tensor, grad: Tensor, geometry: Geometry) -> Tensor:
    """Return each client's weight gradient (k, out, c, ·, ·) from inputs and ∂loss/∂output (k, b, …)."""
    return torch.stack([_weight_gradient(a, g, geometry) for a, g in zip(x, grad, strict=True)])


def _weight_gradient(x: Tensor, grad: Tensor, geometry: Geometry) -> Tensor:
    weight = x.new_empty((grad.shape[1], x.shape[1], geometry.kernel, geometry.kernel))
    two = [geometry.stride] * 2, [geometry.padding] * 2, [1, 1]
    backward: Any = torch.ops.aten.convolution_backward
    _, result, _ = backward(grad, x, weight, None, *two, False, [0, 0], 1, [False, True, False])
    return result  # type: ignore[no-any-return]


def example_gradients(x: Tensor, grad: Tensor, geometry: Geometry) -> Tensor:
    """Return the weight gradient (k, b, out, c·kernel²) of every example."""
    columns = F.unfold(x.flatten(0, 1), geometry.kernel, 1, geometry.padding, geometry.stride)
    products = torch.bmm(grad.flatten(0, 1).flatten(2), columns.transpose(1, 2))
    return products.view(*x.shape[:2], *products.shape[1:])


def squared_norms(x: Tensor, grad: Tensor, geometry: Geometry) -> Tensor:
    """Return the squared norm (k, b) of the weight gradient of every example."""
    return example_gradients(x, grad, geometry).square().sum((-2, -1))

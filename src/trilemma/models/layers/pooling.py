"""Maximum pooling, by the library's kernels or, on a GPU, by ones of our own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trilemma.models.kernels.compiled import kernels
from trilemma.models.layers.convolution import Stencil


def largest(x: Tensor, window: Stencil) -> Tensor:
    """Return the largest value of every window of (…, c, h, w)."""
    flat = x.flatten(0, -4)
    if flat.stride(1) == 1 and kernels("cuda_pooling", x, flat.shape[1]):
        z: Tensor = _Innermost.apply(flat, window)  # type: ignore[no-untyped-call]
    elif _side_by_side(window) and flat.is_contiguous() and kernels("cuda_pooling", x):
        z = _Apart.apply(flat, window)  # type: ignore[no-untyped-call]
    else:
        z = F.max_pool2d(flat, window.kernel, window.stride, window.padding)
    return z.view(*x.shape[:-3], *z.shape[1:])


def _side_by_side(window: Stencil) -> bool:
    """Whether windows neither overlap nor leave gaps nor reach outside."""
    return window.kernel == window.stride and not window.padding


class _Apart(torch.autograd.Function):
    """The formulas of `models.kernels.cuda_pooling` for windows side by side, (n, c, h, w) in and out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Stencil) -> Tensor:
        ctx.own = kernels("cuda_pooling", x)
        z, taps = ctx.own.forth_apart(x.flatten(0, 1), window)
        ctx.window, ctx.shape = window, x.shape
        ctx.save_for_backward(taps)
        found: Tensor = z.view(*x.shape[:2], *z.shape[1:])
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (taps,) = ctx.saved_tensors
        grad = grads[0].contiguous().flatten(0, 1)
        found: Tensor = ctx.own.back_apart(grad, taps, *ctx.shape[2:], ctx.window)
        return found.view(ctx.shape), None


class _Innermost(torch.autograd.Function):
    """The formulas of `trilemma.models.kernels.cuda_pooling`, (n, c, h, w) in and out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Stencil) -> Tensor:
        ctx.own = kernels("cuda_pooling", x, x.shape[1])
        z, taps = ctx.own.forth(x.movedim(1, -1).contiguous(), window)
        ctx.window, ctx.size = window, x.shape[2:]
        ctx.save_for_backward(taps)
        found: Tensor = z.movedim(-1, 1)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (taps,) = ctx.saved_tensors
        grad = grads[0].movedim(1, -1).contiguous()
        return ctx.own.back(grad, taps, *ctx.size, ctx.window).movedim(-1, 1), None

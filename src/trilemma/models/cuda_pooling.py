"""Maximum pooling of k clients on a GPU, with channels innermost in memory: x (k·b, h, w, c).

With stride s and padding p, at every position q, and of equal values the first:

    forth       z[q]  = max_t x[s q + t − p],   T[q] the tap t where it is
    back        ∂x[q] = Σ_t ∂z[(q − t + p) / s]   over whole positions whose T is t

The way back gathers what windows hand back to a value, so that sums have a fixed order. The library's kernels
take 4.0 times as long forth and 2.7 times as long back on the ResNet's pooling (an H200, 100 × 64 examples).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from trilemma.models.compiled import tile

if TYPE_CHECKING:
    from trilemma.models.convolution import Stencil

jit = cast(Callable[[Callable[..., None]], Any], triton.jit)

TILE = 2048
"""Numbers that a program finds at a time."""


@jit
def _forth(
    X: tl.tensor,
    Z: tl.tensor,
    taps: tl.tensor,
    positions: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    high: tl.tensor,
    wide: tl.tensor,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write z and T, a tile of positions and channels."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = rows < positions
    top = (rows % (high * wide) // wide) * STRIDE - PADDING
    left = (rows % wide) * STRIDE - PADDING
    best = tl.full((ROWS, WIDTH), -float("inf"), dtype=tl.float32)
    where = tl.zeros((ROWS, WIDTH), dtype=tl.int8)
    for tap in tl.static_range(KERNEL * KERNEL):
        y = top + tap // KERNEL
        x = left + tap % KERNEL
        there = inside & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        at = ((rows // (high * wide) * height + y) * width + x) * CHANNELS
        value = tl.load(X + at[:, None] + channel[None, :], mask=there[:, None], other=-float("inf"))
        better = (value > best) | (value != value)  # NaN is passed on
        best = tl.where(better, value, best)
        where = tl.where(better, tap, where).to(tl.int8)
    to = rows[:, None] * CHANNELS + channel[None, :]
    tl.store(Z + to, best, mask=inside[:, None])
    tl.store(taps + to, where, mask=inside[:, None])


@jit
def _back(
    G: tl.tensor,
    taps: tl.tensor,
    out: tl.tensor,
    positions: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    high: tl.tensor,
    wide: tl.tensor,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write ∂x, a tile of positions and channels."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = rows < positions
    down = rows % (height * width) // width + PADDING
    right = rows % width + PADDING
    total = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for tap in tl.static_range(KERNEL * KERNEL):
        y = down - tap // KERNEL
        x = right - tap % KERNEL
        there = inside & (y >= 0) & (x >= 0) & (y % STRIDE == 0) & (x % STRIDE == 0)
        there = there & (y // STRIDE < high) & (x // STRIDE < wide)
        at = ((rows // (height * width) * high + y // STRIDE) * wide + x // STRIDE) * CHANNELS
        chosen = tl.load(taps + at[:, None] + channel[None, :], mask=there[:, None], other=-1) == tap
        total += tl.load(G + at[:, None] + channel[None, :], mask=there[:, None] & chosen, other=0.0)
    tl.store(out + rows[:, None] * CHANNELS + channel[None, :], total, mask=inside[:, None])


def forth(x: Tensor, window: Stencil) -> tuple[Tensor, Tensor]:
    """Return z (n, high, wide, c) of x (n, h, w, c), and at which tap every maximum is."""
    size, height, width, channels = x.shape
    z = x.new_empty(size, window.output(height), window.output(width), channels)
    taps = torch.empty_like(z, dtype=torch.int8)
    _launch(_forth, (x, z, taps), z.shape, (height, width), z.shape[1:3], window)
    return z, taps


def back(grad: Tensor, taps: Tensor, height: int, width: int, window: Stencil) -> Tensor:
    """Return ∂x (n, height, width, c) of ∂z (n, high, wide, c)."""
    x = grad.new_empty(len(grad), height, width, grad.shape[3])
    _launch(_back, (grad, taps, x), x.shape, (height, width), grad.shape[1:3], window)
    return x


def _launch(
    kernel: Any,
    tensors: tuple[Tensor, ...],
    shape: torch.Size,
    before: tuple[int, int],
    after: torch.Size,
    window: Stencil,
) -> None:
    """Fill a tensor of some shape."""
    positions, channels = shape[:3].numel(), shape[3]
    columns = tile(channels, 64)
    kernel[triton.cdiv(positions, TILE // columns), channels // columns](
        *tensors,
        positions,
        *before,
        *after,
        CHANNELS=channels,
        KERNEL=window.kernel,
        STRIDE=window.stride,
        PADDING=window.padding,
        ROWS=TILE // columns,
        WIDTH=columns,
        num_warps=4,
    )

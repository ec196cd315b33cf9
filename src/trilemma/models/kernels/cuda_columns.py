"""Columns (im2col) of k clients on a GPU, in one launch: x (k, b, c, h, w) ↔ C (k, c·kernel², b·positions).

With stride s and padding p, for tap t and position q of every example and channel:

    unfolded    C[t, q] = x[s q + t − p]                         0 outside
    folded      x[q] = Σ_t C[t, (q − t + p) / s]                over whole positions inside

The sum goes through the taps in their order: the same bits, every time. On an H200 (100 × 50 examples of the
CNN's second convolution) folding takes 0.21 ms, the library's kernel 2.9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from trilemma.models.layers.convolution import Stencil

jit = cast(Callable[[Callable[..., None]], Any], triton.jit)

BLOCK = 1024
"""Numbers that a program writes."""

MOST = 1 << 31
"""Numbers of a client's columns below which kernels can count them."""


@jit
def _unfold(
    X: tl.tensor,
    C: tl.tensor,
    blocks: tl.tensor,
    entries: tl.tensor,
    examples: tl.tensor,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write a block of a client's columns."""
    client = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = at < entries
    position = at % (HIGH * WIDE)
    example = at // (HIGH * WIDE) % examples
    row = at // (HIGH * WIDE) // examples
    tap = row % (KERNEL * KERNEL)
    channel = row // (KERNEL * KERNEL)
    y = position // WIDE * STRIDE + tap // KERNEL - PADDING
    x = position % WIDE * STRIDE + tap % KERNEL - PADDING
    there = inside & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
    start = client * examples * (CHANNELS * HEIGHT * WIDTH)
    value = tl.load(
        X + start + ((example * CHANNELS + channel) * HEIGHT + y) * WIDTH + x, mask=there, other=0.0
    )
    tl.store(C + client * entries + at, value, mask=inside)


@jit
def _fold(
    C: tl.tensor,
    X: tl.tensor,
    blocks: tl.tensor,
    entries: tl.tensor,
    examples: tl.tensor,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    KERNEL: tl.constexpr,
    STRIDE: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write a block of what a client's columns add up to."""
    client = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = at < entries
    right = at % WIDTH + PADDING
    down = at // WIDTH % HEIGHT + PADDING
    channel = at // (WIDTH * HEIGHT) % CHANNELS
    example = at // (WIDTH * HEIGHT * CHANNELS)
    C += client * examples * (CHANNELS * KERNEL * KERNEL * HIGH * WIDE)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for tap in tl.static_range(KERNEL * KERNEL):
        y = down - tap // KERNEL
        x = right - tap % KERNEL
        there = inside & (y >= 0) & (x >= 0)
        if STRIDE > 1:
            there = there & (y % STRIDE == 0) & (x % STRIDE == 0)
            y = y // STRIDE
            x = x // STRIDE
        there = there & (y < HIGH) & (x < WIDE)
        row = (channel * (KERNEL * KERNEL) + tap) * examples + example
        total += tl.load(C + row * (HIGH * WIDE) + y * WIDE + x, mask=there, other=0.0)
    tl.store(X + client * entries + at, total, mask=inside)


def unfolded(x: Tensor, stencil: Stencil) -> Tensor:
    """Return the columns (k, c·kernel², b·positions) of x (k, b, c, h, w)."""
    clients, size, channels, height, width = x.shape
    positions = stencil.output(height) * stencil.output(width)
    columns = x.new_empty(clients, channels * stencil.kernel**2, size * positions)
    _launch(_unfold, (x.contiguous(), columns), columns, x.shape, stencil)
    return columns


def folded(columns: Tensor, shape: tuple[int, ...], stencil: Stencil) -> Tensor:
    """Return x (k, b, c, h, w), every number the sum of what stands for it in the columns."""
    x = columns.new_empty(shape)
    _launch(_fold, (columns.contiguous(), x), x, shape, stencil)
    return x


def _launch(
    kernel: Any, tensors: tuple[Tensor, Tensor], written: Tensor, shape: tuple[int, ...], stencil: Stencil
) -> None:
    """Write a tensor, client by client."""
    clients, size, channels, height, width = shape
    entries = written.numel() // clients
    blocks = triton.cdiv(entries, BLOCK)
    kernel[(clients * blocks,)](
        *tensors,
        blocks,
        entries,
        size,
        CHANNELS=channels,
        HEIGHT=height,
        WIDTH=width,
        HIGH=stencil.output(height),
        WIDE=stencil.output(width),
        KERNEL=stencil.kernel,
        STRIDE=stencil.stride,
        PADDING=stencil.padding,
        BLOCK=BLOCK,
        num_warps=4,
    )

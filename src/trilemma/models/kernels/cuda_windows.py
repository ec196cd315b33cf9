"""Convolutions of k clients with weights of their own on a GPU, reading windows where they lie.

With channels innermost in memory, x (k, b, h, w, c), weights W_t (c, out) by tap t, stride s and padding p,
at every position q:

    forward     z[q]  = Σ_t x[s q + t − p] W_t + β
    back        ∂x[q] = Σ_t ∂z[(q − t + p) / s] W_tᵀ       where that is a whole position
    weights     ∂W_t  = Σ_q x[s q + t − p]ᵀ ∂z[q]

Columns (im2col) would hold every value kernel² times, and memory is what a GPU has least of: here a program
keeps one tile of the result in registers and gathers what it multiplies from x itself, through the cache.
Forth and back are the same kernel with other strides. Products are rounded to TF32 where
`torch.get_float32_matmul_precision` allows it; otherwise each is three TF32 products, which is float32 to
within a few units in the last place. Every program owns its tile and sums in a fixed order: the same bits
every time.

References: Chetlur et al., "cuDNN: efficient primitives for deep learning", 2014 (columns that are never
stored); Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32
theoretical peak performance", 2022 (three products for one).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from trilemma.models.kernels.compiled import tile

if TYPE_CHECKING:
    from trilemma.models.layers.convolution import Stencil

jit = cast(Callable[[Callable[..., None]], Any], triton.jit)

INNER = 32
"""What is multiplied at a time: channels, or positions for the weights."""

SIDE = 32
"""Outputs and channels of the squares in which weights are put in order."""


@jit
def _convolve(
    X: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    Z: tl.tensor,
    positions: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    high: tl.tensor,
    wide: tl.tensor,
    examples: tl.tensor,
    CHANNELS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    KERNEL: tl.constexpr,
    STEP: tl.constexpr,
    SIGN: tl.constexpr,
    OFFSET: tl.constexpr,
    DIVISOR: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Z[q] = Σ_t X[(STEP q + SIGN t + OFFSET) / DIVISOR] W_tᵀ + β, a tile of positions and outputs.

    W is (k, kernel², OUTPUTS, CHANNELS): what is summed over is innermost, as tensor cores want it.
    """
    client = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = rows < positions
    example = rows // (high * wide)
    top = (rows % (high * wide) // wide) * STEP + OFFSET
    left = (rows % wide) * STEP + OFFSET
    X += client * examples * height * width * CHANNELS
    weight += client * (KERNEL * KERNEL * CHANNELS * OUTPUTS)
    BLOCKS: tl.constexpr = CHANNELS // INNER
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for turn in range(KERNEL * KERNEL * BLOCKS):
        tap = turn // BLOCKS
        inner = (turn % BLOCKS) * INNER + tl.arange(0, INNER)
        y = top + SIGN * (tap // KERNEL)
        x = left + SIGN * (tap % KERNEL)
        there = inside & (y >= 0) & (x >= 0)
        if DIVISOR > 1:
            there = there & (y % DIVISOR == 0) & (x % DIVISOR == 0)
            y = y // DIVISOR
            x = x // DIVISOR
        there = there & (y < height) & (x < width)
        start = ((example * height + y) * width + x) * CHANNELS
        a = tl.load(X + start[:, None] + inner[None, :], mask=there[:, None], other=0.0)
        b = tl.load(weight + tap * (OUTPUTS * CHANNELS) + inner[:, None] + columns[None, :] * CHANNELS)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if BIASED:
        total += tl.load(bias + client * OUTPUTS + columns)[None, :]
    to = client * positions * OUTPUTS + rows.to(tl.int64) * OUTPUTS
    tl.store(Z + to[:, None] + columns[None, :], total, mask=inside[:, None])


@jit
def _correlate(
    X: tl.tensor,
    G: tl.tensor,
    out: tl.tensor,
    apart: tl.tensor,
    positions: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    high: tl.tensor,
    wide: tl.tensor,
    examples: tl.tensor,
    CHANNELS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    KERNEL: tl.constexpr,
    STEP: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """∂W_t = Σ_q X[STEP q + t + OFFSET]ᵀ G[q], a tile of (taps and channels) × outputs.

    It is written as parameters lie, (outputs, channels, taps): what taps write one by one meets in the cache.
    """
    client = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = rows < KERNEL * KERNEL * CHANNELS
    down = rows // CHANNELS // KERNEL
    right = rows // CHANNELS % KERNEL
    shift = (down * width + right) * CHANNELS + rows % CHANNELS
    X += client * examples * height * width * CHANNELS
    G += client * positions * OUTPUTS
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, positions, INNER):
        q = start + tl.arange(0, INNER)
        inside = q < positions
        top = (q % (high * wide) // wide) * STEP + OFFSET
        left = (q % wide) * STEP + OFFSET
        corner = ((q // (high * wide) * height + top) * width + left) * CHANNELS
        y = down[:, None] + top[None, :]
        x = right[:, None] + left[None, :]
        there = known[:, None] & inside[None, :] & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        a = tl.load(X + shift[:, None] + corner[None, :], mask=there, other=0.0)
        g = tl.load(G + q[:, None] * OUTPUTS + columns[None, :], mask=inside[:, None], other=0.0)
        total = tl.dot(a, g, total, input_precision=PRECISION)
    to = client * apart + rows % CHANNELS * (KERNEL * KERNEL) + rows // CHANNELS
    each = columns * (CHANNELS * KERNEL * KERNEL)
    tl.store(out + to[:, None] + each[None, :], total, mask=known[:, None])


@jit
def _by_tap(
    weight: tl.tensor,
    forth: tl.tensor,
    back: tl.tensor,
    apart: tl.tensor,
    CHANNELS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TAPS: tl.constexpr,
    SIDE: tl.constexpr,
) -> None:
    """Copy W (out, c, taps) to (taps, out, c) and (taps, c, out), a square of outputs and channels."""
    client = tl.program_id(2).to(tl.int64)
    o = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    c = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    for tap in tl.static_range(TAPS):
        w = tl.load(weight + client * apart + (o[:, None] * CHANNELS + c[None, :]) * TAPS + tap)
        to = client * (TAPS * OUTPUTS * CHANNELS) + tap * (OUTPUTS * CHANNELS)
        tl.store(forth + to + o[:, None] * CHANNELS + c[None, :], w)
        tl.store(back + to + c[None, :] * OUTPUTS + o[:, None], w)


def by_tap(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights (k, out, c, kernel, kernel) as (k, kernel², out, c) and (k, kernel², c, out)."""
    clients, outputs, channels, kernel = weight.shape[:4]
    own = weight if weight[0].is_contiguous() else weight.contiguous()
    forth = weight.new_empty(clients, kernel**2, outputs, channels)
    back = weight.new_empty(clients, kernel**2, channels, outputs)
    _by_tap[outputs // SIDE, channels // SIDE, clients](
        own, forth, back, own.stride(0), channels, outputs, kernel**2, SIDE, num_warps=4
    )
    return forth, back


def innermost(x: Tensor) -> Tensor:
    """(k, b, c, h, w) → (k, b, h, w, c), a view where memory lies so."""
    return x.movedim(2, -1).contiguous()


def convolve(x: Tensor, taps: Tensor, bias: Tensor, stencil: Stencil) -> Tensor:
    """Return z (k, b, high, wide, out) of x (k, b, h, w, c) and taps (k, kernel², out, c)."""
    clients, size, height, width = x.shape[:4]
    z = x.new_empty(clients, size, stencil.output(height), stencil.output(width), taps.shape[2])
    _launch(x, taps, bias, z, stencil, back=False)
    return z


def back(grad: Tensor, taps: Tensor, height: int, width: int, stencil: Stencil) -> Tensor:
    """Return ∂x (k, b, height, width, c) of ∂z (k, b, high, wide, out) and taps (k, kernel², c, out)."""
    x = grad.new_empty(*grad.shape[:2], height, width, taps.shape[2])
    _launch(grad, taps, grad, x, stencil, back=True)
    return x


def _launch(x: Tensor, taps: Tensor, bias: Tensor, z: Tensor, stencil: Stencil, *, back: bool) -> None:
    """Fill z (k, b, high, wide, out) from x (k, b, h, w, c) and taps (k, kernel², out, c)."""
    clients, size, height, width, channels = x.shape
    high, wide, outputs = z.shape[2:]
    rows, columns = 128, tile(outputs, 128 if _precision() == "tf32" else 64)
    _convolve[triton.cdiv(size * high * wide, rows), outputs // columns, clients](
        x,
        taps,
        bias,
        z,
        size * high * wide,
        height,
        width,
        high,
        wide,
        size,
        CHANNELS=channels,
        OUTPUTS=outputs,
        KERNEL=stencil.kernel,
        STEP=1 if back else stencil.stride,
        SIGN=-1 if back else 1,
        OFFSET=stencil.padding if back else -stencil.padding,
        DIVISOR=stencil.stride if back else 1,
        BIASED=not back,
        ROWS=rows,
        COLUMNS=columns,
        INNER=INNER,
        PRECISION=_precision(),
        num_warps=8,
        num_stages=3,
    )


def weights(x: Tensor, grad: Tensor, stencil: Stencil, out: Tensor | None = None) -> Tensor:
    """Return ∂W (k, out, c, kernel, kernel) of x and ∂z, channels innermost.

    It is written to `out` where that is given, in which clients may lie apart.
    """
    clients, size, height, width, channels = x.shape
    high, wide, outputs = grad.shape[2:]
    kernel, plain = stencil.kernel, _precision() == "tf32"
    # Two warps get instructions that read positions as they lie; with four they would have to be innermost.
    rows, columns, warps = (64, tile(outputs, 128), 2) if plain else (128, tile(outputs, 64), 4)
    if out is None:
        out = x.new_empty(clients, outputs, channels, kernel, kernel)
    _correlate[triton.cdiv(kernel**2 * channels, rows), outputs // columns, clients](
        x,
        grad,
        out,
        out.stride(0),
        size * high * wide,
        height,
        width,
        high,
        wide,
        size,
        CHANNELS=channels,
        OUTPUTS=outputs,
        KERNEL=kernel,
        STEP=stencil.stride,
        OFFSET=-stencil.padding,
        ROWS=rows,
        COLUMNS=columns,
        INNER=INNER,
        PRECISION=_precision(),
        num_warps=warps,
        num_stages=3,
    )
    return out


def _precision() -> str:
    """How a float32 product is made of TF32 ones."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"

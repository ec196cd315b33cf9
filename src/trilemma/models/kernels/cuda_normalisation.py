"""Batch normalisation of k clients on a GPU, with channels innermost in memory: x (k, m, c), m values each.

With r = 1/√(σ² + ε), x̂ = r (x − μ), n real values per channel (padding does not count) and g = ∂ℓ/∂z:

    moments     μ and Σ (x − μ)²              in one pass, blocks merged as Chan et al. do
    slopes      Σ g x̂ and Σ g                 the gradients of γ and β
    affine      A g + B (x − μ) + C           z with A = 0, B = γ r, C = β;
                                              ∂ℓ/∂x with A = γ r, B = −A r Σ g x̂ / n, C = −A Σ g / n,
                                              B and C at real values only

Where max(z, 0) is wanted it is cut here too, one pass less each way: g counts only where z was not cut.

Every program owns its channels of a client and adds up in a fixed order: the same bits every time.

Reference: Chan, Golub, LeVeque, "Algorithms for computing the sample variance", American Statistician 1983.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from trilemma.models.kernels.compiled import tile

jit = cast(Callable[[Callable[..., None]], Any], triton.jit)

ROWS, WIDTH = 256, 16
"""Values and channels that a program adds up at a time."""

TILE = 4096
"""Numbers that a program maps at a time."""


@jit
def _moments(
    X: tl.tensor,
    present: tl.tensor,
    mean: tl.tensor,
    squares: tl.tensor,
    m: tl.tensor,
    area: tl.tensor,
    CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write μ and Σ (x − μ)² of WIDTH channels of a client."""
    client = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    X += client * m * CHANNELS
    centre = tl.zeros((WIDTH,), dtype=tl.float32)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    seen = 0.0
    for start in range(0, m, ROWS):
        row = start + tl.arange(0, ROWS)
        real = row < m
        if PADDED:
            real = real & (tl.load(present + client * (m // area) + row // area, mask=real, other=0.0) > 0)
        x = tl.load(X + row[:, None] * CHANNELS + channel[None, :], mask=real[:, None], other=0.0)
        count = tl.sum(real.to(tl.float32))
        here = tl.sum(x, 0) / tl.maximum(count, 1.0)
        off = tl.where(real[:, None], x - here[None, :], 0.0)
        away = here - centre
        both = tl.maximum(seen + count, 1.0)
        total += tl.sum(off * off, 0) + away * away * (seen * count / both)
        centre += away * (count / both)
        seen += count
    tl.store(mean + client * CHANNELS + channel, centre)
    tl.store(squares + client * CHANNELS + channel, total)


@jit
def _slopes(
    X: tl.tensor,
    G: tl.tensor,
    mean: tl.tensor,
    inverse: tl.tensor,
    scale: tl.tensor,
    shift: tl.tensor,
    scaled: tl.tensor,
    summed: tl.tensor,
    m: tl.tensor,
    CHANNELS: tl.constexpr,
    CUT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write Σ g x̂ and Σ g of WIDTH channels of a client."""
    client = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    own = client * CHANNELS + channel
    centre = tl.load(mean + own)
    along = tl.zeros((WIDTH,), dtype=tl.float32)
    plain = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(0, m, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < m)[:, None]
        at = client * m * CHANNELS + row[:, None] * CHANNELS + channel[None, :]
        x = tl.load(X + at, mask=inside, other=0.0)
        g = tl.load(G + at, mask=inside, other=0.0)
        off = x - centre[None, :]
        if CUT:
            g = tl.where(tl.load(scale + own)[None, :] * off + tl.load(shift + own)[None, :] <= 0.0, 0.0, g)
        along += tl.sum(g * off, 0)
        plain += tl.sum(g, 0)
    tl.store(scaled + own, along * tl.load(inverse + own))
    tl.store(summed + own, plain)


@jit
def _affine(
    X: tl.tensor,
    G: tl.tensor,
    present: tl.tensor,
    out: tl.tensor,
    mean: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    shift: tl.tensor,
    m: tl.tensor,
    area: tl.tensor,
    CHANNELS: tl.constexpr,
    BACK: tl.constexpr,
    PADDED: tl.constexpr,
    CUT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Write B (x − μ) + C or, on the way back, A g + B (x − μ) + C, a tile of a client's values."""
    client = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = (row < m)[:, None]
    at = client * m * CHANNELS + row[:, None] * CHANNELS + channel[None, :]
    own = client * CHANNELS + channel
    off = tl.load(X + at, mask=inside, other=0.0) - tl.load(mean + own)[None, :]
    z = tl.load(b + own)[None, :] * off + tl.load(c + own)[None, :]
    if PADDED:
        real = tl.load(present + client * (m // area) + row // area, mask=row < m, other=0.0)
        z = tl.where(real[:, None] > 0, z, 0.0)
    if BACK:
        g = tl.load(G + at, mask=inside, other=0.0)
        scale = tl.load(a + own)[None, :]
        if CUT:
            g = tl.where(scale * off + tl.load(shift + own)[None, :] <= 0.0, 0.0, g)
        z += scale * g
    elif CUT:
        z = tl.where(z <= 0.0, 0.0, z)
    tl.store(out + at, z, mask=inside)


def moments(x: Tensor, present: Tensor | None, area: int) -> tuple[Tensor, Tensor]:
    """Return μ and Σ (x − μ)² (k, c) of x (k, m, c); `present` (k, m / area) is 0 at padding."""
    clients, m, channels = x.shape
    mean, squares = x.new_empty(clients, channels), x.new_empty(clients, channels)
    width = tile(channels, WIDTH)
    given = x if present is None else present.contiguous()
    _moments[clients, channels // width](
        x, given, mean, squares, m, area, channels, present is not None, ROWS, width, num_warps=4
    )
    return mean, squares


@dataclass(frozen=True)
class Map:
    """z = scale (x − μ) + shift, (k, c) each, or max(z, 0) where it is `cut`."""

    mean: Tensor
    scale: Tensor
    shift: Tensor
    cut: bool


def slopes(x: Tensor, grad: Tensor, inverse: Tensor, z: Map) -> tuple[Tensor, Tensor]:
    """Return Σ g x̂ and Σ g (k, c) of x and g (k, m, c)."""
    clients, m, channels = x.shape
    scaled, summed = torch.empty_like(z.mean), torch.empty_like(z.mean)
    width = tile(channels, WIDTH)
    _slopes[clients, channels // width](
        x,
        grad,
        z.mean,
        inverse,
        z.scale,
        z.shift,
        scaled,
        summed,
        m,
        channels,
        z.cut,
        ROWS,
        width,
        num_warps=4,
    )
    return scaled, summed


def mapped(x: Tensor, z: Map) -> Tensor:
    """Return z (k, m, c)."""
    return _mapped(x, None, None, 1, z, z.scale, z.shift)


def slope(
    x: Tensor, grad: Tensor, present: Tensor | None, area: int, z: Map, line: tuple[Tensor, Tensor]
) -> Tensor:
    """Return scale g + B (x − μ) + C (k, m, c), with the line (B, C), (k, c) each, at real values only."""
    return _mapped(x, grad, present, area, z, *line)


def _mapped(
    x: Tensor, grad: Tensor | None, present: Tensor | None, area: int, z: Map, b: Tensor, c: Tensor
) -> Tensor:
    clients, m, channels = x.shape
    width = tile(channels, 64)
    out = torch.empty_like(x)
    _affine[triton.cdiv(m, TILE // width), channels // width, clients](
        x,
        x if grad is None else grad,
        x if present is None else present.contiguous(),
        out,
        z.mean,
        z.scale,
        b,
        c,
        z.shift,
        m,
        area,
        CHANNELS=channels,
        BACK=grad is not None,
        PADDED=present is not None,
        CUT=z.cut,
        ROWS=TILE // width,
        WIDTH=width,
        num_warps=8,
    )
    return out

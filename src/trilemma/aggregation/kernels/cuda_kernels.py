"""Triton kernels for CUDA devices; imported only through `trilemma.aggregation.kernels.cuda`.

They mirror `trilemma.aggregation.kernels`. Every program owns its slots of the output and sums over
programs are taken afterwards in a fixed order, so that the same input gives the same bits.

Gains are over the best plain torch version of the same operation on an H200, float32 messages, launches
included, as `python benchmarks/kernels.py --device cuda` measures them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import triton
import triton.language as tl

jit = cast(Callable[[Callable[..., None]], Any], triton.jit)


@jit
def shifted_gram(
    X: tl.tensor,
    r: tl.tensor,
    W: tl.tensor,
    pairs: tl.tensor,
    n: tl.tensor,
    d: tl.tensor,
    stride: tl.tensor,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONE_TILE: tl.constexpr,
) -> None:
    """Add to W (programs, pairs, ROWS, ROWS) float64 the inner products of x_i − r; row n is the origin.

    Products are three TF32 products each (float32 accuracy on tensor cores), summed in float32 over CHUNK
    columns and in float64 beyond.

    Gain: 1.9 and 2.3 for n = 100 (d = 2.5e6 and 1e7), none for n = 30 (0.8 and 1.0).
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    pair = tl.program_id(1)
    rows = tl.load(pairs + 2 * pair) * ROWS + tl.arange(0, ROWS)
    others = tl.load(pairs + 2 * pair + 1) * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, ROWS)
    slot = W + (program * tl.num_programs(1) + pair).to(tl.int64) * ROWS * ROWS
    slot = slot + inner[:, None] * ROWS + inner[None, :]
    for start in range(program * CHUNK, d, programs * CHUNK):
        total = tl.zeros((ROWS, ROWS), dtype=tl.float32)
        for offset in range(0, CHUNK, COLUMNS):
            columns = start + offset + tl.arange(0, COLUMNS).to(tl.int64)
            valid = columns < d
            reference = tl.load(r + columns, mask=valid, other=0.0).to(tl.float32)
            where = (rows < n)[:, None] & valid[None, :]
            x = tl.load(X + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=where, other=0.0)
            y = tl.where((rows <= n)[:, None], x.to(tl.float32) - reference[None, :], 0.0)
            if ONE_TILE:
                z = y
            else:
                where = (others < n)[:, None] & valid[None, :]
                x = tl.load(
                    X + others.to(tl.int64)[:, None] * stride + columns[None, :], mask=where, other=0.0
                )
                z = tl.where((others <= n)[:, None], x.to(tl.float32) - reference[None, :], 0.0)
            total = tl.dot(y, tl.trans(z), total, input_precision="tf32x3")
        tl.store(slot, tl.load(slot) + total.to(tl.float64))


@jit
def weighted_sum(
    X: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    weights: tl.tensor,
    count: tl.tensor,
    d: tl.tensor,
    stride: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """Sum weights_q X[rows_q] in float64 and round once.

    Gain: 1.2 to 1.3 for d = 79,510, 2.1 to 2.5 for 431,080, 4.6 to 8.5 for 2.5e6 and 1e7.
    """
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    valid = columns < d
    total = tl.zeros((COLUMNS,), dtype=tl.float64)
    for q in range(count):
        row = tl.load(rows + q)
        x = tl.load(X + row * stride + columns, mask=valid, other=0.0)
        total += tl.load(weights + q) * x.to(tl.float64)
    tl.store(out + columns, total.to(tl.float32).to(out.dtype.element_ty), mask=valid)


@jit
def window_means(
    X: tl.tensor,
    out: tl.tensor,
    edges: tl.tensor,
    codes: tl.tensor,
    d: tl.tensor,
    stride: tl.tensor,
    N: tl.constexpr,
    PROGRAM: tl.constexpr,
    CONSTRAINTS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Mean of a window of the N sorted values in each column: one thread runs PROGRAM on one column.

    `edges` (2, d) gets the first and last value in the window, `codes` (d,) where it starts and whether
    there are ties at its edges; see `trilemma.aggregation.kernels.cuda_network`.

    Gain over a sort: 2.7 and 5.4 for d = 79,510 (n = 30 and 100), 5 and 14 for 431,080, 21 to 51 beyond. With
    the two tallies, a whole rule: 1.5 to 2.7, 4.3 to 5.9, 13 to 28.
    """
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    valid = columns < d
    values: tl.constexpr = ()
    row = X + columns
    for _ in tl.static_range(N):
        values = values + (tl.load(row, mask=valid, other=0.0).to(tl.float32),)  # noqa: RUF005
        row += stride
    mean, low, high, code = tl.inline_asm_elementwise(
        PROGRAM,
        CONSTRAINTS,
        values,
        dtype=(tl.float64, tl.float32, tl.float32, tl.int32),
        is_pure=True,
        pack=1,
    )
    tl.store(out + columns, mean.to(tl.float32).to(out.dtype.element_ty), mask=valid)
    tl.store(edges + columns, low, mask=valid)
    tl.store(edges + d + columns, high, mask=valid)
    tl.store(codes + columns, code, mask=valid)


@jit
def tally_shares(
    V: tl.tensor,
    edges: tl.tensor,
    codes: tl.tensor,
    shares: tl.tensor,
    n: tl.tensor,
    d: tl.tensor,
    stride: tl.tensor,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Add up how much of the windows of SIZE values each row fills, over this program's columns.

    All n rows are in one tile. Equal values at an edge of a window share the places they hold in it equally.

    Gain over comparisons that know no ties: none for d = 79,510, 1.3 for 431,080, 3.9 to 7.5 beyond.
    """
    rows = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(tl.program_id(0) * COLUMNS, d, tl.num_programs(0) * COLUMNS):
        columns = first + tl.arange(0, COLUMNS).to(tl.int64)
        valid = columns < d
        where = (rows < n)[:, None] & valid[None, :]
        v = tl.load(V + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=where, other=0.0)
        v = v.to(tl.float32)
        low = tl.load(edges + columns, mask=valid, other=0.0)
        high = tl.load(edges + d + columns, mask=valid, other=0.0)
        code = tl.load(codes + columns, mask=valid, other=0)
        at_low = tl.full((COLUMNS,), 1.0, dtype=tl.float32)
        at_high = tl.full((COLUMNS,), 1.0, dtype=tl.float32)
        if tl.max(code & 1, axis=0) > 0:
            start = code >> 1
            end = start + SIZE
            below = tl.sum((where & (v < low[None, :])).to(tl.int32), axis=0)
            equal = tl.sum((where & (v == low[None, :])).to(tl.int32), axis=0)
            at_low = (tl.minimum(below + equal, end) - start).to(tl.float32) / tl.maximum(equal, 1)
            below = tl.sum((where & (v < high[None, :])).to(tl.int32), axis=0)
            equal = tl.sum((where & (v == high[None, :])).to(tl.int32), axis=0)
            at_high = (end - tl.maximum(start, below)).to(tl.float32) / tl.maximum(equal, 1)
        share = tl.where((v > low[None, :]) & (v < high[None, :]), 1.0, 0.0)
        share = tl.where(v == high[None, :], at_high[None, :], share)
        share = tl.where(v == low[None, :], at_low[None, :], share)
        total += tl.where(where, share, 0.0)
    tl.store(shares + tl.program_id(0) * ROWS + rows, tl.sum(total.to(tl.float64), axis=1))


@jit
def tally_squares(
    X: tl.tensor,
    value: tl.tensor,
    squares: tl.tensor,
    n: tl.tensor,
    d: tl.tensor,
    stride: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Sum (x_i − value)² over the columns of this program, into squares[program, i].

    Gain: none for d = 79,510, 1.5 for 431,080, 5 to 10 beyond.
    """
    rows = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float64)
    for start in range(tl.program_id(0) * COLUMNS, d, tl.num_programs(0) * COLUMNS):
        columns = start + tl.arange(0, COLUMNS).to(tl.int64)
        valid = columns < d
        where = (rows < n)[:, None] & valid[None, :]
        x = tl.load(X + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=where, other=0.0)
        v = tl.load(value + columns, mask=valid, other=0.0)
        difference = x.to(tl.float64) - v.to(tl.float64)[None, :]
        total += tl.where(where, difference * difference, 0.0)
    tl.store(squares + tl.program_id(0) * ROWS + rows, tl.sum(total, axis=1))

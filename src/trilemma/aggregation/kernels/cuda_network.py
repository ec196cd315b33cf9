"""A sorting network as PTX: what one CUDA thread does with the n values of a column, all in its registers.

Triton passes the n loaded values to the program as one element-wise operation. Written as Triton operations
the same network of some thousand compare-exchanges takes minutes to compile; as one opaque operation, a
second.

The program computes what `trilemma.aggregation.kernels.cpu_windows.window_means` does for a column:

    $0  mean of the window (float64)      $1, $2  its first and last value
    $3  2 · rank of the first value in the window, + 1 if an equal value lies just outside
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator

from trilemma.aggregation.passes.columns import Window, network

OUTPUTS = ("=d", "=f", "=f", "=r")


@functools.lru_cache(maxsize=64)
def window_program(n: int, window: Window) -> tuple[str, str]:
    """Return the PTX text and its constraints for the window means of columns of n values.

    >>> text, constraints = window_program(3, Window(1))
    >>> constraints
    '=d,=f,=f,=r,f,f,f'
    >>> text.count("min.f32")
    3
    """
    lines = [*_registers(n), *_sort(n, window)]
    lines += _nearest_to_median(n, window.size) if window.around_median else _middle(n, window.size)
    return "{\n" + "\n".join(lines) + "\n}", ",".join([*OUTPUTS, *["f"] * n])


def _registers(n: int) -> Iterator[str]:
    yield f".reg .f32 v<{n}>;"
    yield f".reg .pred p<{n + 2}>;"
    yield ".reg .f32 t;"
    yield ".reg .f64 a, b, c;"
    yield ".reg .b32 k;"
    for i in range(n):
        yield f"mov.f32 v{i}, ${len(OUTPUTS) + i};"


def _sort(n: int, window: Window) -> Iterator[str]:
    for i, j in network(n, window).tolist():
        yield f"min.f32 t, v{i}, v{j};"
        yield f"max.f32 v{j}, v{i}, v{j};"
        yield f"mov.f32 v{i}, t;"


def _add(value: str, size: int) -> Iterator[str]:
    """Add value/size to the sum a."""
    yield f"cvt.f64.f32 b, {value};"
    yield f"fma.rn.f64 a, b, {_double(1.0 / size)}, a;"


def _middle(n: int, size: int) -> Iterator[str]:
    """Compute $0 to $3 for the `size` middle ones of n sorted values."""
    trim = (n - size) // 2
    yield f"mov.f64 a, {_double(0.0)};"
    for r in range(trim, trim + size):
        yield from _add(f"v{r}", size)
    yield f"mov.b32 k, {2 * trim};"
    if trim:
        yield f"setp.eq.f32 p0, v{trim - 1}, v{trim};"
        yield f"setp.eq.f32 p1, v{trim + size - 1}, v{trim + size};"
        yield "or.pred p0, p0, p1;"
        yield f"selp.b32 k, {2 * trim + 1}, {2 * trim}, p0;"
    yield "mov.f64 $0, a;"
    yield f"mov.f32 $1, v{trim};"
    yield f"mov.f32 $2, v{trim + size - 1};"
    yield "mov.b32 $3, k;"


def _nearest_to_median(n: int, size: int) -> Iterator[str]:
    """Compute $0 to $3 for those `size` of n sorted values that are nearest to the median."""
    gap = n - size
    yield from _halves("c", (n - 1) // 2, n // 2)
    # p_r: the window starts beyond rank r, because v_r is farther from the median c than v_{r+size}.
    for r in range(gap):
        yield from _halves("b", r, r + size)
        yield f"setp.lt.f64 p{r}, b, c;"
    yield f"mov.f64 a, {_double(0.0)};"
    for r in range(n):
        yield f"mov.f32 t, v{r};"
        if r < gap:
            yield f"selp.f32 t, {_single(0.0)}, t, p{r};"
        if r >= size:
            yield f"selp.f32 t, t, {_single(0.0)}, p{r - size};"
        yield from _add("t", size)
    yield "mov.f64 $0, a;"
    yield "mov.f32 t, v0;"
    for r in range(gap):
        yield f"selp.f32 t, v{r + 1}, t, p{r};"
    yield "mov.f32 $1, t;"
    yield f"mov.f32 t, v{size - 1};"
    for r in range(gap):
        yield f"selp.f32 t, v{r + size}, t, p{r};"
    yield "mov.f32 $2, t;"
    for start in range(gap + 1):
        code = f"p{n}"
        yield f"setp.ne.f32 {code}, v0, v0;"
        if start > 0:
            yield f"setp.eq.f32 p{n + 1}, v{start - 1}, v{start};"
            yield f"or.pred {code}, {code}, p{n + 1};"
        if start < gap:
            yield f"setp.eq.f32 p{n + 1}, v{start + size - 1}, v{start + size};"
            yield f"or.pred {code}, {code}, p{n + 1};"
        if start == 0:
            yield f"selp.b32 k, 1, 0, {code};"
        else:
            yield f"@p{start - 1} selp.b32 k, {2 * start + 1}, {2 * start}, {code};"
    yield "mov.b32 $3, k;"


def _halves(target: str, i: int, j: int) -> Iterator[str]:
    """Target = v_i/2 + v_j/2, exact in float64."""
    yield f"cvt.f64.f32 a, v{i};"
    yield f"mul.rn.f64 {target}, a, {_double(0.5)};"
    yield f"cvt.f64.f32 a, v{j};"
    yield f"fma.rn.f64 {target}, a, {_double(0.5)}, {target};"


def _double(x: float) -> str:
    return f"0d{struct.unpack('>Q', struct.pack('>d', x))[0]:016X}"


def _single(x: float) -> str:
    return f"0f{struct.unpack('>I', struct.pack('>f', x))[0]:08X}"

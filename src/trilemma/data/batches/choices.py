"""Draws without replacement for many clients at once: numpy's numbers, without a Python call for each client.

Every client has a stream of its own, Philox keyed by its `Key`, and a draw from it is what
`Generator.choice(m, size, replace=False)` gives at the beginning of that stream: Floyd's algorithm and a
shuffle, or the tail of a shuffle where the draw is a large part of many. A hundred such calls take 3.2 ms
beside the keys', a fifth of a round of CafCor's MNIST setting on an H200; compiled they take 0.2.

Imported only through `trilemma.data.batches.streams.drawn_each`, so that the package works without numba, and
does not load it for a few clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numba
import numpy as np

MANY, PART = 10_000, 50
"""Above so many, a draw of more than one in `PART` shuffles them all, as numpy does."""

Function = TypeVar("Function", bound=Callable[..., Any])


def _compiled(function: Function) -> Function:
    """Compile without the interpreter lock; keep the result on disk for the next process."""
    return cast(Function, numba.njit(nogil=True, cache=True, error_model="numpy")(function))


def choices(keys: Sequence[int], sizes: Sequence[int], size: int) -> np.ndarray:
    """Draw `size` of `sizes[k]` numbers without replacement from the stream of `keys[k]`, (k, size).

    >>> drawn = choices([7, 8], [10, 20], 4)
    >>> by_numpy = np.random.Generator(np.random.Philox(key=8)).choice(20, 4, replace=False)
    >>> drawn.shape, bool((drawn[1] == by_numpy).all())
    ((2, 4), True)
    """
    out = np.empty((len(keys), size), np.int64)
    _choose(np.array(keys, np.uint64), np.array(sizes, np.int64), out)
    return out


@_compiled
def _choose(keys: np.ndarray, sizes: np.ndarray, out: np.ndarray) -> None:
    size = out.shape[1]
    mask = np.uint64(1)
    while mask < np.uint64(1.2 * size):
        mask = (mask << np.uint64(1)) | np.uint64(1)
    seen = np.empty(mask + np.uint64(1), np.int64)
    stream = np.empty(STREAM, np.uint64)
    for k in range(len(keys)):
        stream[:] = 0
        stream[KEY] = keys[k]
        stream[READ] = 4
        if sizes[k] > MANY and size > sizes[k] // PART:
            everything = np.arange(sizes[k])
            _shuffle(stream, everything, max(sizes[k] - size, 1))
            out[k] = everything[sizes[k] - size :]
        else:
            _floyd(stream, sizes[k], seen, np.int64(mask), out[k])
            _shuffle(stream, out[k], 1)


@_compiled
def _floyd(stream: np.ndarray, many: int, seen: np.ndarray, mask: Any, out: np.ndarray) -> None:
    """Draw out of `many`; `seen` is a table of what was drawn, by its last bits."""
    seen[:] = -1
    first = many - len(out)
    for j in range(first, many):
        drawn = _below(stream, j)
        place = drawn & mask
        while seen[place] != -1 and seen[place] != drawn:
            place = (place + 1) & mask
        if seen[place] == drawn:  # so j, which nothing before could be, takes its place
            drawn, place = j, j & mask
            while seen[place] != -1:
                place = (place + 1) & mask
        seen[place] = out[j - first] = drawn


@_compiled
def _shuffle(stream: np.ndarray, values: np.ndarray, first: int) -> None:
    """Shuffle from the end down to `first`."""
    for i in range(len(values) - 1, first - 1, -1):
        j = _below(stream, i)
        values[i], values[j] = values[j], values[i]


@_compiled
def _below(stream: np.ndarray, most: int) -> Any:
    """Draw from 0 … `most` < 2³² − 1, without bias (Lemire)."""
    if most == 0:
        return 0
    count = np.uint64(most) + np.uint64(1)
    product = _next_half(stream) * count
    if (product & LOW) < count:
        least = (LOW - np.uint64(most)) % count
        while (product & LOW) < least:
            product = _next_half(stream) * count
    return np.int64(product >> HALF)


@_compiled
def _next_half(stream: np.ndarray) -> Any:
    """Return the next 32 bits: the lower half of a number first, then its upper one."""
    if stream[HAS_HALF]:
        stream[HAS_HALF] = 0
        return stream[KEPT_HALF]
    if stream[READ] == 4:
        stream[COUNTER] += np.uint64(1)
        _philox(stream)
        stream[READ] = 0
    number = stream[DRAWN + np.int64(stream[READ])]
    stream[READ] += np.uint64(1)
    stream[HAS_HALF], stream[KEPT_HALF] = 1, number >> HALF
    return number & LOW


@_compiled
def _philox(stream: np.ndarray) -> None:
    """Draw four numbers for the counter by ten rounds of Philox 4×64."""
    a, b, c, d = stream[COUNTER], np.uint64(0), np.uint64(0), np.uint64(0)
    key, other = stream[KEY], np.uint64(0)
    for _ in range(10):
        high, low = _high(FIRST, a), FIRST * a
        far, near = _high(SECOND, c), SECOND * c
        a, b, c, d = far ^ b ^ key, near, high ^ d ^ other, low
        key += WEYL
        other += WEYL_2
    stream[DRAWN], stream[DRAWN + 1], stream[DRAWN + 2], stream[DRAWN + 3] = a, b, c, d


@_compiled
def _high(a: np.uint64, b: np.uint64) -> np.uint64:
    """Return the upper 64 bits of a product."""
    low, mixed = (a & LOW) * (b & LOW), (a >> HALF) * (b & LOW)
    middle = (low >> HALF) + (mixed & LOW) + (a & LOW) * (b >> HALF)
    return (a >> HALF) * (b >> HALF) + (mixed >> HALF) + (middle >> HALF)


STREAM = 9
"""A stream's state: its key, its counter, four numbers drawn and how many were read, half a number kept."""
KEY, COUNTER, DRAWN, READ, HAS_HALF, KEPT_HALF = 0, 1, 2, 6, 7, 8
HALF, LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
FIRST, SECOND = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
WEYL, WEYL_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
"""The constants of Philox 4×64."""

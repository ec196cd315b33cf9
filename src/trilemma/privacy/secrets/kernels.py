"""The Box-Muller transform of `trilemma.privacy.secrets.streams`, compiled by numba: the same bits, sooner.

There numpy does one operation after the other on a whole block; here a few numbers go through all of them
while they are in registers. It is the same list of IEEE-754 additions, multiplications, divisions and roots
in the same order. No fast-math flag is set, and without one LLVM neither reorders nor fuses any of them, on
any processor. `streams` compares the two when a process draws for the first time, all the same.

Imported only through `streams`, so that the package works without numba. The signature stands here, so that
importing compiles, or reads what was compiled before: who forks workers imports this first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from trilemma.privacy.secrets.polynomials import (
    ARTANH,
    COSINE,
    HALF_ROOT_2,
    LOG_2,
    QUARTER,
    ROOT_2,
    SINE,
    WHOLE,
)

Function = TypeVar("Function", bound=Callable[..., Any])

CHUNK = 512
"""Pairs that are worked on together: what is between two loops stays in the level-1 cache."""

_ONE, _MANTISSA = np.uint64(0x3FF0000000000000), np.uint64(0x000FFFFFFFFFFFFF)
_52, _12, _FIRST, _SECOND = (np.uint64(number) for number in (52, 12, 1, 2))
_SIGNATURE = "void(uint64[::1], uint64[::1], float64, float64, float64[::1], float64[::1])"


def _compiled(function: Function) -> Function:
    """Compile without the interpreter lock; keep the result on disk for the next process."""
    compiler = numba.njit(_SIGNATURE, nogil=True, cache=True, error_model="numpy")
    return cast(Function, compiler(function))


@_compiled
def add_pairs(radii: Any, words: Any, scale: float, sign: float, cosines: Any, sines: Any) -> None:
    """Add `sign` times the rounded cosines and sines of the pairs of words (v, w) to what is there.

    There are as many cosines as pairs, and as many sines or one less; no v needs a further word.
    """
    exponents = np.empty(CHUNK, np.int32)
    mantissas, angles = np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.uint64)
    fractions, turns = mantissas.view(np.float64), angles.view(np.float64)
    first, second = np.empty(CHUNK), np.empty(CHUNK)
    uniform = np.empty(CHUNK)
    bits = uniform.view(np.uint64)
    for start in range(0, len(radii), CHUNK):
        n = min(CHUNK, len(radii) - start)
        for i in range(n):
            uniform[i] = (np.float64(radii[start + i]) + 0.5) * 2.0**-64
        for i in range(n):
            exponents[i] = np.int32(bits[i] >> _52)
            mantissas[i] = (bits[i] & _MANTISSA) | _ONE
            angles[i] = (words[start + i] >> _12) | _ONE
        for i in range(n):
            m = fractions[i]
            s = (m - ROOT_2) / (m + ROOT_2)
            s2 = s * s
            log = ARTANH[0]
            for k in range(1, len(ARTANH)):
                log = log * s2 + ARTANH[k]
            log = log * s + (np.float64(exponents[i]) - 1022.5) * LOG_2
            log = log * -2.0
            radius = math.sqrt(log if log > 0.0 else 0.0) * scale
            phi = (turns[i] - 1.5) * QUARTER
            square = phi * phi
            sine = SINE[0]
            for k in range(1, len(SINE)):
                sine = sine * square + SINE[k]
            sine = sine * phi
            cosine = COSINE[0]
            for k in range(1, len(COSINE)):
                cosine = cosine * square + COSINE[k]
            first[i] = (cosine - sine) * HALF_ROOT_2 * radius
            second[i] = (sine + cosine) * HALF_ROOT_2 * radius
        for i in range(n):
            # Rounding to the nearest, halves to even, is the same on both sides of zero.
            flip = sign if words[start + i] & _SECOND == 0 else -sign
            cosines[start + i] += flip * ((first[i] + WHOLE) - WHOLE)
        for i in range(min(n, len(sines) - start)):
            flip = sign if words[start + i] & _FIRST == 0 else -sign
            sines[start + i] += flip * ((second[i] + WHOLE) - WHOLE)

"""From a 32-byte key to Gaussian noise in whole steps of a grid, the same integers on every machine.

A stream is ChaCha20 (RFC 8439) under a key derived by HKDF-SHA256 (RFC 5869) from a pair's key and the
round. Its bytes become normal numbers by the Box-Muller transform, two 64-bit words v, w for two numbers:

    u = (v + ½) / 2⁶⁴                               radius r = √(−2 log u)
    θ = (top 52 bits of w) / 2⁵² · π/2              angle in a quadrant; bits 0 and 1 of w choose which
    ± r cos θ · s  and  ± r sin θ · s,              each rounded to the nearest integer,

s the standard deviation in steps. Where v < 2⁴⁰, once in 2²⁴ words, a further word e makes the tail as fine
as the middle: u = (v + e/2⁶⁴ + 2⁻⁶⁵) / 2⁶⁴. Words are little-endian, in blocks of 8192 first words, then 8192
second words, then the further ones in order; a block gives its 8192 cosines, then its 8192 sines. The last
block is as short as it can be. These choices are part of the protocol.

Both ends of a pair must get the same integers, whatever their processor, so logarithm, sine and cosine are
polynomials in IEEE-754 double additions and multiplications here, which every machine rounds alike: numpy
applies them one by one and never fuses them, whereas its own `log`, `sin` and `cos` differ between
processors. Where numba is installed `kernels` does the same operations in less than half the time; that they
give the same bits is checked before a process uses it. Sums of the integers are exact in any order: what the
smaller index of a pair adds the larger subtracts.

How exact? Numbers reach 13.3 standard deviations, a radius errs by less than 2⁻⁴⁸ (for r < ½: by 2⁻⁵¹/r),
sine and cosine by less than 2⁻⁵¹. What that costs in privacy is `trilemma.privacy.noise.grid_price`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

Doubles = NDArray[np.float64]
Words = NDArray[np.uint64]

_PAIRS = 8192  # the working set of a block stays in a core's second-level cache
BLOCK = 2 * _PAIRS
"""Numbers of a block: a stream is read in whole blocks, but for its last."""
FURTHEST = 13.4
"""Standard deviations that no number exceeds: √(−2 log 2⁻¹²⁹)."""
FEW = 4 * BLOCK
"""Up to so many numbers numpy does, and numba need not be loaded."""
_ZEROS = bytes(8 * BLOCK)
_ONE = np.uint64(0x3FF0000000000000)  # the bits of 1.0
_MANTISSA = np.uint64(0x000FFFFFFFFFFFFF)
_SIGN = np.uint64(0x8000000000000000)
_SMALL = np.uint64(2**40)


def derive(key: bytes, salt: bytes, info: bytes) -> bytes:
    """Return 32 bytes by HKDF-SHA256.

    >>> derive(b"secret", b"salt", b"round 1") == derive(b"secret", b"salt", b"round 2")
    False
    """
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(key)


class ChaChaStream:
    """The key stream of ChaCha20 under `key`, with nonce and counter zero: a key is used for one stream only.

    >>> buffer = bytearray(64)
    >>> ChaChaStream(bytes(32)).fill(memoryview(buffer))
    >>> buffer[:4].hex()
    '76b8e0ad'
    """

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        self._cipher: Any = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()

    def fill(self, out: memoryview) -> None:
        """Write the next bytes of the stream to `out`."""
        zeros = _ZEROS if len(out) <= len(_ZEROS) else bytes(len(out))
        self._cipher.update_into(memoryview(zeros)[: len(out)], out)


Fill = Callable[[memoryview], None]
"""Writes the next bytes of a stream to a buffer, as `ChaChaStream.fill` and `system_bytes` do."""


@dataclass(frozen=True)
class Gaussians:
    """A stream of normal numbers, rounded to integers, of standard deviation `scale`, times `sign`."""

    fill: Fill
    scale: float
    sign: float = 1.0


def add_streams(streams: Sequence[Gaussians], total: Doubles) -> None:
    """Add the next numbers of each stream to `total`, in place: whole blocks, but for a stream's last.

    Numbers of up to 2⁵¹ are rounded to integers, and doubles hold sums exactly up to 2⁵³. The streams take
    turns on every block, which stays in the cache.
    """
    transform = _BoxMuller()
    compiled = None if len(streams) * len(total) <= FEW else _checked_kernels()
    for start in range(0, len(total), BLOCK):
        part = total[start : start + BLOCK]
        pairs = (len(part) + 1) // 2
        for stream in streams:
            transform.add(stream, part[:pairs], part[pairs:], compiled)


def add_gaussians(fill: Fill, total: Doubles, scale: float, sign: float = 1.0) -> None:
    """Add all of a stream to `total`, in place.

    >>> total = np.zeros(5)
    >>> add_gaussians(ChaChaStream(bytes(32)).fill, total, 1024.0)
    >>> bool((total == np.round(total)).all()), bool(total.any())
    (True, True)
    >>> add_gaussians(ChaChaStream(bytes(32)).fill, total, 1024.0, sign=-1.0)
    >>> total.tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0]
    """
    add_streams([Gaussians(fill, scale, sign)], total)


def system_bytes(out: memoryview) -> None:
    """Write bytes of the operating system's generator to `out`.

    >>> buffer = bytearray(32)
    >>> system_bytes(memoryview(buffer))
    >>> buffer != bytes(32)
    True
    """
    import os

    out[:] = os.urandom(len(out))


class _BoxMuller:
    """The transform with its buffers; every step is one exactly rounded operation per number."""

    def __init__(self) -> None:
        self._words = np.empty(2 * _PAIRS, np.uint64)
        self._bits = np.empty((2, _PAIRS), np.uint64)
        self._floats = np.empty((5, _PAIRS))

    def add(self, stream: Gaussians, first: Doubles, second: Doubles, compiled: ModuleType | None) -> None:
        """Add the next numbers of a stream: cosines to `first`, sines to `second`, which may be one less."""
        pairs = len(first)
        words = self._words[: 2 * pairs]
        stream.fill(words.data.cast("B"))
        if not _LITTLE:
            words.byteswap(inplace=True)
        if compiled is not None and words[:pairs].min() >= _SMALL:
            compiled.add_pairs(words[:pairs], words[pairs:], stream.scale, stream.sign, first, second)
            return
        radius = self._radius(self._uniform(words[:pairs], stream.fill))
        radius *= stream.scale
        sine, cosine = self._quadrant(words[pairs:])
        for numbers, target in ((cosine, first), (sine, second)):
            numbers *= radius
            numbers += WHOLE
            numbers -= WHOLE
            numbers *= stream.sign
            target += numbers[: len(target)]

    def _uniform(self, words: Words, fill: Fill) -> Doubles:
        """Return u = (v + ½)/2⁶⁴, and finer where v < 2⁴⁰."""
        u = self._floats[0, : len(words)]
        np.add(words, 0.5, out=u)
        small = np.flatnonzero(words < _SMALL) if words.min() < _SMALL else ()
        if len(small):
            further = np.empty(len(small), np.uint64)
            fill(further.data.cast("B"))
            if not _LITTLE:
                further.byteswap(inplace=True)
            u[small] = words[small] + (further * 2.0**-64 + 2.0**-65)
        u *= 2.0**-64  # at most 1, where the logarithm is 0
        return u

    def _radius(self, u: Doubles) -> Doubles:
        """Return √(−2 log u)."""
        n = len(u)
        bits, exponent = self._bits[0, :n], self._bits[1, :n]
        s, s2, log = (self._floats[k, :n] for k in range(1, 4))
        np.right_shift(u.view(np.uint64), np.uint64(52), out=exponent)
        np.bitwise_and(u.view(np.uint64), _MANTISSA, out=bits)
        np.bitwise_or(bits, _ONE, out=bits)
        m = bits.view(np.float64)
        np.subtract(m, ROOT_2, out=s)
        np.add(m, ROOT_2, out=s2)
        np.divide(s, s2, out=s)
        np.multiply(s, s, out=s2)
        _horner(ARTANH, s2, log)
        log *= s
        # log u = artanh part + (e + ½) log 2 with e = exponent − 1023; e + ½ is exact.
        np.subtract(exponent.view(np.int64), 1022.5, out=s)
        s *= LOG_2
        log += s
        log *= -2.0
        np.maximum(log, 0.0, out=log)  # u within 1e-16 of 1 may round to the other side
        return np.sqrt(log, out=log)

    def _quadrant(self, words: Words) -> tuple[Doubles, Doubles]:
        """Return ±sin θ and ±cos θ for θ uniform in [0, π/2], through φ = θ − π/4."""
        n = len(words)
        bits = self._bits[0, :n]
        phi, square, cosine, _, sine = (self._floats[k, :n] for k in range(5))
        np.right_shift(words, np.uint64(12), out=bits)
        np.bitwise_or(bits, _ONE, out=bits)
        np.subtract(bits.view(np.float64), 1.5, out=phi)
        phi *= QUARTER
        np.multiply(phi, phi, out=square)
        _horner(SINE, square, sine)
        sine *= phi
        _horner(COSINE, square, cosine)
        # sin(φ + π/4) = (sin φ + cos φ)/√2 and cos(φ + π/4) = (cos φ − sin φ)/√2
        np.add(sine, cosine, out=phi)
        np.subtract(cosine, sine, out=cosine)
        phi *= HALF_ROOT_2
        cosine *= HALF_ROOT_2
        for shift, numbers in ((63, phi), (62, cosine)):
            np.left_shift(words, np.uint64(shift), out=bits)
            np.bitwise_and(bits, _SIGN, out=bits)
            np.bitwise_xor(numbers.view(np.uint64), bits, out=numbers.view(np.uint64))
        return phi, cosine


def _horner(coefficients: Sequence[float], x: Doubles, out: Doubles) -> None:
    out[:] = coefficients[0]
    for coefficient in coefficients[1:]:
        out *= x
        out += coefficient


@functools.cache
def _checked_kernels() -> ModuleType | None:
    """Return the compiled transform; None where there is no compiler, or it does not give the same bits.

    Nor where there is no place to keep what it compiles, which numba insists on: a round is paid for by now.
    """
    try:
        kernels = importlib.import_module("trilemma.privacy.secrets.kernels")
    except (ImportError, RuntimeError, OSError):
        return None
    one, other, transform = np.zeros(BLOCK), np.zeros(BLOCK), _BoxMuller()
    for way, total in ((kernels, one), (None, other)):
        # So fine that an error in a last bit moves some of so many numbers, and none beyond 2⁵¹.
        stream = Gaussians(ChaChaStream(bytes(32)).fill, 2.0**46, sign=-1.0)
        transform.add(stream, total[:_PAIRS], total[_PAIRS:], way)
    return kernels if np.array_equal(one, other) else None


_LITTLE = np.dtype(np.uint64).newbyteorder("=").str.startswith("<")

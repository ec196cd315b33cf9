"""Noise of a real node, in whole steps of a grid: pairwise from shared secrets, its own from the system.

Client i adds Σ_{j>i} k_ij − Σ_{j<i} k_ij over its partners j, with k_ij = k_ji the integers of the pair's
stream in this round: the smaller index adds, the larger subtracts, the very same ones. Sums of integers do
not depend on their order, so several threads, each with some of the streams, give the very same noise; and
it comes in pieces, so that a message may be longer than what fits into memory twice.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trilemma.base.errors import PrivacyError, UserError
from trilemma.privacy.noise.grid import in_steps, step_for
from trilemma.privacy.secrets.streams import (
    BLOCK,
    FURTHEST,
    ChaChaStream,
    Doubles,
    Gaussians,
    add_streams,
    derive,
    system_bytes,
)
from trilemma.privacy.types import NoiseLaw

_NO_SALT = b""

PIECE = 16 * BLOCK
"""Numbers that are drawn before anybody waits for anybody: 2 MB."""


def pair_stream(key: bytes, round_: int, dim: int) -> ChaChaStream:
    """Return the byte stream of a pair in a round. Round and size are bound in: no two streams overlap.

    >>> from trilemma.privacy.secrets.streams import add_gaussians
    >>> total = np.zeros(3)
    >>> add_gaussians(pair_stream(bytes(32), round_=1, dim=3).fill, total, 1024.0)
    >>> [int(x) for x in total]
    [-244, 602, 779]
    """
    return ChaChaStream(derive(key, _NO_SALT, b"trilemma noise v2" + struct.pack(">QQ", round_, dim)))


def _own_stream(seed: bytes, round_: int, dim: int) -> ChaChaStream:
    return ChaChaStream(derive(seed, _NO_SALT, b"trilemma own noise v2" + struct.pack(">QQ", round_, dim)))


def _deviations(law: NoiseLaw, step: float, partners: int) -> tuple[float, float]:
    """Return the standard deviations, in steps, of a pair's stream and of the client's own; 0 without one.

    Refused is what doubles do not hold exactly: up to 2⁵¹ a number is rounded to an integer, up to 2⁵³ every
    integer is one of them. Beyond, two ends of a pair would not get the same.
    """
    paired, own = (in_steps(sigma, step) if sigma > 0 else 0.0 for sigma in (law.sigma_cor, law.sigma_ind))
    if FURTHEST * max(paired, own) > 2.0**51 or FURTHEST * (partners * paired + own) > 2.0**53:
        raise PrivacyError(
            f"the noise spans more steps than sums are exact for: sigma_ind = {law.sigma_ind:g} and "
            f"sigma_cor = {law.sigma_cor:g} are too far apart"
        )
    return paired, own


def _summed(streams: Sequence[Gaussians], dim: int, threads: int) -> Iterator[Doubles]:
    """Yield the sum of the streams, piece by piece; each thread adds up some of them."""
    groups = [group for place in range(threads) if (group := streams[place::threads])]
    with ExitStack() as stack:
        run = map if len(groups) < 2 else stack.enter_context(ThreadPoolExecutor(len(groups))).map
        for start in range(0, dim, PIECE):
            length = min(PIECE, dim - start)

            def add(group: Sequence[Gaussians], length: int = length) -> Doubles:
                part = np.zeros(length)
                add_streams(group, part)
                return part

            parts = list(run(add, groups))
            for part in parts[1:]:
                parts[0] += part
            yield parts[0]


@dataclass
class SecretNoise:
    """The noise of client `index`, which shares `pairs[j]` with each partner j.

    A round's noise is given out once. Drawn again for another gradient, the difference of the two messages
    would be free of pairwise noise; a server that asks for a round twice is refused. `own`, a seed of 32
    bytes, replaces the operating system's generator where a run has to be reproduced, and only there.

    >>> key, law, cpu = bytes(32), NoiseLaw(sigma_cor=0.5), torch.device("cpu")
    >>> first = SecretNoise(0, {1: key}).draw(law, (0,), 4, round_=1, device=cpu)
    >>> second = SecretNoise(1, {0: key}).draw(law, (1,), 4, round_=1, device=cpu)
    >>> bool(first.any()), torch.equal(first, -second)
    (True, True)
    """

    index: int
    pairs: Mapping[int, bytes] = field(repr=False)
    own: bytes | None = field(default=None, repr=False)
    threads: int | None = None
    """How many threads draw; None: as many as torch has."""
    scale: float = 1.0
    """What its message counts in the sum in which pairs' noise cancels (`grid.Grid.scale`)."""
    _last_round: int = field(default=-1, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.index in self.pairs:
            raise UserError(f"client {self.index} shares no secret with itself")
        for partner, key in self.pairs.items():
            if len(key) != 32:
                raise UserError(f"a pair key has 32 bytes; the one with client {partner} has {len(key)}")

    def steps(
        self, law: NoiseLaw, step: float, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> Tensor:
        """Return this client's noise (1, dim) in round `round_`, in steps, int64; `ids` is (index,)."""
        total, start = torch.zeros(1, dim, dtype=torch.int64), 0
        for piece in self.pieces(law, step, ids, dim, round_):
            total[0, start : start + len(piece)] = torch.from_numpy(piece)
            start += len(piece)
        return total.to(device)

    def draw(
        self, law: NoiseLaw, ids: tuple[int, ...], dim: int, round_: int, device: torch.device
    ) -> Tensor:
        """Return the same in numbers, float32: on the grid that the law itself asks for."""
        step = 1.0 if law.silent else step_for(law)
        return (self.steps(law, step, ids, dim, round_, device).double() * (step / self.scale)).float()

    def pieces(
        self, law: NoiseLaw, step: float, ids: tuple[int, ...], dim: int, round_: int
    ) -> Iterator[Doubles]:
        """Return the same in pieces, one after the other: whole numbers, as doubles.

        What is wrong with the question is said at once, not when the first piece is taken.
        """
        if ids != (self.index,):
            raise UserError(f"this node has the secrets of client {self.index} only, not of {ids}")
        if law.sigma_cor > 0 and not self.pairs:
            raise PrivacyError("sigma_cor > 0 needs secrets shared with others: agree on pair keys first")
        if law.silent:
            return iter([])
        if round_ <= self._last_round:
            raise PrivacyError(
                f"round {round_} is over (the last was {self._last_round}): its noise is given out once only"
            )
        scaled = NoiseLaw(law.sigma_ind * self.scale, law.sigma_cor)
        paired, own = _deviations(scaled, step, len(self.pairs))
        self._last_round = round_
        streams = []
        if law.sigma_cor > 0:
            for partner, key in self.pairs.items():
                sign = 1.0 if self.index < partner else -1.0
                streams.append(Gaussians(pair_stream(key, round_, dim).fill, paired, sign))
        if law.sigma_ind > 0:
            fill = system_bytes if self.own is None else _own_stream(self.own, round_, dim).fill
            streams.append(Gaussians(fill, own))
        return _summed(streams, dim, self.threads or torch.get_num_threads())

"""Explicit randomness: every draw in Trilemma comes from a `Key`.

A key is a seed and a path, for instance (seed 1, "client", 3, "round", 7, "batch"). Equal keys give equal
draws, different keys give independent ones, and nothing reads or changes a global generator. Clients stepped
one by one, all at once, or in another process therefore draw the same numbers.

Keys are for simulation, initialisation and sampling. Noise that protects a real release comes from
`trilemma.privacy` secrets, never from here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Key:
    """A point in the tree of random streams.

    >>> round_key = Key(seed=1).fold("round", 7)
    >>> a = round_key.fold("client", 3, "batch")
    >>> b = round_key.fold("client", 4, "batch")
    >>> a.integer() == a.integer(), a.integer() == b.integer()
    (True, False)
    >>> int(a.numpy().integers(10)) == int(a.numpy().integers(10))
    True
    """

    seed: int
    path: tuple[str | int, ...] = ()

    def fold(self, *parts: str | int) -> Key:
        """Return the child key reached by `parts`."""
        return Key(self.seed, self.path + parts)

    def integer(self) -> int:
        """Return this key's 63-bit seed: a hash of seed and path, equal on every machine."""
        return _number(self._hashed())

    def integers(self, name: str, numbers: Iterable[int]) -> list[int]:
        """Return fold(name, i).integer() for many numbers i; what these share is hashed once.

        >>> Key(1).integers("client", [3, 4]) == [Key(1).fold("client", i).integer() for i in (3, 4)]
        True
        """
        begun, found = self.fold(name)._hashed(), []
        for number in numbers:
            one = begun.copy()
            one.update(f"\x1f{type(number).__name__}:{number}".encode())
            found.append(_number(one))
        return found

    def _hashed(self) -> hashlib.blake2b:
        # The type is part of the encoding, so fold("1") and fold(1) differ, as do ("ab",) and ("a", "b").
        text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (self.seed, *self.path))
        return hashlib.blake2b(text.encode(), digest_size=8)

    def numpy(self) -> np.random.Generator:
        """Return a fresh numpy generator for this key."""
        return np.random.Generator(np.random.Philox(self.integer()))

    def torch(self, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a fresh torch generator for this key on `device`."""
        import torch  # only here: whoever reads a ledger waits for none

        return torch.Generator(device=device).manual_seed(self.integer())


def _number(hashed: hashlib.blake2b) -> int:
    return int.from_bytes(hashed.digest(), "big") >> 1

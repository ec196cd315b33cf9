"""Dropout from keys: what is dropped depends on the client's key, the example's number, and nothing else.

Every example has a seed of its own, and every draw in its forward pass a number; a mask is a hash of seed,
draw and position. Examples one by one, a client at a time, or all clients at once therefore drop the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trilemma.base.errors import UserError
from trilemma.base.keys import Key

_GOLDEN = -7046029254386353131  # 2⁶⁴/φ, as a signed integer


@dataclass
class Draws:
    """The draws of one forward pass.

    `seeds` is () for one example, (b,) for a batch whose examples lie on the first or second axis of what is
    dropped; None: the module may not draw. `off`: nothing is dropped.
    """

    seeds: Tensor | None
    off: bool = False
    count: int = field(default=0)

    def kept(self, shape: Sequence[int], rate: float, like: Tensor) -> Tensor:
        """Return a mask of `shape`: 0 with probability `rate`, else 1/(1 − rate).

        Of a client's batch it is one after the other on the first axis, or on the second.
        """
        examples = len(self.seeds) if self.seeds is not None and self.seeds.dim() else 1
        shape = tuple(shape)
        if examples > 1 and shape[0] != examples and len(shape) > 1 and shape[1] == examples:
            # Time first: as if every example came alone, (time, 1, …), each beside the other.
            mask = self.each((shape[0], 1, *shape[2:]), rate, like)
            return mask.movedim(0, 1).reshape(shape) if mask.dim() else mask
        if shape[0] % examples:
            raise UserError(
                f"dropout on a tensor {shape}: neither of its first axes holds the {examples} examples of "
                "the batch, so it is unknown which of them each value belongs to"
            )
        mask = self.each((shape[0] // examples, *shape[1:]), rate, like)
        return mask.reshape(shape) if mask.dim() else mask

    def each(self, shape: Sequence[int], rate: float, like: Tensor) -> Tensor:
        """Return the masks (n, *shape) of examples whose values have this shape; one of them: (*shape)."""
        if self.off:
            return like.new_ones(())
        if self.seeds is None:
            raise UserError(
                "this module draws random numbers (dropout): give models.gradients keys, one per client"
            )
        self.count += 1
        if rate >= 1.0:
            return like.new_zeros(())
        seeds = _mix64(self.seeds + _wrapped(self.count * _GOLDEN)).to(torch.int32)
        return self._mask(seeds, tuple(shape), rate, like)

    def _mask(self, seeds: Tensor, own: tuple[int, ...], rate: float, like: Tensor) -> Tensor:
        """Return the masks (n, *own) of examples whose values have the shape `own`; of one: (*own)."""
        positions = _mix32(torch.arange(torch.Size(own).numel(), dtype=torch.int32, device=like.device))
        bits = _mix32(positions ^ (seeds[:, None] if seeds.dim() else seeds)) & 0x7FFFFFFF
        keep = bits >= int(rate * 2**31)
        return keep.reshape(*seeds.shape, *own).to(like.dtype) / (1.0 - rate)


def seeds_of(keys: Sequence[Key], first: int, size: int, device: torch.device) -> Tensor:
    """Return the seeds (k, b) of examples first, …, first + size − 1 of every client.

    >>> seeds = seeds_of([Key(1), Key(2)], 0, 4, torch.device("cpu"))
    >>> torch.equal(seeds[:, 2:], seeds_of([Key(1), Key(2)], 2, 2, torch.device("cpu")))
    True
    """
    clients = torch.tensor([key.fold("dropout").integer() for key in keys], dtype=torch.int64, device=device)
    numbers = torch.arange(first, first + size, dtype=torch.int64, device=device)
    return _mix64(clients[:, None] ^ _mix64(numbers + 1))


def _wrapped(number: int) -> int:
    """Return the number modulo 2⁶⁴, as a signed integer."""
    return (number + 2**63) % 2**64 - 2**63


def _mix64(x: Tensor) -> Tensor:
    """Scramble 64 bits (Steele et al. 2014, "Fast splittable pseudorandom number generators")."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & (2**33 - 1))


def _mix32(x: Tensor) -> Tensor:
    """Scramble 32 bits (Wellons 2018, "Prospecting for hash functions": lowbias32)."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -2073254261  # 0x846CA68B
    return x ^ ((x >> 16) & 0xFFFF)

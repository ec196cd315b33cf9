"""Memory that is used again as soon as nobody looks at what is in it.

A server is a pure function: sums after a round are other numbers than those before it, which a checkpoint, a
rehearsal or a test may still hold. But nearly always nobody does, and to ask the system for n × d fresh
numbers costs several times as much as to fill them. So the memory of sums that are gone is kept for the next
ones: two pieces take turns, as if sums were added to where they lie. On a GPU torch does this by itself.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor


class Spare:
    """At most one piece of memory that is not in use; threads may share it, for it is taken in one step.

    >>> spare, sums = Spare(), torch.zeros(2, 3)
    >>> first = spare.like(sums)
    >>> place, second = first.data_ptr(), spare.like(sums)
    >>> second.data_ptr() == place
    False
    >>> row = first[1]
    >>> del first
    >>> spare.like(sums).data_ptr() == place  # a row of it is still looked at
    False
    >>> del row
    >>> spare.like(sums).data_ptr() == place
    True
    """

    def __init__(self) -> None:
        self._free: deque[Tensor] = deque(maxlen=1)

    def like(self, tensor: Tensor) -> Tensor:
        """Return room for another tensor like this; it comes back when nothing that lies in it is left."""
        if tensor.device.type != "cpu":
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        try:
            free = self._free.pop()
        except IndexError:
            free = None
        if free is None or free.shape != tensor.shape or free.dtype != tensor.dtype:
            free = torch.empty(tensor.shape, dtype=tensor.dtype)
        array = free.numpy()
        weakref.finalize(array, self._free.append, free).atexit = False
        return torch.from_numpy(array)  # holds the array for as long as anything shares its memory

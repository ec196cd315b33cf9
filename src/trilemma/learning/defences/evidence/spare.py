"""Memory that is reused as soon as no tensor refers to it any more.

A server is a pure function, so it must not overwrite the sums of the last round: a checkpoint, a rehearsal or
a test may still hold them. Nearly always nothing does, and allocating n × d fresh numbers costs several times
as much as filling them. So the memory of sums that are no longer referenced is kept for the next ones, and
two buffers alternate. On a GPU torch's allocator does the same.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor


class Spare:
    """Holds at most one unused buffer. Threads may share it: a buffer is taken in one atomic step.

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
        """Return an uninitialised tensor like this one; its memory comes back when nothing refers to it."""
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
        return torch.from_numpy(array)  # keeps the array alive while anything shares its memory

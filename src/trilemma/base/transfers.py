"""Copies between a GPU and its host that nobody waits for.

A plain copy from the host waits until the GPU has done all that it was asked before, and so does one to the
host. Both go through pinned memory here: the first is queued like any other work, the second is waited for
when its numbers are read, and only until they have arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_the_host(found: Tensor) -> Callable[[], Tensor]:
    """Start to copy a tensor to the host; call what is returned to wait for it, and no longer.

    >>> to_the_host(torch.ones(2))()
    tensor([1., 1.])
    """
    if not found.is_cuda:
        return lambda: found
    there = torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(found.device))

    def waited() -> Tensor:
        copied.synchronize()
        return there

    return waited


def to_the_device(numbers: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """Return numbers on a device; a GPU copies them when it gets there.

    >>> import numpy as np
    >>> to_the_device(np.arange(2), torch.device("cpu"))
    tensor([0, 1])
    """
    here = torch.as_tensor(numbers)
    if device.type != "cuda" or here.is_cuda:
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)

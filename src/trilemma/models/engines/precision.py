"""How finely products are computed: torch's switches, put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from trilemma.models.layers.convolution import reproducible


@contextmanager
def products(*, tf32: bool) -> Iterator[None]:
    """Let a GPU round the factors of products to TF32, or not; on a CPU nothing changes.

    >>> with products(tf32=True):
    ...     torch.get_float32_matmul_precision()
    'high'
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def exactly() -> Iterator[None]:
    """Compute in full float32 what is to be compared: rounding to TF32 would pass for a difference."""
    with products(tf32=False), reproducible():
        yield


def in_full(device: torch.device) -> AbstractContextManager[None]:
    """Switch off autocast that a user's code left on: no bound on a length counts with half precision."""
    on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()

"""What a broadcast must look like before a client computes with it: shapes, types, and numbers in bounds."""

from __future__ import annotations

import torch

from trilemma.federation.protocol.admission import TOGETHER
from trilemma.federation.protocol.reasons import Reason, Refused
from trilemma.learning.protocol import State

Described = dict[str, tuple[torch.Size, torch.dtype]]
"""What tensors look like."""


def described(tensors: State) -> Described:
    """Say what tensors look like.

    >>> described({"params": torch.zeros(3)})
    {'params': (torch.Size([3]), torch.float32)}
    """
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def length_of(expected: Described) -> int:
    """Return how many bytes the numbers of such tensors take.

    >>> length_of(described({"params": torch.zeros(3)}))
    12
    """
    return sum(dtype.itemsize * shape.numel() for shape, dtype in expected.values())


def check_broadcast(broadcast: State, expected: Described, bound: float) -> None:
    """Refuse a broadcast that does not look as expected, is not finite, or exceeds `bound`."""
    if described(broadcast) != expected:
        raise Refused(Reason.BROADCAST, "it does not have the shape of this configuration's")
    parts = [part for tensor in broadcast.values() for part in torch.split(tensor.reshape(-1), TOGETHER)]
    if not all(bool(torch.isfinite(part).all()) for part in parts):
        raise Refused(Reason.BROADCAST, "it is not finite")
    if any(part.numel() and float(part.abs().max()) > bound for part in parts):
        raise Refused(Reason.BROADCAST, f"it exceeds [privacy] broadcast_bound = {bound:g}")

"""Secrets of a real federation: identities, agreement on pairwise keys, and noise from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trilemma.base.on_demand import on_demand
from trilemma.privacy.secrets.agreement import Handshake, Offer, run_digest
from trilemma.privacy.secrets.identity import Identity, Roster, check_signature
from trilemma.privacy.secrets.streams import ChaChaStream, add_gaussians, derive, system_bytes

if TYPE_CHECKING:
    from trilemma.privacy.secrets.noise import SecretNoise, pair_stream

__all__ = [
    "ChaChaStream",
    "Handshake",
    "Identity",
    "Offer",
    "Roster",
    "SecretNoise",
    "add_gaussians",
    "check_signature",
    "derive",
    "pair_stream",
    "run_digest",
    "system_bytes",
]

on_demand(
    __name__,
    __all__,
    ["noise"],
)

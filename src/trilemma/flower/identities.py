"""Identity keys and the roster, as files."""

from __future__ import annotations

import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from trilemma.flower.certificates import write_secret


def new_identity(path: Path) -> bytes:
    """Make an identity key at `path`; return its public half."""
    key = Ed25519PrivateKey.generate()
    write_secret(path, key.private_bytes_raw().hex().encode())
    return key.public_key().public_bytes_raw()


def write_roster(path: Path, name: str, public_keys: list[bytes]) -> None:
    """Write everybody's public keys, by client."""
    keys = {str(i): key.hex() for i, key in enumerate(public_keys)}
    path.write_text(json.dumps({"federation": name, "clients": keys}, indent=2) + "\n")

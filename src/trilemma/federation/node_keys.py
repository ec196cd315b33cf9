"""Node keys: with what Flower tells the nodes of a federation apart (NIST P-384, in OpenSSH's format)."""

from __future__ import annotations

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from trilemma.errors import UserError


def check_node_key(public: bytes) -> ec.EllipticCurvePublicKey:
    """Return a node's public key (OpenSSH); refuse what Flower would not register.

    >>> check_node_key(new_node_key()[1]).curve.name
    'secp384r1'
    >>> check_node_key(b"ssh-rsa AAAA")
    Traceback (most recent call last):
    trilemma.errors.UserError: a node key is a P-384 key in OpenSSH's format
    """
    try:
        key = serialization.load_ssh_public_key(public)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp384r1":
        raise UserError("a node key is a P-384 key in OpenSSH's format")
    if key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) != public:
        raise UserError("a node key is written in one way, without a comment: two must not look like one")
    return key


def new_node_key() -> tuple[bytes, bytes]:
    """Make a node key pair for Flower's authentication: (private, public), both in OpenSSH format.

    >>> private, public = new_node_key()
    >>> public.split()[0]
    b'ecdsa-sha2-nistp384'
    """
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private, public

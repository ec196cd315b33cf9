"""TLS keys, and requests to certify them: what a party makes by itself before the authority knows of it."""

from __future__ import annotations

import hashlib
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from trilemma.base.errors import UserError


def new_key() -> ec.EllipticCurvePrivateKey:
    """Make a TLS key: P-256, as every certificate of a federation has one."""
    return ec.generate_private_key(ec.SECP256R1())


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as PEM, without a password: the file it goes to is its owner's."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def new_request(name: str) -> tuple[bytes, bytes]:
    """Make a TLS key and a request to certify it: (private key, signing request), both PEM.

    >>> new_request("alice")[1].startswith(b"-----BEGIN CERTIFICATE REQUEST-----")
    True
    """
    private = private_pem(new_key())
    return private, request_for(private, name)


def request_for(private: bytes, name: str) -> bytes:
    """Return a request to certify the key whose private half is given."""
    key = private_key(private)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def private_key(private: bytes) -> Any:
    """Return a private key that is written as PEM."""
    return serialization.load_pem_private_key(private, password=None)


def digest_of(key: Any) -> str:
    """Return the SHA-256 of a public key (SubjectPublicKeyInfo), as the roster has it.

    >>> len(digest_of(new_key().public_key()))
    64
    """
    plain = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(plain).hexdigest()


def digest_in(private: bytes) -> str:
    """Return the digest of the public half of a private key (PEM)."""
    return digest_of(private_key(private).public_key())


def requested_key(request: bytes) -> ec.EllipticCurvePublicKey:
    """Return the key of a signing request that its owner signed; refuse any other kind."""
    try:
        found = x509.load_pem_x509_csr(request)
        key = found.public_key()
        sound = found.is_signature_valid
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UserError(f"this is no request for a certificate: {error}") from None
    if not sound or not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise UserError("a certificate is requested for a P-256 key, and signed by it")
    return key

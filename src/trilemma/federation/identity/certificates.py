"""The certificates of a federation: one authority, one certificate for the server, one for each client.

Server and clients show each other certificates of the one authority before a byte is read. Which client shows
one is told by its public key, whose digest is on the roster that the authority signs; above that clients know
each other by Ed25519 identities, which are on it too.
Its private key is needed when somebody comes, goes, or needs a new certificate, and is best kept off-line.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from trilemma.base.errors import UserError
from trilemma.federation.identity.tls_keys import digest_of, new_key, new_request, private_pem, requested_key

VALIDITY = dt.timedelta(days=365)
# Machines of a federation disagree about the time; a certificate is valid a little before it was made.
CLOCK_SKEW = dt.timedelta(hours=1)


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


@dataclass(frozen=True)
class Issued:
    """A certificate and its private key, as PEM.

    >>> authority = new_authority("demo")
    >>> authority.certificate.startswith(b"-----BEGIN CERTIFICATE-----")
    True
    """

    certificate: bytes
    key: bytes

    @property
    def x509(self) -> x509.Certificate:
        """The parsed certificate."""
        return read_certificate(self.certificate)

    def sign(self, message: bytes) -> bytes:
        """Return the authority's signature of `message`; one whose time is over signs nothing.

        >>> authority = new_authority("demo")
        >>> check_signed(authority.certificate, b"hello", authority.sign(b"hello"), ValueError("forged"))
        >>> check_signed(authority.certificate, b"hullo", authority.sign(b"hello"), ValueError("forged"))
        Traceback (most recent call last):
        ValueError: forged
        """
        return self._signer().sign(message, ec.ECDSA(hashes.SHA256()))

    def _signer(self) -> ec.EllipticCurvePrivateKey:
        end = valid_until(self.certificate)
        if end < _now():
            raise UserError(
                f"the authority's own certificate ended on {end:%Y-%m-%d}: nobody believes what it signs; "
                "make a new federation"
            )
        signer = serialization.load_pem_private_key(self.key, password=None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        return signer


def read_certificate(pem: bytes) -> x509.Certificate:
    """Parse a certificate, or say that it is none."""
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise UserError(f"this is no certificate: {error}") from None


def valid_until(pem: bytes) -> dt.datetime:
    """Return when a certificate ends.

    >>> round((valid_until(new_authority("demo").certificate) - _now()) / VALIDITY, 1)
    10.0
    """
    return read_certificate(pem).not_valid_after_utc


def check_signed(certificate: bytes, message: bytes, signature: bytes, refusal: Exception) -> None:
    """Raise `refusal` where the owner of an authority's certificate has not signed `message`."""
    owner = read_certificate(certificate)
    try:
        key = owner.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, AssertionError, ValueError, UnsupportedAlgorithm):
        raise refusal from None


def fingerprint(pem: bytes) -> str:
    """Return what two people compare over the telephone: the SHA-256 of a certificate, in groups of four.

    >>> len(fingerprint(new_authority("demo").certificate).split())
    16
    """
    digest = read_certificate(pem).fingerprint(hashes.SHA256()).hex()
    return " ".join(digest[place : place + 4] for place in range(0, 64, 4))


def new_authority(name: str, until: dt.datetime | None = None) -> Issued:
    """Make a certificate authority for the federation `name`.

    >>> new_authority("demo").x509.subject.rfc4514_string()
    'CN=demo authority'
    """
    key = new_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} authority")])
    return Issued(_self_signed(key, subject, until), private_pem(key))


def renewed_authority(authority: Issued, until: dt.datetime | None = None) -> bytes:
    """Certify an authority once more: under its own name, for the key it has.

    Whatever either certificate vouches for, so does the other: parties may have this one or that.

    >>> before = new_authority("demo", until=_now() + dt.timedelta(days=3))
    >>> after = renewed_authority(before)
    >>> check_issued(issue_client(before, "client-3").certificate, after)
    >>> same_authority(after, before.certificate), valid_until(after) > valid_until(before.certificate)
    (True, True)
    """
    return _self_signed(authority._signer(), authority.x509.subject, until)


def same_authority(one: bytes, other: bytes) -> bool:
    """Tell whether two certificates are one authority's: of the same name and key, signed by that key."""
    first, second = read_certificate(one), read_certificate(other)
    if first.public_key() != second.public_key() or first.subject != second.subject:
        return False
    try:
        first.verify_directly_issued_by(second)
        second.verify_directly_issued_by(first)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _self_signed(
    key: ec.EllipticCurvePrivateKey, subject: x509.Name, until: dt.datetime | None = None
) -> bytes:
    now = _now()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, until or now) - CLOCK_SKEW)
        .not_valid_after(until or now + 10 * VALIDITY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


LOOPBACK = ("localhost", "127.0.0.1")
"""Names by which a server's own processes find each other."""


def issue_server(authority: Issued, hosts: tuple[str, ...], until: dt.datetime | None = None) -> Issued:
    """Issue the server's certificate for `hosts` (names or addresses) and loopback, valid until `until`.

    >>> issued = issue_server(new_authority("demo"), ("127.0.0.1", "fl.example.org"))
    >>> names = issued.x509.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    >>> names.get_values_for_type(x509.DNSName)
    ['fl.example.org', 'localhost']
    """
    names = [_alternative_name(host) for host in dict.fromkeys((*hosts, *LOOPBACK))]
    key = new_key()
    certificate = _certify(
        # Clients read `names`; a common name has room for 64 letters, a host's name for 253.
        *(authority, hosts[0][:64], ExtendedKeyUsageOID.SERVER_AUTH, key.public_key()),
        x509.SubjectAlternativeName(names),
        until,
    )
    return Issued(certificate, private_pem(key))


def issue_client(authority: Issued, name: str, until: dt.datetime | None = None) -> Issued:
    """Issue the certificate that a client shows at the server's door; the server's own does not serve there.

    >>> issued = issue_client(new_authority("demo"), "client-3")
    >>> issued.x509.subject.rfc4514_string()
    'CN=client-3'
    """
    key, request = new_request(name)
    return Issued(certify_client(authority, name, request, until), key)


def certify_client(authority: Issued, name: str, request: bytes, until: dt.datetime | None = None) -> bytes:
    """Certify the key of a client's signing request: under `name`, whatever name the request has.

    >>> certificate = certify_client(new_authority("demo"), "client-3", new_request("anything")[1])
    >>> read_certificate(certificate).subject.rfc4514_string()
    'CN=client-3'
    """
    return _certify(authority, name, ExtendedKeyUsageOID.CLIENT_AUTH, requested_key(request), None, until)


def renewed(
    authority: Issued, certificate: bytes, request: bytes | None = None, until: dt.datetime | None = None
) -> bytes:
    """Certify once more what a certificate says: for its own key, or for that of `request`.

    >>> authority = new_authority("demo")
    >>> before = issue_server(authority, ("fl.example.org",), until=_now() + dt.timedelta(days=3))
    >>> after = renewed(authority, before.certificate)
    >>> read_certificate(after).public_key() == before.x509.public_key()
    True
    >>> (valid_until(after) - valid_until(before.certificate)).days >= 361
    True
    """
    check_issued(certificate, authority.certificate)
    before, name = read_certificate(certificate), name_on(certificate)
    (purpose,) = before.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    try:
        names = before.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = None
    key = before.public_key() if request is None else requested_key(request)
    return _certify(authority, name, purpose, key, names, until)


def check_issued(certificate: bytes, authority: bytes) -> None:
    """Refuse a certificate that is not one of this authority's."""
    try:
        read_certificate(certificate).verify_directly_issued_by(read_certificate(authority))
    except (ValueError, TypeError, InvalidSignature):
        raise UserError("the certificate is not one of this authority's") from None


def check_server(certificate: bytes, authority: bytes) -> None:
    """Refuse a certificate that this authority has not issued to a server: clients have some of it, too.

    >>> authority = new_authority("demo")
    >>> check_server(issue_client(authority, "client-3").certificate, authority.certificate)
    Traceback (most recent call last):
    ...
    trilemma.base.errors.UserError: the certificate is not a server's
    """
    check_issued(certificate, authority)
    purposes = read_certificate(certificate).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    if ExtendedKeyUsageOID.SERVER_AUTH not in purposes:
        raise UserError("the certificate is not a server's")


def name_on(certificate: bytes) -> str:
    """Return whose certificate it is.

    >>> name_on(issue_client(new_authority("demo"), "client-3").certificate)
    'client-3'
    """
    return str(read_certificate(certificate).subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def _certify(
    authority: Issued,
    name: str,
    purpose: x509.ObjectIdentifier,
    key: Any,
    names: x509.SubjectAlternativeName | None,
    until: dt.datetime | None,
) -> bytes:
    signer = authority._signer()
    now = _now()
    end = min(until or now + VALIDITY, valid_until(authority.certificate))
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(authority.x509.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - CLOCK_SKEW)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if names is not None:
        builder = builder.add_extension(names, critical=False)
    return builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def key_digest(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate's public key, as the roster has it.

    >>> issued = issue_client(new_authority("demo"), "client-3")
    >>> key_digest(issued.certificate) == digest_of(new_key().public_key())
    False
    """
    return digest_of(read_certificate(certificate).public_key())


def belongs(certificate: bytes, private: bytes) -> bool:
    """Tell whether a certificate is about this private key.

    >>> one, other = (issue_client(new_authority("demo"), "client-3") for _ in range(2))
    >>> belongs(one.certificate, one.key), belongs(one.certificate, other.key)
    (True, False)
    """
    key = serialization.load_pem_private_key(private, password=None)
    return bool(key.public_key() == read_certificate(certificate).public_key())


def is_for(certificate: bytes, request: bytes) -> bool:
    """Tell whether a certificate is about the key of this signing request.

    >>> authority, request = new_authority("demo"), new_request("client-3")[1]
    >>> is_for(certify_client(authority, "client-3", request), request)
    True
    """
    return bool(requested_key(request) == read_certificate(certificate).public_key())

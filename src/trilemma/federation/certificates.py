"""The certificates of a federation: one authority, one certificate for the server, one for each client.

Server and clients show each other certificates of the one authority before a byte is read; behind that door
the server authenticates clients by node keys (NIST P-384, Flower's format) and, above Flower, by Ed25519
identities.
The authority's private key signs nothing after `trilemma federation init` and should be kept off-line.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

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
        return x509.load_pem_x509_certificate(self.certificate)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def new_authority(name: str) -> Issued:
    """Make a certificate authority for the federation `name`.

    >>> new_authority("demo").x509.subject.rfc4514_string()
    'CN=demo authority'
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} authority")])
    now = _now()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + 10 * VALIDITY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return Issued(certificate.public_bytes(serialization.Encoding.PEM), _private_pem(key))


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
    return _issue(
        authority, hosts[0], ExtendedKeyUsageOID.SERVER_AUTH, x509.SubjectAlternativeName(names), until
    )


def issue_client(authority: Issued, name: str, until: dt.datetime | None = None) -> Issued:
    """Issue the certificate that a client shows at the server's door; the server's own does not serve there.

    >>> issued = issue_client(new_authority("demo"), "client-3")
    >>> issued.x509.subject.rfc4514_string()
    'CN=client-3'
    """
    return _issue(authority, name, ExtendedKeyUsageOID.CLIENT_AUTH, None, until)


def _issue(
    authority: Issued,
    name: str,
    purpose: x509.ObjectIdentifier,
    names: x509.SubjectAlternativeName | None,
    until: dt.datetime | None,
) -> Issued:
    key = ec.generate_private_key(ec.SECP256R1())
    signer = serialization.load_pem_private_key(authority.key, password=None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    now = _now()
    end = until or now + VALIDITY
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(authority.x509.subject)
        .public_key(key.public_key())
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
    certificate = builder.sign(signer, hashes.SHA256())
    return Issued(certificate.public_bytes(serialization.Encoding.PEM), _private_pem(key))


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

"""Who is who: keys, short-lived certificates of one authority, and TLS 1.3 contexts that trust that authority alone.

The broker is the authority: it signs a node's public key under the node's name after admission. A certificate's one
DNS entry *is* the node's name. Knows nothing of sockets or sessions; ``tls_wire`` and the broker use it.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fusionllm.errors import AdmissionError, UserError
from fusionllm.protocol.messages import NAME

_EARLY = datetime.timedelta(minutes=5)  # tolerated difference between the machines' clocks


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a node proves itself with. PEM texts; ``ca_pem`` is the one authority it trusts."""

    cert_pem: bytes
    key_pem: bytes
    ca_pem: bytes


class Authority(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The certificate authority of one job: certificate and private key, PEM."""

    cert_pem: bytes
    key_pem: bytes


def check_node_name(name: str) -> str:
    """The name, if it can stand in a certificate. Raises UserError."""
    if not NAME.fullmatch(name):
        raise UserError(f"{name!r} is no node name; use 1 to 63 of letters, digits, '.', '_', '-', and no sign first")
    return name


def make_key() -> bytes:
    """A fresh P-256 private key, PEM."""
    return _key_pem(ec.generate_private_key(ec.SECP256R1()))


def public_key_pem(key_pem: bytes) -> bytes:
    """The public half of a private key, PEM: what a node sends to be signed."""
    public = _load_key(key_pem).public_key()
    return public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def make_authority(common_name: str = "fusionllm", days: int = 3650) -> Authority:
    """A new self-signed certificate authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
    builder = _builder(name, name, key.public_key(), datetime.timedelta(days=days))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    return Authority(certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key))


def sign_node(authority: Authority, name: str, request_pem: bytes, valid_s: float = 86400.0) -> bytes:
    """A node certificate, PEM.

    Args:
        name: the node's name, becomes the only DNS entry.
        request_pem: the node's P-256 public key, or a certificate signing request; names inside it are
            ignored.
        valid_s: lifetime from now.

    Raises:
        AdmissionError: the request is not such a key, or its own signature is wrong.
    """
    check_node_name(name)
    issuer = x509.load_pem_x509_certificate(authority.cert_pem)
    public = _requested_key(request_pem)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(subject, issuer.subject, public, datetime.timedelta(seconds=valid_s))
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(_load_key(authority.key_pem).public_key())
    for extension, critical in (
        (x509.SubjectAlternativeName([x509.DNSName(name)]), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.ExtendedKeyUsage(both), False),
        (issuer_key, False),
    ):
        builder = builder.add_extension(extension, critical=critical)
    certificate = builder.sign(_load_key(authority.key_pem), hashes.SHA256())
    return certificate.public_bytes(serialization.Encoding.PEM)


def issue_identity(authority: Authority, name: str, valid_s: float = 86400.0) -> Identity:
    """Key and certificate in one go, for nodes that the authority itself starts."""
    key_pem = make_key()
    return Identity(sign_node(authority, name, public_key_pem(key_pem), valid_s), key_pem, authority.cert_pem)


def fingerprint(cert_pem: bytes) -> str:
    """sha256 of the certificate's DER form, in hex: what a ticket carries to recognise the authority."""
    certificate = x509.load_pem_x509_certificate(cert_pem)
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()


def server_context(identity: Identity) -> ssl.SSLContext:
    """For the accepting side: TLS 1.3, the client must show a certificate of our authority."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity)
    context.num_tickets = 0  # a session of ours outlives its wires; TLS need not resume
    return context


def client_context(identity: Identity) -> ssl.SSLContext:
    """For the dialling side; the peer's name is checked by ``peer_name``, not by host name."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, identity)


def peer_name(certificate: dict[str, Any] | None) -> str:
    """The name in a verified certificate (``SSLSocket.getpeercert()``).

    Raises AdmissionError if there is not exactly one.
    """
    entries = [value for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "DNS"]
    if len(entries) != 1 or not NAME.fullmatch(entries[0]):
        raise AdmissionError(f"certificate with the DNS names {entries}; a node has exactly one name")
    return str(entries[0])


def _context(protocol: ssl._SSLMethod, identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=identity.ca_pem.decode("ascii"))
    # ssl reads a certificate chain from files only; the folder is private (0700) and gone at once.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "identity.pem"
        path.touch(mode=0o600)
        path.write_bytes(identity.cert_pem + b"\n" + identity.key_pem)
        try:
            context.load_cert_chain(os.fspath(path))
        except ssl.SSLError as error:
            raise UserError(f"the node's certificate and key do not belong together: {error}") from None
    return context


def _builder(subject: x509.Name, issuer: x509.Name, key: Any, lifetime: datetime.timedelta) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _EARLY).not_valid_after(now + lifetime)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    encryption = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def _load_key(key_pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(key_pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"the private key is a {type(key).__name__}; it must be a P-256 key")
    return key


def _requested_key(request_pem: bytes) -> ec.EllipticCurvePublicKey:
    if len(request_pem) > 16384:
        raise AdmissionError(f"key request of {len(request_pem)} bytes; the limit is 16384")
    try:
        if b"CERTIFICATE REQUEST" in request_pem:
            request = x509.load_pem_x509_csr(request_pem)
            if not request.is_signature_valid:
                raise AdmissionError("the signature of the certificate request is wrong")
            key: Any = request.public_key()
        else:
            key = serialization.load_pem_public_key(request_pem)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise AdmissionError(f"not a public key or certificate request in PEM: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise AdmissionError(f"a {type(key).__name__} was sent to be signed; only P-256 keys are")
    return key

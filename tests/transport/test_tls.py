"""Certificates and TLS: only nodes of our authority, under the name it signed, over TLS 1.3."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from tests.kits.transport_kit import AUTHORITY, HOST, WAIT_S, Net, until

from fusionllm.errors import AdmissionError, LinkBroken, UserError
from fusionllm.transport import (
    Identity,
    fingerprint,
    issue_identity,
    make_authority,
    make_key,
    public_key_pem,
    sign_node,
)
from fusionllm.transport.tls import client_context, peer_name, server_context
from fusionllm.transport.tls_transport import TlsTransport

PEM = serialization.Encoding.PEM


def run_net(work, identity_of=lambda name: issue_identity(AUTHORITY, name)) -> None:
    async def run() -> None:
        net = Net(lambda name: TlsTransport(identity_of(name)))
        try:
            await asyncio.wait_for(work(net), 60)
        finally:
            await net.close()

    asyncio.run(run())


@pytest.mark.parametrize("who", ["a", "b"])
def test_a_node_of_another_authority_is_refused_by_either_side(who, caplog):
    other = make_authority()

    async def work(net: Net) -> None:
        a, b = await net.node("a"), await net.node("b")
        a.endpoint.expect({"b": b.address})
        b.endpoint.expect({"a": None})
        with pytest.raises(LinkBroken, match=r"a got no link to b at 127\.0\.0\.1:\d+ within 0\.6 s"):
            await a.endpoint.connect("b", 0.6)
        assert not a.endpoint.stats()["b"].up and not b.endpoint.stats()["a"].up

    with caplog.at_level(logging.WARNING):
        run_net(work, lambda name: issue_identity(other if name == who else AUTHORITY, name))
    assert "refused a connection from ('127.0.0.1'" in caplog.text


def test_an_expired_certificate_is_refused():
    async def work(net: Net) -> None:
        a, b = await net.node("a"), await net.node("b")
        a.endpoint.expect({"b": b.address})
        b.endpoint.expect({"a": None})
        with pytest.raises(LinkBroken, match="certificate has expired"):
            await a.endpoint.connect("b", 0.6)

    run_net(work, lambda name: issue_identity(AUTHORITY, name, valid_s=-60.0 if name == "b" else 60.0))


def test_a_certificate_under_another_name_is_refused():
    async def work(net: Net) -> None:
        a, b = await net.node("a"), await net.node("b")
        a.endpoint.expect({"b": b.address})
        b.endpoint.expect({"a": None})
        with pytest.raises(LinkBroken, match="has the certificate of 'mallory', expected was 'b'"):
            await a.endpoint.connect("b", 0.6)

    run_net(work, lambda name: issue_identity(AUTHORITY, "mallory" if name == "b" else name))


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 600, b""])
def test_strangers_without_tls_are_dropped_and_the_node_lives_on(greeting):
    async def work(net: Net) -> None:
        a, b = await net.node("a"), await net.node("b")
        b.endpoint.expect({"a": None})
        reader, writer = await asyncio.open_connection(HOST, b.address.port)
        writer.write(greeting)
        if not greeting:
            writer.close()
        await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
        a.endpoint.expect({"b": b.address})
        await a.endpoint.connect("b", WAIT_S)

    run_net(work)


def test_a_client_without_a_certificate_or_with_old_tls_gets_nowhere():
    async def work(net: Net) -> None:
        b = await net.node("b")
        b.endpoint.expect({"a": None})
        anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
        old = client_context(issue_identity(AUTHORITY, "a"))
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
        for context in (anonymous, old):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                reader, writer = await asyncio.open_connection(HOST, b.address.port, ssl=context, server_hostname="")
                try:
                    assert await asyncio.wait_for(reader.read(1), WAIT_S) != b""
                    raise ConnectionError("not closed")
                finally:
                    writer.close()

    run_net(work)


def test_garbage_after_the_handshake_ends_the_session_with_a_clear_error():
    async def work(net: Net) -> None:
        b = await net.node("b")
        b.endpoint.expect({"a": None})
        context = client_context(issue_identity(AUTHORITY, "a"))
        _, writer = await asyncio.open_connection(HOST, b.address.port, ssl=context, server_hostname="")
        writer.write(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        await until(lambda: b.lost)
        assert "it starts with b'GE'" in str(b.lost[0][1])
        writer.close()

    run_net(work)


def test_reset_connections_resume():
    async def work(net: Net) -> None:
        a, b = await net.pair()
        for index in range(10):
            a.endpoint.send_nowait("b", b"%d" % index, bytes(900_000))
        await until(lambda: len(b.received) >= 3)
        for wire in list(b.endpoint._transport._wires):
            wire._sock.shutdown(socket.SHUT_RDWR)
        await a.endpoint.drain(WAIT_S)
        assert sorted(int(meta) for _, meta, _ in b.received) == list(range(10))
        assert a.endpoint.stats()["b"].reconnects == 1

    run_net(work)


def test_a_signed_request_makes_a_working_identity():
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "whatever it asks for")])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    certificate = x509.load_pem_x509_certificate(sign_node(AUTHORITY, "n7", request.public_bytes(PEM), 60.0))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["n7"]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    lifetime = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    assert lifetime.total_seconds() <= 361


def test_what_is_no_p256_key_is_not_signed():
    strange = rsa.generate_private_key(65537, 2048).public_key()
    subject_info = serialization.PublicFormat.SubjectPublicKeyInfo
    for request in (b"", b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", bytes(20_000)):
        with pytest.raises(AdmissionError):
            sign_node(AUTHORITY, "n", request)
    with pytest.raises(AdmissionError, match="only P-256 keys"):
        sign_node(AUTHORITY, "n", strange.public_bytes(PEM, subject_info))
    with pytest.raises(AdmissionError, match="only P-256 keys"):
        sign_node(
            AUTHORITY,
            "n",
            ec.generate_private_key(ec.SECP384R1()).public_key().public_bytes(PEM, subject_info),
        )


@pytest.mark.parametrize("name", ["", "-n", "a b", "a\n", "x" * 64, "n*", "ü"])
def test_names_that_cannot_stand_in_a_certificate_are_refused(name):
    with pytest.raises(UserError, match="is no node name"):
        sign_node(AUTHORITY, name, public_key_pem(make_key()))


def test_a_certificate_and_a_key_that_do_not_belong_together_are_named():
    one, two = issue_identity(AUTHORITY, "n"), issue_identity(AUTHORITY, "n")
    with pytest.raises(UserError, match="do not belong together"):
        server_context(Identity(one.cert_pem, two.key_pem, one.ca_pem))


def test_names_come_only_from_a_single_dns_entry():
    assert peer_name({"subjectAltName": (("DNS", "n1"),)}) == "n1"
    for entries in ((), (("DNS", "a"), ("DNS", "b")), (("IP Address", "1.2.3.4"),), (("DNS", "*.x"),)):
        with pytest.raises(AdmissionError):
            peer_name({"subjectAltName": entries})
    with pytest.raises(AdmissionError):
        peer_name(None)


def test_a_fingerprint_is_stable_and_tells_authorities_apart():
    assert fingerprint(AUTHORITY.cert_pem) == fingerprint(AUTHORITY.cert_pem)
    assert len(fingerprint(AUTHORITY.cert_pem)) == 64
    assert fingerprint(AUTHORITY.cert_pem) != fingerprint(make_authority().cert_pem)

"""Bytes between machines: an ``Endpoint`` per node, over TLS or memory, shaped on demand."""

from fusionllm.protocol.messages import LinkShape
from fusionllm.protocol.session import SessionConfig
from fusionllm.transport.endpoint import TRANSPORTS, Endpoint
from fusionllm.transport.tls import (
    Authority,
    Identity,
    fingerprint,
    issue_identity,
    make_authority,
    make_key,
    public_key_pem,
    sign_node,
)
from fusionllm.transport.wire import LinkStats, PeerAddress

__all__ = [
    "TRANSPORTS", "Authority", "Endpoint", "Identity", "LinkShape", "LinkStats",
    "PeerAddress", "SessionConfig", "fingerprint", "issue_identity", "make_authority", "make_key",
    "public_key_pem", "sign_node",
]  # fmt: skip

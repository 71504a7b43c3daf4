"""The network of a node: `base.py` is the contract, `hivemind.py` and `memory.py` implement it."""

from __future__ import annotations

import random
from pathlib import Path

from node.transport._addresses import peer_id_of, require_free
from node.transport.base import RecordValidator, Transport, TransportLimits

__all__ = ["open_transport", "peer_id_of", "require_free"]


async def open_transport(
    identity_path: Path,
    *,
    listen: str = "/ip4/127.0.0.1/tcp/0",
    validate_record: RecordValidator | None = None,
    limits: TransportLimits | None = None,
    rng: random.Random | None = None,
    max_daemon_bytes: int = 512 * 1024 * 1024,
) -> Transport:
    """The started network of this machine. Raises `AddressError` or `TransportError`.

    The import stands here because hivemind imports torch (2.3 s, 289 MB).
    """
    from node.transport.hivemind import HivemindTransport

    transport = HivemindTransport(
        identity_path,
        listen=listen,
        validate_record=validate_record,
        limits=limits,
        rng=rng,
        max_daemon_bytes=max_daemon_bytes,
    )
    await transport.start()
    return transport

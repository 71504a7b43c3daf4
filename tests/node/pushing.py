"""A neighbour that pushes what it likes, past its own `Gossip`."""

from __future__ import annotations

from node.transport.base import Transport
from protocol.errors import TransportError
from protocol.messages import PeerId
from protocol.topics import ANNOUNCE_PROTOCOL

__all__ = ["push"]


async def push(transport: Transport, to: PeerId, *envelopes: bytes) -> None:
    """One stream with these bytes as its frames; that it is closed under us is fine."""
    stream = await transport.open_stream(to, ANNOUNCE_PROTOCOL)
    try:
        for envelope in envelopes:
            await stream.send(envelope)
    except TransportError:
        pass
    finally:
        await stream.close()

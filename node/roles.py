"""A node of the configured role from its parts: the one way for a real start and for a simulation.

The two differ only in what is given: clock and threads (`Runtime`), network (`transport`), what outlives the
process (`Stores`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from node.membership import Membership
from node.open.parts import Parts
from node.open.stores import Stores
from node.runtime import Runtime
from node.supervise import resident_bytes
from node.transport.base import Transport

if TYPE_CHECKING:
    from node.core import NodeCore

__all__ = ["open_node"]


def open_node(
    parts: Parts,
    runtime: Runtime,
    membership: Membership,
    stores: Stores,
    transport: Transport | None,
    rss_bytes: Callable[[], int] = resident_bytes,
) -> NodeCore:
    """The node, not running yet. `transport` is started; without one the node trains alone. Raises
    ConfigError for a follower without a network."""
    if parts.learner is None:
        from node.follower import Follower

        return Follower(parts, runtime, membership, stores, transport, rss_bytes)
    from node.node import Node

    return Node(parts, runtime, membership, stores, transport, rss_bytes)

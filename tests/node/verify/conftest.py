"""The toy world as fixtures."""

from __future__ import annotations

import pytest

from protocol.messages import PeerId
from tests.node.verify.world import World, identity


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def alice() -> PeerId:
    return identity("alice").peer_id


@pytest.fixture
def bob() -> PeerId:
    return identity("bob").peer_id

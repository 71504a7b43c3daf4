"""The tiny policy, opened once."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.rollout.policy import Policy


@pytest.fixture(scope="session")
def policy(tiny_policy_path: Path) -> Policy:
    """Has 46 tokens, 128 positions, end token 1."""
    return Policy.open(tiny_policy_path)

"""What the vLLM tests share; skipped where vLLM is not installed. One engine per module, as each takes its
time to start."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from node.rollout.policy import Policy

HERE = Path(__file__).parent
MISSING = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; `make vllm` adds it"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(MISSING)
            item.add_marker(pytest.mark.timeout(600))
            # vLLM and what it imports warn at import; nothing of ours
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy.open(HERE.parents[1] / "configs/models/starling")


@pytest.fixture(scope="module")
def notices() -> list[str]:
    """What the module's engine has told."""
    return []

"""What the tests on a CUDA device share; skipped, with the reason, where there is none or vLLM is missing.
The policy is a bundled one, or the folder that MURMURATION_GPU_POLICY names."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from node.rollout.policy import Policy

HERE = Path(__file__).parent
BUNDLED = HERE.parents[1] / "configs/models/starling"
NO_DEVICE = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
NO_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(NO_DEVICE)
            item.add_marker(NO_VLLM)
            item.add_marker(pytest.mark.timeout(900))
            # vLLM and what it imports warn at import; nothing of ours
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def policy() -> Policy:
    return Policy.open(Path(os.environ.get("MURMURATION_GPU_POLICY", BUNDLED)))

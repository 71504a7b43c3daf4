"""An engine whose passes a test can watch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy

__all__ = ["watched_engine"]


def watched_engine(policy: Policy, before: Callable[[Mapping[str, Any]], None]) -> TransformersEngine:
    """`before` sees the inputs of each pass of the engine's model, ahead of it and on its thread."""
    model: Any = policy.load_model()
    forward = model.forward

    def watched(**inputs: Any) -> Any:
        before(inputs)
        return forward(**inputs)

    model.forward = watched
    with mock.patch.object(Policy, "load_model", return_value=model):
        return TransformersEngine(policy)

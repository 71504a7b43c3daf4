"""Rollouts and groups for tests: changed in one field, with the versions of their tokens."""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.messages import PolicySegment, Rollout, RolloutGroup
from protocol.rollouts import parse_tokens, version_span

__all__ = ["changed", "with_versions"]


def changed(rollout: Rollout, **changes: Any) -> Rollout:
    """A single-turn rollout with other values for fields of its own or of its one segment."""
    answer = {name: changes.pop(name) for name in PolicySegment.__struct_fields__ if name in changes}
    segments = (msgspec.structs.replace(rollout.answer, **answer),)
    return msgspec.structs.replace(rollout, **({"segments": segments} | changes))


def with_versions(group: RolloutGroup) -> RolloutGroup:
    """The group with newest, mean and oldest version as its tokens have them."""
    span = version_span([parse_tokens(rollout) for rollout in group.rollouts])
    return msgspec.structs.replace(
        group, policy_version=span.newest, mean_version=span.mean, oldest_version=span.oldest
    )

"""What an update of the weights weighs, measured on a run's checkpoints.

For: `swarm plan` on a run that nobody followed, whose node therefore coded nothing. Two checkpoints lie
several versions apart, so that what one step changes is at most this. Not for runs that published: their
events have the sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from node.train.checkpoint import checkpoints_of, learned_weights, read_state
from node.weights.chain.apply import THREADS
from node.weights.chain.bf16 import to_bits
from protocol.delta import encode
from protocol.errors import ModelError

__all__ = ["UpdateSize", "update_between_checkpoints"]


class UpdateSize(NamedTuple):
    """Bytes of the delta from version `older` to version `newer`, and of a copy in bfloat16."""

    update_bytes: int
    full_bytes: int
    older: int
    newer: int


def update_between_checkpoints(folder: Path) -> UpdateSize | None:
    """Measured between the two newest checkpoints in `folder`; None where there are fewer, or where they are
    of different policies. Blocking: reads both. Raises ModelError for one that cannot be read."""
    newest = [(path, read_state(path)) for path in checkpoints_of(folder)[:2]]
    if len(newest) < 2:
        return None
    (after, newer), (before, older) = newest
    if newer.base_model != older.base_model:
        return None
    old, new = to_bits(learned_weights(before, older)), to_bits(learned_weights(after, newer))
    if old.keys() != new.keys():
        raise ModelError(f"{before} and {after} hold different weights; give --update-mb")
    size = len(encode(old, new, threads=THREADS))
    return UpdateSize(
        size, sum(array.nbytes for array in new.values()), older.policy_version, newer.policy_version
    )

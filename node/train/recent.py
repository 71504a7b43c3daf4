"""The trainer as it was after the last step, in one file, so that a kill costs the step in flight at most.

    after a step --write, rename--> recent.safetensors --next start, if newer than the checkpoint--> trainer

The file is not brought to the disk (fsync), which makes it cheap: what a process has written is there after
it was killed, for as long as the machine runs. So the file names the boot of the machine that it is of, and
counts for nothing after another one; then the newest checkpoint does. Not a checkpoint that others can load
(`checkpoint.py`), nor for policies whose state is so large that the file would be in the way (MAX_BYTES).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from node.rollout.engine.base import Engine
from node.train.checkpoint import CheckpointState, load_moments, moments_of, state_of
from node.train.step import Trainer
from protocol.errors import ModelError

__all__ = ["MAX_BYTES", "save_recent", "state_bytes", "take_recent"]

MAX_BYTES = 4 * 2**30
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_WEIGHTS, _MOMENTS = "weights.", "moments."


def state_bytes(trainer: Trainer) -> int:
    """What `save_recent` would write, roughly: weights, and moments of twice their size."""
    return 3 * sum(tensor.nbytes for tensor in trainer.learning().values())


def save_recent(trainer: Trainer, path: Path) -> None:
    """Replace `path` by the state of `trainer`. Raises OSError, and then the old file is still there."""
    tensors = {_WEIGHTS + name: tensor.cpu().contiguous() for name, tensor in trainer.learning().items()}
    tensors |= {_MOMENTS + name: tensor for name, tensor in moments_of(trainer).items()}
    head = {"state": msgspec.json.encode(state_of(trainer)).decode(), "boot": _boot()}
    temporary = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata=head)
        temporary.replace(path)
    except SafetensorError as error:  # what safetensors makes of a full disk
        raise OSError(f"cannot write {temporary}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def take_recent(trainer: Trainer, engine: Engine, path: Path) -> bool:
    """Go on from `path` where that is newer than what `trainer` has, of this boot, and trained alike; whether
    it was. A file that is damaged counts for nothing."""
    try:
        with safe_open(path, framework="pt") as file:
            head = file.metadata() or {}
            state = msgspec.json.decode(head.get("state", ""), type=CheckpointState)
            if head.get("boot") != _boot() or not _goes_on(trainer, state):
                return False
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        trainer.take(_part(tensors, _WEIGHTS), state.policy_version)
    except (OSError, SafetensorError, msgspec.MsgspecError, ModelError):
        return False
    load_moments(trainer, _part(tensors, _MOMENTS), state)
    engine.update(trainer.state_dict(), trainer.policy_version)
    return True


def _part(tensors: Mapping[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(part): each for name, each in tensors.items() if name.startswith(part)}


def _goes_on(trainer: Trainer, state: CheckpointState) -> bool:
    now = state_of(trainer)
    return state.policy_version > now.policy_version and (
        (state.base_model, state.optimiser, state.adapter) == (now.base_model, now.optimiser, now.adapter)
    )


def _boot() -> str:
    """Names this boot of the machine; where that cannot be known no two are alike."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return repr(torch.rand(4).tolist())

"""A trainer on disk: a Hugging Face folder anybody can load, with what a byte-exact resume needs beside it.

Layout of one checkpoint: config.json, model.safetensors, the policy's own tokenizer files byte for byte (so
the tokenizer digest stays), optimiser.safetensors (moments by parameter name, random state), trainer.json
(versions and counters). Written to a temporary folder, fsynced, renamed: a folder with the final name is
complete. Tensors are safetensors only. `resume` goes on from the newest one of a folder that fits, `prune`
keeps the newest few. Not for: the replay pool.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from node.rollout.engine.base import Engine
from node.train.step import Trainer
from protocol.errors import ModelError

__all__ = [
    "CheckpointState",
    "checkpoints_of",
    "load_checkpoint",
    "prune",
    "read_state",
    "resume",
    "save_checkpoint",
]

log = logging.getLogger(__name__)
_STATE = "trainer.json"
_OPTIMISER = "optimiser.safetensors"
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
_RANDOM = "random_state"
_WRITING, _OLD = ".writing", ".old"


class CheckpointState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counters of the trainer. `base_model` and `tokenizer` are digests of the policy it began with
    (`Policy`)."""

    policy_version: int
    updates: int
    skipped_steps: int
    base_model: str
    tokenizer: str


def save_checkpoint(trainer: Trainer, folder: Path) -> None:
    """Write `folder`; one of that name is replaced only when the new one is complete. Raises OSError, and
    then nothing has changed."""
    temporary = folder.with_name(f".{folder.name}{_WRITING}")
    old = folder.with_name(f".{folder.name}{_OLD}")
    for leftover in (temporary, old):
        if leftover.exists():
            shutil.rmtree(leftover)
    try:
        temporary.mkdir(parents=True)
        _write(trainer, temporary)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, SafetensorError):  # what safetensors makes of a full disk
            raise OSError(f"cannot write {temporary}: {error}") from error
        raise
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    _sync(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def _write(trainer: Trainer, temporary: Path) -> None:
    # Tied weights share storage, which safetensors refuses; named_parameters() gives each tensor once.
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in trainer.model.named_parameters()}
    save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
    trainer.model.config.save_pretrained(temporary)
    if trainer.model.generation_config is not None:
        trainer.model.generation_config.save_pretrained(temporary)
    for name in _TOKENIZER_FILES:
        if (trainer.policy.path / name).is_file():
            shutil.copyfile(trainer.policy.path / name, temporary / name)
    save_file(_optimiser_tensors(trainer), temporary / _OPTIMISER)
    state = CheckpointState(
        policy_version=trainer.policy_version,
        updates=trainer.updates,
        skipped_steps=trainer.skipped_steps,
        base_model=trainer.policy.base_model,
        tokenizer=trainer.policy.tokenizer_digest,
    )
    (temporary / _STATE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))
    for file in [*temporary.iterdir(), temporary]:
        _sync(file)


def checkpoints_of(folder: Path, base_model: str) -> list[Path]:
    """Complete checkpoints in `folder` that began with these weights, newest first."""
    found = []
    for path in folder.glob("v*"):
        with contextlib.suppress(ModelError):
            state = read_state(path)
            if state.base_model == base_model:
                found.append((state.policy_version, path))
    return [path for _, path in sorted(found, reverse=True)]


def prune(folder: Path, base_model: str, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints of this base model, and what a kill left half-written.
    Raises OSError."""
    leftovers = [*folder.glob(f".*{_WRITING}"), *folder.glob(f".*{_OLD}")]
    for path in [*checkpoints_of(folder, base_model)[keep:], *leftovers]:
        shutil.rmtree(path)


def resume(trainer: Trainer, engine: Engine, folder: Path) -> None:
    """Go on from the newest checkpoint in `folder` that fits; without one everything stays as it is."""
    for path in checkpoints_of(folder, trainer.policy.base_model):
        try:
            load_checkpoint(trainer, path)
        except ModelError as error:
            log.warning("%s; trying an older one", error)
            continue
        engine.update(trainer.state_dict(), trainer.policy_version)
        return


def read_state(folder: Path) -> CheckpointState:
    """Counters of a checkpoint. Raises ModelError."""
    try:
        return msgspec.json.decode((folder / _STATE).read_bytes(), type=CheckpointState)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{folder} is not a complete checkpoint: {error}") from error


def load_checkpoint(trainer: Trainer, folder: Path) -> CheckpointState:
    """Put weights, optimiser, counters and the random state of `folder` into `trainer`, whose policy must be
    the one the checkpoint began with (its start copy stays the start). Raises ModelError and then changes
    nothing."""
    state = read_state(folder)
    if state.base_model != trainer.policy.base_model:
        raise ModelError(
            f"{folder} began with the weights {state.base_model[:12]}, {trainer.policy.path} holds "
            f"{trainer.policy.base_model[:12]}; open the policy it began with."
        )
    try:
        weights = load_file(folder / "model.safetensors", device=str(trainer.device))
        moments = load_file(folder / _OPTIMISER)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{folder} is not a complete checkpoint: {error}") from error
    if _RANDOM not in moments:
        raise ModelError(f"{folder} is not a complete checkpoint: {_OPTIMISER} holds no {_RANDOM}")
    parameters = dict(trainer.model.named_parameters())
    if {name: tensor.shape for name, tensor in weights.items()} != {
        n: p.shape for n, p in parameters.items()
    }:
        raise ModelError(f"{folder} holds tensors of other names or shapes than {trainer.policy.path}.")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    trainer.optimiser.state.clear()
    for name, parameter in parameters.items():
        entries = {
            field: moments[f"{field}.{name}"].to(trainer.device)
            for field in ("step", "exp_avg", "exp_avg_sq")
            if f"{field}.{name}" in moments
        }
        if entries:
            trainer.optimiser.state[parameter] = entries
    torch.random.set_rng_state(moments[_RANDOM])
    trainer.policy_version = state.policy_version
    trainer.updates = state.updates
    trainer.skipped_steps = state.skipped_steps
    return state


def _optimiser_tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    tensors = {_RANDOM: torch.random.get_rng_state()}
    for name, parameter in trainer.model.named_parameters():
        for field, value in trainer.optimiser.state.get(parameter, {}).items():
            tensors[f"{field}.{name}"] = value.detach().cpu().contiguous()
    return tensors


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

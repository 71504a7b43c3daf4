"""A trainer on disk: a Hugging Face folder anybody can load, with what a byte-exact resume needs beside it.

Layout of one checkpoint: config.json, model.safetensors (an adapter is merged into it) and its index, the
policy's own tokenizer files byte for byte (so the tokenizer digest stays), optimiser.safetensors (moments by
parameter name, random state), trainer.json (versions, counters, what was trained and how), and for an adapter
adapter.safetensors, from which its training goes on. Written to a temporary folder, fsynced, renamed: a
folder with the final name is complete. trainer.json comes last, when the rest is on the disk; with it a
folder that a kill left under another name is complete too, and `restore` gives it its name back. Tensors are
safetensors only. `resume` goes on from the newest one of a folder, `prune` keeps the newest few. Not for: the
replay pool.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from node.rollout.adapter import AdapterSpec, merged_state
from node.rollout.engine.base import Engine
from node.state.stores import sync
from node.train.slow_fast import SlowFastState
from node.train.step import Trainer
from protocol.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "CheckpointState",
    "checkpoints_of",
    "learned_weights",
    "load_checkpoint",
    "load_moments",
    "moments_of",
    "prune",
    "read_state",
    "restore",
    "resume",
    "save_checkpoint",
    "state_of",
    "take_weights",
]

log = logging.getLogger(__name__)
_STATE = "trainer.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter.safetensors"
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
_LEFTOVERS = (_WRITING, _OLD)
"""The newer first."""


class CheckpointState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counters of the trainer. `base_model` and `tokenizer` are digests of the policy it began with
    (`Policy`)."""

    policy_version: int
    updates: int
    skipped_steps: int
    base_model: str
    tokenizer: str
    optimiser: str = "adamw"
    adapter: AdapterSpec | None = None
    """What was trained; None: all weights."""
    slow_fast: SlowFastState | None = None


def save_checkpoint(trainer: Trainer, folder: Path) -> None:
    """Write `folder`; one of that name is replaced only when the new one is complete. Raises OSError, and
    then nothing has changed."""
    _restore(folder)
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
    sync(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def _write(trainer: Trainer, temporary: Path) -> None:
    model = cast("PreTrainedModel", trainer.model)
    if trainer.settings.adapter is None:
        # Tied weights share storage, which safetensors refuses; named_parameters() gives each tensor once.
        weights = _on_cpu(trainer.learning())
    else:
        weights = merged_state(trainer.adapted)
        save_file(_on_cpu(trainer.learning()), temporary / _ADAPTER)
        model = cast("PreTrainedModel", trainer.adapted.get_base_model())
    save_file(weights, temporary / _WEIGHTS, metadata={"format": "pt"})
    # Without an index vLLM takes every safetensors file of the folder for weights, the optimiser's too.
    size = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(weights, _WEIGHTS)}
    (temporary / _INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index)))
    model.config.save_pretrained(temporary)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(temporary)
    for name in _TOKENIZER_FILES:
        if (trainer.policy.path / name).is_file():
            shutil.copyfile(trainer.policy.path / name, temporary / name)
    save_file(moments_of(trainer), temporary / _OPTIMISER)
    state = state_of(trainer)
    for file in temporary.iterdir():
        sync(file)
    (temporary / _STATE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))
    sync(temporary / _STATE)
    sync(temporary)


def state_of(trainer: Trainer) -> CheckpointState:
    """Its counters, and how it trains."""
    return CheckpointState(
        policy_version=trainer.policy_version,
        updates=trainer.updates,
        skipped_steps=trainer.skipped_steps,
        base_model=trainer.policy.base_model,
        tokenizer=trainer.policy.tokenizer_digest,
        optimiser=trainer.settings.optimiser,
        adapter=trainer.settings.adapter,
        slow_fast=trainer.slow_fast.state if trainer.slow_fast is not None else None,
    )


def checkpoints_of(folder: Path, base_model: str | None = None) -> list[Path]:
    """Complete checkpoints in `folder`, newest first; those that began with these weights, or all."""
    found = []
    for path in folder.glob("v*"):
        with contextlib.suppress(ModelError):
            state = read_state(path)
            if base_model in (None, state.base_model):
                found.append((state.policy_version, path))
    return [path for _, path in sorted(found, reverse=True)]


def prune(folder: Path, base_model: str, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints of this base model, and what a kill left half-written.
    Raises OSError."""
    restore(folder)
    leftovers = [path for suffix in _LEFTOVERS for path in folder.glob(f".*{suffix}")]
    for path in [*checkpoints_of(folder, base_model)[keep:], *leftovers]:
        shutil.rmtree(path)


def restore(folder: Path) -> None:
    """Give every complete checkpoint in `folder` that a kill left under another name its own back, where
    nothing has that. Not while another process writes there. Raises OSError."""
    for suffix in _LEFTOVERS:
        for path in folder.glob(f".*{suffix}"):
            _restore(folder / path.name[1 : -len(suffix)])


def _restore(folder: Path) -> None:
    for suffix in _LEFTOVERS:
        left = folder.with_name(f".{folder.name}{suffix}")
        if not folder.exists() and _is_complete(left):
            left.rename(folder)


def _is_complete(folder: Path) -> bool:
    try:
        read_state(folder)
    except ModelError:
        return False
    return True


def resume(trainer: Trainer, engine: Engine, folder: Path) -> None:
    """Go on from the newest checkpoint in `folder` that can be read; without one everything stays as it is.
    Raises ConfigError for one that was trained in another way."""
    for path in checkpoints_of(folder, trainer.policy.base_model):
        try:
            load_checkpoint(trainer, path)
        except ModelError as error:
            log.warning("%s; trying an older one", error)
            continue
        engine.update(trainer.state_dict(), trainer.policy_version)
        return


def take_weights(
    trainer: Trainer, engine: Engine, state: Mapping[str, torch.Tensor], policy_version: int
) -> None:
    """Go on from a version that was published after the newest checkpoint: its weights, as exact as they
    travelled, with the optimiser's moments as they are. Raises ModelError for other names or shapes, and then
    changes nothing."""
    try:
        trainer.take(state, policy_version)
    except ModelError as error:
        raise ModelError(f"the published {error}; remove <home>/state/chain to begin a new chain") from None
    engine.update(trainer.state_dict(), policy_version)


def read_state(folder: Path) -> CheckpointState:
    """Counters of a checkpoint. Raises ModelError."""
    try:
        return msgspec.json.decode((folder / _STATE).read_bytes(), type=CheckpointState)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{folder} is not a complete checkpoint: {error}") from error


def learned_weights(folder: Path, state: CheckpointState) -> dict[str, torch.Tensor]:
    """What was trained, by the `state` of this checkpoint: all weights, or the adapter's. Raises ModelError
    when they cannot be read."""
    path = folder / (_WEIGHTS if state.adapter is None else _ADAPTER)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder} is not a complete checkpoint: {error}") from error


def load_checkpoint(trainer: Trainer, folder: Path) -> CheckpointState:
    """Put weights, optimiser, counters and the random state of `folder` into `trainer`, whose policy must be
    the one the checkpoint began with (its start copy stays the start). Raises ModelError, or ConfigError when
    it was trained in another way, and then changes nothing."""
    state = read_state(folder)
    if state.base_model != trainer.policy.base_model:
        raise ModelError(
            f"{folder} began with the weights {state.base_model[:12]}, {trainer.policy.path} holds "
            f"{trainer.policy.base_model[:12]}; open the policy it began with."
        )
    _refuse_other_training(trainer, state, folder)
    saved = learned_weights(folder, state)
    try:
        moments = load_file(folder / _OPTIMISER)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{folder} is not a complete checkpoint: {error}") from error
    if _RANDOM not in moments:
        raise ModelError(f"{folder} is not a complete checkpoint: {_OPTIMISER} holds no {_RANDOM}")
    if _shapes(saved) != _shapes(trainer.learning()):
        raise ModelError(f"{folder} holds tensors of other names or shapes than {trainer.policy.path}.")
    trainer.take(saved, state.policy_version)
    load_moments(trainer, moments, state)
    return state


def _refuse_other_training(trainer: Trainer, state: CheckpointState, folder: Path) -> None:
    settings = trainer.settings
    if state.adapter != settings.adapter:
        had, has = (_tuning(adapter) for adapter in (state.adapter, settings.adapter))
        raise ConfigError(
            f"{folder} was trained with {had}, this run has {has}; set [policy] so, or give the run another "
            "name"
        )
    if state.optimiser != settings.optimiser:
        raise ConfigError(
            f"{folder} was trained with train.optimiser = {state.optimiser!r}, this run has "
            f"{settings.optimiser!r}; set it so, or give the run another name"
        )


def _tuning(adapter: AdapterSpec | None) -> str:
    if adapter is None:
        return "tuning = 'full'"
    return f"tuning = 'lora', lora_rank = {adapter.rank}, lora_alpha = {adapter.alpha:g}"


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def moments_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The optimiser's moments by field and parameter, and the random state, on the CPU."""
    tensors = {_RANDOM: torch.random.get_rng_state()}
    for name, parameter in trainer.model.named_parameters():
        for field, value in trainer.optimiser.state.get(parameter, {}).items():
            tensors[f"{field}.{name}"] = torch.as_tensor(value).detach().cpu().contiguous()
    return tensors


def load_moments(trainer: Trainer, tensors: Mapping[str, torch.Tensor], state: CheckpointState) -> None:
    """Put moments, random state (`moments_of`) and counters into `trainer`."""
    trainer.updates = state.updates
    trainer.skipped_steps = state.skipped_steps
    if trainer.slow_fast is not None and state.slow_fast is not None:
        trainer.slow_fast.state = state.slow_fast
    torch.random.set_rng_state(tensors[_RANDOM])
    entries: dict[str, dict[str, torch.Tensor | int]] = {}
    for key, tensor in tensors.items():
        if key == _RANDOM:
            continue
        field, _, name = key.partition(".")
        # The only whole numbers are the 8-bit optimiser's step counts, which it keeps outside of tensors.
        is_count = tensor.dtype is torch.int64
        entries.setdefault(name, {})[field] = int(tensor) if is_count else tensor
    trainer.optimiser.state.clear()
    for name, parameter in trainer.model.named_parameters():
        if name in entries:
            trainer.optimiser.state[parameter] = {
                field: value if isinstance(value, int) else value.to(parameter.device)
                for field, value in entries[name].items()
            }


def _on_cpu(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}

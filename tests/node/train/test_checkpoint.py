"""Checkpoints: loadable by others, byte-exact to resume, complete or absent."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from node.rollout.adapter import AdapterSpec
from node.rollout.engine.base import GenerationRequest, TokenSequence
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.train.checkpoint import (
    checkpoints_of,
    load_checkpoint,
    prune,
    read_state,
    restore,
    resume,
    save_checkpoint,
    take_weights,
)
from node.train.settings import TrainSettings
from node.train.slow_fast import SlowFastState
from node.train.step import Trainer
from node.weight.batch import TrainingBatch, collate
from protocol.errors import ConfigError, ModelError
from protocol.messages import Sampling
from tests.node.train.tolerance import near

SETTINGS = TrainSettings()


@pytest.fixture
def batch(policy: Policy, make_training_group: Callable[..., Any]) -> TrainingBatch:
    groups = [make_training_group(seed=1), make_training_group("peer", seed=2)]
    return collate(groups, SETTINGS.weight, policy)


def test_resume_is_byte_exact(policy: Policy, batch: TrainingBatch, tmp_path: Path) -> None:
    first = Trainer(policy, SETTINGS, policy_version=3)
    for _ in range(2):
        first.step(batch)
    save_checkpoint(first, tmp_path / "version_5")
    draw = torch.rand(3)
    reports = [first.step(batch) for _ in range(2)]

    second = Trainer(policy, SETTINGS)
    state = load_checkpoint(second, tmp_path / "version_5")
    assert (state.policy_version, state.updates, state.skipped_steps) == (5, 2, 0)
    assert torch.equal(torch.rand(3), draw)
    resumed = [second.step(batch) for _ in range(2)]
    for one, other in zip(reports, resumed, strict=True):
        assert (one.loss, one.grad_norm, one.learning_rate, one.kl_start) == (
            other.loss,
            other.grad_norm,
            other.learning_rate,
            other.kl_start,
        )
    theirs = second.state_dict()
    for name, tensor in first.state_dict().items():
        assert tensor.numpy().tobytes() == theirs[name].numpy().tobytes()
    assert second.policy_version == first.policy_version == 7


def test_slow_fast_goes_on_where_it_was(policy: Policy, batch: TrainingBatch, tmp_path: Path) -> None:
    """Also once it has ended. A run that was begun without it begins with it."""
    settings = dataclasses.replace(SETTINGS, slow_fast=True)
    first = Trainer(policy, settings)
    assert first.slow_fast is not None
    first.slow_fast.state = SlowFastState(on=False, entropies=(1.0, 2.0))
    save_checkpoint(first, tmp_path / "v0")
    second = Trainer(policy, settings)
    load_checkpoint(second, tmp_path / "v0")
    assert second.slow_fast is not None
    assert second.slow_fast.state == first.slow_fast.state
    save_checkpoint(Trainer(policy, SETTINGS), tmp_path / "plain")
    load_checkpoint(second, tmp_path / "plain")
    assert second.slow_fast.state.entropies == (1.0, 2.0)
    load_checkpoint(Trainer(policy, SETTINGS), tmp_path / "v0")


LORA = dataclasses.replace(SETTINGS, adapter=AdapterSpec(rank=4, alpha=8.0), learning_rate=1e-2)
EIGHT_BITS = dataclasses.replace(SETTINGS, optimiser="adamw_8bit")
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")
needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(LORA, marks=needs_peft, id="adapter"),
        pytest.param(EIGHT_BITS, marks=needs_bitsandbytes, id="8 bits"),
    ],
)
def test_other_ways_to_train_resume_byte_exactly_too(
    policy: Policy, batch: TrainingBatch, tmp_path: Path, settings: TrainSettings
) -> None:
    first = Trainer(policy, settings)
    for _ in range(2):
        first.step(batch)
    save_checkpoint(first, tmp_path / "v2")
    for _ in range(2):
        first.step(batch)
    second = Trainer(policy, settings)
    second.step(batch)  # its own state is replaced, not added to
    load_checkpoint(second, tmp_path / "v2")
    reports = [second.step(batch) for _ in range(2)]
    assert (second.updates, reports[-1].policy_version) == (4, 4)
    theirs = second.state_dict()
    for name, tensor in first.state_dict().items():
        assert tensor.numpy().tobytes() == theirs[name].numpy().tobytes()


@pytest.mark.slow
@needs_peft
def test_others_load_an_adapter_merged_and_its_training_goes_on_undisturbed(
    policy: Policy, batch: TrainingBatch, tmp_path: Path
) -> None:
    trainer, undisturbed = (_seeded(policy) for _ in range(2))
    for _ in range(3):
        trainer.step(batch)
        undisturbed.step(batch)
        save_checkpoint(trainer, tmp_path / "made")
    for name, tensor in undisturbed.state_dict().items():
        assert torch.equal(trainer.state_dict()[name], tensor)
    sequences = [TokenSequence((2, 7, 9, 3), tuple(range(5, 25)))]
    merged = TransformersEngine(Policy.open(tmp_path / "made"))
    assert merged.logprobs(sequences)[0] == near(trainer.logprobs(sequences)[0], policy)
    start = TransformersEngine(policy).logprobs(sequences)[0]
    assert abs(merged.logprobs(sequences)[0] - start).max() > 1e-2
    greedy = merged.generate([GenerationRequest((2, 7, 3), 1, 0, Sampling(max_new_tokens=12))], greedy=True)
    ids = np.frombuffer(greedy[0][0].answer.token_ids, "<u4").tolist()
    with torch.no_grad():
        logits = trainer.model(input_ids=torch.tensor([[2, 7, 3, *ids[:-1]]])).logits[0, 2:]
    assert logits.argmax(-1).tolist() == ids


def _seeded(policy: Policy) -> Trainer:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Trainer(policy, LORA)


@needs_peft
@pytest.mark.slow
def test_a_run_goes_on_only_as_it_was_trained(policy: Policy, tmp_path: Path) -> None:
    save_checkpoint(Trainer(policy, LORA), tmp_path / "v0")
    engine = TransformersEngine(policy)
    with pytest.raises(
        ConfigError, match=r"tuning = 'lora', lora_rank = 4, lora_alpha = 8, this run has tuning = 'full'"
    ):
        resume(Trainer(policy, SETTINGS), engine, tmp_path)
    save_checkpoint(Trainer(policy, SETTINGS), tmp_path / "v0")
    with pytest.raises(ConfigError, match=r"this run has tuning = 'lora', lora_rank = 4"):
        resume(Trainer(policy, LORA), engine, tmp_path)
    trainer = Trainer(policy, SETTINGS)
    trainer.settings = EIGHT_BITS
    with pytest.raises(ConfigError, match=r"train.optimiser = 'adamw', this run has 'adamw_8bit'"):
        load_checkpoint(trainer, tmp_path / "v0")


def test_others_can_load_it(policy: Policy, batch: TrainingBatch, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = Trainer(policy, SETTINGS)
    trainer.step(batch)
    save_checkpoint(trainer, tmp_path / "made")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made", local_files_only=True)
    theirs = model.state_dict()
    for name, tensor in trainer.state_dict().items():
        assert torch.equal(theirs[name], tensor)
    assert tokenizer.chat_template
    index = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"] == {name: "model.safetensors" for name, _ in trainer.model.named_parameters()}
    reopened = Policy.open(tmp_path / "made")
    assert reopened.tokenizer_digest == policy.tokenizer_digest
    assert reopened.base_model != policy.base_model
    assert reopened.encode_prompt("1+1") == policy.encode_prompt("1+1")


def test_replaces_an_older_one_and_leaves_nothing_behind(
    policy: Policy, batch: TrainingBatch, tmp_path: Path
) -> None:
    trainer = Trainer(policy, SETTINGS)
    (tmp_path / ".latest.writing").mkdir()
    save_checkpoint(trainer, tmp_path / "latest")
    trainer.step(batch)
    save_checkpoint(trainer, tmp_path / "latest")
    assert read_state(tmp_path / "latest").policy_version == 1
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_nothing_is_pickled(policy: Policy, batch: TrainingBatch, tmp_path: Path) -> None:
    trainer = Trainer(policy, SETTINGS)
    trainer.step(batch)
    save_checkpoint(trainer, tmp_path / "made")
    assert {file.suffix for file in (tmp_path / "made").iterdir()} <= {".json", ".safetensors", ".jinja"}


def test_interrupted_writing_is_not_a_checkpoint(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(policy, SETTINGS)

    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("node.train.checkpoint.sync", broken)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(trainer, tmp_path / "made")
    assert list(tmp_path.iterdir()) == []  # half a checkpoint would keep the disk full
    with pytest.raises(ModelError, match="not a complete checkpoint"):
        read_state(tmp_path / "made")


def test_foreign_start_is_refused(policy: Policy, other_policy_path: Path, tmp_path: Path) -> None:
    save_checkpoint(Trainer(policy, SETTINGS), tmp_path / "made")
    other = Trainer(Policy.open(other_policy_path), SETTINGS)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(ModelError, match="began with the weights"):
        load_checkpoint(other, tmp_path / "made")
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())


def test_damaged_files_are_model_errors(policy: Policy, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    save_checkpoint(Trainer(policy, SETTINGS), folder)
    good = (folder / "trainer.json").read_bytes()
    (folder / "trainer.json").write_text(json.dumps({**json.loads(good), "extra": 1}))
    with pytest.raises(ModelError, match="extra"):
        load_checkpoint(Trainer(policy, SETTINGS), folder)
    (folder / "trainer.json").write_bytes(good)
    (folder / "optimiser.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match="not a complete checkpoint"):
        load_checkpoint(Trainer(policy, SETTINGS), folder)
    (folder / "optimiser.safetensors").write_bytes(safetensors.torch.save({"other": torch.zeros(1)}))
    trainer = Trainer(policy, SETTINGS, policy_version=7)
    with pytest.raises(ModelError, match="holds no random_state"):
        load_checkpoint(trainer, folder)
    assert trainer.policy_version == 7


def test_what_safetensors_makes_of_a_full_disk_is_an_os_error(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr("node.train.checkpoint.save_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        save_checkpoint(Trainer(policy, SETTINGS), tmp_path / "v0")


# --- the checkpoints of a run ------------------------------------------------------------------------------


def make_checkpoints(trainer: Trainer, folder: Path, *versions: int) -> None:
    for version in versions:
        trainer.policy_version = version
        save_checkpoint(trainer, folder / f"v{version}")


def test_checkpoints_are_sorted_by_version_and_the_incomplete_do_not_count(
    policy: Policy, other_policy_path: Path, tmp_path: Path
) -> None:
    assert checkpoints_of(tmp_path / "nowhere", policy.base_model) == []
    make_checkpoints(Trainer(policy, SETTINGS), tmp_path, 9, 100, 20)
    make_checkpoints(Trainer(Policy.open(other_policy_path), SETTINGS), tmp_path, 300)
    (tmp_path / "v400").mkdir()
    (tmp_path / ".v500.writing").mkdir()
    assert [path.name for path in checkpoints_of(tmp_path, policy.base_model)] == ["v100", "v20", "v9"]


def test_pruning_keeps_the_newest_and_what_is_not_ours(
    policy: Policy, other_policy_path: Path, tmp_path: Path
) -> None:
    make_checkpoints(Trainer(policy, SETTINGS), tmp_path, 9, 100, 20)
    make_checkpoints(Trainer(Policy.open(other_policy_path), SETTINGS), tmp_path, 3)
    for name in ("notes", ".v21.writing", ".v20.old"):
        (tmp_path / name).mkdir()
    prune(tmp_path, policy.base_model, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "v100", "v20", "v3"]


class Killed(BaseException):
    """The process ended here: nothing is caught, nothing is cleaned up."""


def kill_at_rename(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """End the process before its rename of this number, counted from 1."""
    rename, renamed = Path.rename, []

    def counted(path: Path, target: Path) -> Path:
        renamed.append(path)
        if len(renamed) == number:
            raise Killed
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", counted)


@pytest.mark.parametrize("number", [1, 2])
def test_a_kill_while_one_is_replaced_loses_neither(
    policy: Policy, batch: TrainingBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Before the first of the two renames both are there, before the second none has its name."""
    trainer = Trainer(policy, SETTINGS)
    make_checkpoints(trainer, tmp_path, 5)
    trainer.skipped_steps = 1
    kill_at_rename(monkeypatch, number)
    with pytest.raises(Killed):
        make_checkpoints(trainer, tmp_path, 5)
    monkeypatch.undo()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == ({"v5", ".v5.writing"} if number == 1 else {".v5.old", ".v5.writing"})

    restore(tmp_path)
    assert read_state(tmp_path / "v5").skipped_steps == (0 if number == 1 else 1)
    again = Trainer(policy, SETTINGS)
    resume(again, TransformersEngine(policy), tmp_path)
    assert again.policy_version == 5
    prune(tmp_path, policy.base_model, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["v5"]


@pytest.mark.parametrize("suffix", [".old", ".writing"])
def test_what_is_complete_under_another_name_is_never_removed(
    policy: Policy, tmp_path: Path, suffix: str
) -> None:
    trainer = Trainer(policy, SETTINGS)
    for act in (
        lambda: prune(tmp_path, policy.base_model, keep=2),
        lambda: make_checkpoints(trainer, tmp_path, 7),
    ):
        make_checkpoints(trainer, tmp_path, 5)
        (tmp_path / "v5").rename(tmp_path / f".v5{suffix}")
        (tmp_path / ".v6.writing").mkdir()
        (tmp_path / ".v6.writing" / "trainer.json").write_bytes(b"{")
        act()
        restore(tmp_path)
        assert read_state(tmp_path / "v5").policy_version == 5
        assert not (tmp_path / "v6").exists()


def test_a_trainer_goes_on_from_the_newest_checkpoint_that_can_be_read(
    policy: Policy, batch: TrainingBatch, tmp_path: Path
) -> None:
    first = Trainer(policy, SETTINGS)
    first.step(batch)
    make_checkpoints(first, tmp_path, 1)
    weights = first.state_dict()
    first.step(batch)
    make_checkpoints(first, tmp_path, 2)
    (tmp_path / "v2" / "model.safetensors").write_bytes(b"\xff" * 64)

    again, engine = Trainer(policy, SETTINGS), TransformersEngine(policy)
    resume(again, engine, tmp_path)
    assert (again.policy_version, engine.policy_version, again.updates) == (1, 1, 1)
    for name, tensor in weights.items():
        assert torch.equal(again.state_dict()[name], tensor)
        assert torch.equal(engine._model.state_dict()[name], tensor)
    fresh = Trainer(policy, SETTINGS)
    resume(fresh, engine, tmp_path / "nowhere")
    assert fresh.policy_version == 0


def test_a_published_version_is_taken_with_the_moments_as_they_are(
    policy: Policy, batch: TrainingBatch
) -> None:
    """As after a kill -9: the checkpoint is of version 1, version 5 was published, in bfloat16."""
    trainer, engine = Trainer(policy, TrainSettings()), TransformersEngine(policy)
    trainer.step(batch)
    moments = {
        name: trainer.optimiser.state[parameter]["exp_avg"].clone()
        for name, parameter in trainer.model.named_parameters()
    }
    published = {name: (tensor + 0.5).to(torch.bfloat16) for name, tensor in trainer.state_dict().items()}
    take_weights(trainer, engine, published, 5)
    assert trainer.policy_version == engine.policy_version == 5
    for name, tensor in trainer.state_dict().items():
        assert torch.equal(tensor, published[name].float())
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(trainer.optimiser.state[parameter]["exp_avg"], moments[name])
    sequence = [TokenSequence((5, 6), (7, 8))]
    assert engine.logprobs(sequence)[0] == near(trainer.logprobs(sequence)[0], policy)
    assert trainer.step(batch).policy_version == 6


def test_after_an_adopted_merge_a_resume_is_byte_exact_and_has_no_moments(
    policy: Policy, batch: TrainingBatch, tmp_path: Path
) -> None:
    first = Trainer(policy, SETTINGS)
    first.step(batch)
    merged = {name: (tensor + 0.5).to(torch.bfloat16) for name, tensor in first.state_dict().items()}
    first.adopt(merged, 2)
    save_checkpoint(first, tmp_path / "v2")
    second = Trainer(policy, SETTINGS)
    second.step(batch)  # moments that must go
    state = load_checkpoint(second, tmp_path / "v2")
    assert (state.policy_version, state.updates, second.updates) == (2, 0, 0)
    assert not second.optimiser.state
    for _ in range(2):
        ours, theirs = first.step(batch), second.step(batch)
        assert (ours.learning_rate, ours.policy_version) == (theirs.learning_rate, theirs.policy_version)
    resumed = second.state_dict()
    for name, tensor in first.state_dict().items():
        assert tensor.numpy().tobytes() == resumed[name].numpy().tobytes()


def test_published_weights_of_another_shape_change_nothing(policy: Policy) -> None:
    trainer, engine = Trainer(policy, TrainSettings()), TransformersEngine(policy)
    before = trainer.state_dict()
    name = next(iter(dict(trainer.model.named_parameters())))
    for wrong in ({}, {**before, name: before[name][:1]}):
        with pytest.raises(
            ModelError,
            match=r"the published version 5 .* of other names or shapes .*; remove <home>/state/chain",
        ):
            take_weights(trainer, engine, wrong, 5)
    assert (trainer.policy_version, engine.policy_version) == (0, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state_dict().items())

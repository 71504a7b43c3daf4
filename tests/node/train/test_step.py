"""One optimiser step: its gradient, its guard, its report."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from node.rollout.adapter import AdapterSpec
from node.rollout.engine.base import TokenSequence
from node.rollout.policy import Policy
from node.train import step
from node.train.objectives.presets.proximal import ppo_clip
from node.train.settings import TrainSettings
from node.train.step import OutOfMemoryError, Trainer
from node.weight.batch import TrainingBatch, collate
from node.weight.settings import Treatment, WeightSettings
from protocol.errors import ConfigError, ModelError
from tests.node.train.conftest import gradients
from tests.node.train.tolerance import near, rounding, same_gradients, summands

Make = Callable[..., Any]
SETTINGS = TrainSettings()
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")
needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def snapshot(trainer: Trainer) -> dict[str, bytes]:
    """Every byte of parameters and optimiser."""
    found = {name: tensor.numpy().tobytes() for name, tensor in trainer.state_dict().items()}
    for place, entries in enumerate(trainer.optimiser.state.values()):
        found |= {f"{place}.{name}": value.numpy().tobytes() for name, value in entries.items()}
    return found


def test_micro_batches_add_up(policy: Policy, batch: TrainingBatch) -> None:
    whole = gradients(Trainer(policy, SETTINGS), batch)
    for budget in (1, 60):
        parts = gradients(Trainer(policy, dataclasses.replace(SETTINGS, micro_batch_tokens=budget)), batch)
        same_gradients(parts, whole, policy)


def test_loss_is_the_sum_of_source_means(policy: Policy, groups: list[Any]) -> None:
    """Against loops over single sequences, with PPO's clip for everybody and no compatibility weight in the
    way. A peer's claim makes no ratio larger than 2."""
    settings = dataclasses.replace(
        SETTINGS, own=ppo_clip(clip_low=0.3, clip_high=0.1), weight=WeightSettings(external_weight=0.5)
    )
    groups = [dataclasses.replace(group, treatment=Treatment.OWN) for group in groups]
    model = policy.load_model().eval()
    sums, tokens = {"own": 0.0, "a": 0.0, "b": 0.0}, {"own": 0, "a": 0, "b": 0}
    for group in groups:
        for rollout, advantage in zip(group.rollouts, group.advantages, strict=True):
            ids = [*group.prompt_ids, *rollout.tokens_T.tolist()]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0] / group.temperature
            for place, token in enumerate(rollout.tokens_T.tolist()):
                row = logits[len(group.prompt_ids) - 1 + place]
                ratio = math.exp(float(torch.log_softmax(row, -1)[token]) - float(rollout.behaviour_T[place]))
                ratio = ratio if group.source == "own" else min(ratio, 2.0)
                clipped = min(max(ratio, 0.7), 1.1)
                sums[group.source] -= group.trust * min(ratio * advantage, clipped * advantage)
                tokens[group.source] += 1
    expected = sum(
        weight * sums[source] / tokens[source] for source, weight in (("own", 1), ("a", 1 / 2), ("b", 1 / 4))
    )
    report = Trainer(policy, settings).step(collate(groups, settings.weight, policy))
    # Log-probabilities of up to 5 nats decide the ratios, which are added.
    assert report.loss == pytest.approx(expected, abs=rounding(summands(policy), 5.0))
    rows = sum(len(group.rollouts) for group in groups)
    assert sum(share.loss for share in report.sources) == pytest.approx(report.loss, abs=rounding(rows, 5.0))


def test_padding_changes_nothing(policy: Policy, batch: TrainingBatch, make_training_group: Make) -> None:
    """A long zero-advantage row in another source widens the batch but must not move the own gradient."""
    own = [make_training_group(seed=1), make_training_group(seed=2)]
    wide = make_training_group("long", seed=9, prompt_ids=(2, *range(5, 45), 3), advantages=(0.0,) * 4)
    narrow = gradients(Trainer(policy, SETTINGS), collate(own, SETTINGS.weight, policy))
    widened = gradients(Trainer(policy, SETTINGS), collate([*own, wide], SETTINGS.weight, policy))
    same_gradients(widened, narrow, policy)


def test_step_moves_the_weights_and_counts(policy: Policy, batch: TrainingBatch) -> None:
    trainer = Trainer(policy, SETTINGS, policy_version=7)
    before = snapshot(trainer)
    report = trainer.step(batch)
    assert not report.skipped
    assert report.policy_version == trainer.policy_version == 8
    assert report.grad_norm > 0
    assert math.isfinite(report.loss)
    assert report.tokens == int(batch.mask_BT.sum())
    after = snapshot(trainer)
    assert all(after[name] != data for name, data in before.items())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_state_dict_is_a_copy(policy: Policy, batch: TrainingBatch) -> None:
    trainer = Trainer(policy, SETTINGS)
    state = trainer.state_dict()
    kept = state["model.norm.weight"].clone()
    trainer.step(batch)
    assert torch.equal(state["model.norm.weight"], kept)
    assert not torch.equal(trainer.state_dict()["model.norm.weight"], kept)


def test_warm_up(policy: Policy, batch: TrainingBatch) -> None:
    trainer = Trainer(policy, dataclasses.replace(SETTINGS, learning_rate=1e-3, warmup_steps=4))
    rates = [trainer.step(batch).learning_rate for _ in range(5)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])
    constant = Trainer(policy, dataclasses.replace(SETTINGS, learning_rate=1e-3, warmup_steps=0))
    assert constant.step(batch).learning_rate == 1e-3


def bits16(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}


@pytest.mark.parametrize(
    "optimiser", ["adamw", pytest.param("adamw_8bit", marks=[needs_bitsandbytes, pytest.mark.slow])]
)
def test_adopted_weights_are_trained_on_as_by_a_new_trainer(
    policy: Policy, batch: TrainingBatch, optimiser: Any
) -> None:
    settings = dataclasses.replace(SETTINGS, optimiser=optimiser)
    old, new = Trainer(policy, settings, policy_version=3), Trainer(policy, settings)
    for _ in range(3):
        old.step(batch)
    merged = bits16({name: tensor * 1.01 for name, tensor in old.state_dict().items()})
    old.adopt(merged, 7)
    for name, tensor in old.state_dict().items():
        assert torch.equal(tensor, merged[name].float()), name
    assert (old.policy_version, old.updates, len(old.optimiser.state)) == (7, 0, 0)
    with torch.no_grad():
        for name, parameter in new.model.named_parameters():
            parameter.copy_(merged[name])
    for warmed in (1, 2):
        rates = old.step(batch).learning_rate, new.step(batch).learning_rate
        assert rates == pytest.approx((SETTINGS.learning_rate * warmed / 5,) * 2)
        weights = new.state_dict()
        for name, tensor in old.state_dict().items():
            assert tensor.numpy().tobytes() == weights[name].numpy().tobytes(), name
    assert old.policy_version == 9


def test_taken_weights_keep_the_moments_and_what_does_not_fit_changes_nothing(
    policy: Policy, batch: TrainingBatch
) -> None:
    trainer = Trainer(policy, SETTINGS)
    trainer.step(batch)
    before, state = snapshot(trainer), trainer.state_dict()
    for wrong in ({}, {**state, "model.norm.weight": torch.zeros(3)}):
        for way in (trainer.take, trainer.adopt):
            with pytest.raises(ModelError, match="version 9 holds tensors of other names or shapes"):
                way(wrong, 9)
    assert (snapshot(trainer), trainer.policy_version, trainer.updates) == (before, 1, 1)
    trainer.take({name: tensor * 0 for name, tensor in state.items()}, 9)
    after = snapshot(trainer)
    assert {name for name in before if after[name] == before[name]} == set(before) - set(state)
    assert (trainer.policy_version, trainer.updates) == (9, 1)


def test_gradient_is_clipped_and_norm_reported_unclipped(policy: Policy, batch: TrainingBatch) -> None:
    expected = math.sqrt(
        sum(float((g**2).sum()) for g in gradients(Trainer(policy, SETTINGS), batch).values())
    )
    report = Trainer(policy, dataclasses.replace(SETTINGS, max_grad_norm=1e-3)).step(batch)
    assert report.grad_norm == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_guard_leaves_every_byte(policy: Policy, batch: TrainingBatch, bad: float) -> None:
    trainer = Trainer(policy, SETTINGS)
    trainer.step(batch)
    before = snapshot(trainer)
    report = trainer.step(dataclasses.replace(batch, advantages_B=torch.full_like(batch.advantages_B, bad)))
    assert report.skipped
    assert trainer.skipped_steps == 1
    assert report.policy_version == trainer.policy_version == 1
    assert snapshot(trainer) == before
    assert trainer.updates == 1
    assert not trainer.step(batch).skipped


def test_first_report(policy: Policy, make_training_group: Make) -> None:
    """Entropy by a plain forward; no divergence from the start before the first step."""
    group = make_training_group(seed=3, temperature=1.5)
    trainer = Trainer(policy, SETTINGS)
    model, total, tokens = policy.load_model().eval(), 0.0, 0
    for rollout in group.rollouts:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*group.prompt_ids, *rollout.tokens_T.tolist()]])).logits[
                0
            ]
        probs = torch.softmax(logits[len(group.prompt_ids) - 1 : -1] / 1.5, -1)
        total -= float((probs * probs.log()).sum())
        tokens += len(rollout.tokens_T)
    batch = collate([group], SETTINGS.weight, policy)
    first = trainer.step(batch)
    assert first.entropy == near(total / tokens, policy)
    assert first.kl_start == near(0.0, policy)
    second = trainer.step(batch)
    assert second.kl_start > 0


def test_start_divergence_by_hand(policy: Policy, make_training_group: Make) -> None:
    group = make_training_group(seed=3)
    trainer = Trainer(policy, dataclasses.replace(SETTINGS, learning_rate=1e-2, warmup_steps=0))
    batch = collate([group], SETTINGS.weight, policy)
    trainer.step(batch)
    total, tokens = 0.0, 0
    for rollout in group.rollouts:
        ids = torch.tensor([[*group.prompt_ids, *rollout.tokens_T.tolist()]])
        with torch.no_grad():
            now, start = (
                torch.log_softmax(m(input_ids=ids).logits[0, len(group.prompt_ids) - 1 : -1], -1)
                for m in (trainer.model, policy.load_model().eval())
            )
        delta = (start - now).gather(1, torch.from_numpy(rollout.tokens_T)[:, None])
        total += float((delta.exp() - 1 - delta).sum())
        tokens += len(rollout.tokens_T)
    assert trainer.step(batch).kl_start == pytest.approx(total / tokens, rel=1e-3)
    unmeasured = Trainer(policy, dataclasses.replace(SETTINGS, measure_start_kl=False))
    assert unmeasured.step(batch).kl_start == 0.0


def test_source_shares(policy: Policy, batch: TrainingBatch) -> None:
    own, a, b = Trainer(policy, SETTINGS).step(batch).sources
    assert [share.source for share in (own, a, b)] == ["own", "a", "b"]
    assert [share.groups for share in (own, a, b)] == [2, 2, 1]
    assert own.weight == 1.0
    assert a.weight == pytest.approx(0.75)  # lambda times mean trust
    assert b.weight == pytest.approx(1 / 2 * 0.9)
    for share in (own, a, b):
        assert 0 <= share.kept <= 1
        assert 0 <= share.ess <= 1 + 1e-6
        assert share.gap > 0
        assert share.advantage_abs > 0


def test_on_policy_has_full_effective_size(policy: Policy, make_training_group: Make) -> None:
    """mu taken from the trainer's own forward pass: ratios of one."""
    from node.rollout.engine.transformers import TransformersEngine

    group = make_training_group(seed=3)
    scored = TransformersEngine(policy).logprobs(
        [TokenSequence(group.prompt_ids, tuple(rollout.tokens_T.tolist())) for rollout in group.rollouts]
    )
    rollouts = tuple(
        dataclasses.replace(rollout, behaviour_T=logprobs, behaviour_sum=float(logprobs.sum()))
        for rollout, logprobs in zip(group.rollouts, scored, strict=True)
    )
    batch = collate([dataclasses.replace(group, rollouts=rollouts)], SETTINGS.weight, policy)
    [own] = Trainer(policy, SETTINGS).step(batch).sources
    assert own.gap == near(0.0, policy)
    assert own.ess == near(1.0, policy)
    assert own.kept == 1.0


def test_stored_logprobs_are_the_old_policy(policy: Policy, make_training_group: Make) -> None:
    """compat on a second use: far from the stored log-probabilities the clip removes the gradient."""
    import numpy as np

    group = make_training_group("peer", seed=3, advantages=(1.0,) * 4, rewards=(1.0,) * 4)
    stored = tuple(
        dataclasses.replace(rollout, ingestion_T=np.full(len(rollout.tokens_T), -30.0, np.float32))
        for rollout in group.rollouts
    )
    again = dataclasses.replace(group, rollouts=stored, uses=1)
    [share] = Trainer(policy, SETTINGS).step(collate([again], SETTINGS.weight, policy)).sources
    assert share.kept == 0.0
    [share] = Trainer(policy, SETTINGS).step(collate([group], SETTINGS.weight, policy)).sources
    assert share.kept == 1.0


def test_logprobs_are_those_of_an_engine_with_the_same_weights(policy: Policy) -> None:
    from node.rollout.engine.transformers import TransformersEngine

    sequences = [
        TokenSequence((2, 7, 3), (9, 10, 11, 12)),
        TokenSequence((2, *range(5, 20), 3), (5,), temperature=0.5),
        TokenSequence((2, 3), tuple(range(5, 40)), temperature=1.7),
    ]
    expected = TransformersEngine(policy).logprobs(sequences)
    for budget in (1, 60, 16_384):
        trainer = Trainer(policy, dataclasses.replace(SETTINGS, micro_batch_tokens=budget))
        for ours, theirs in zip(trainer.logprobs(sequences), expected, strict=True):
            assert ours.dtype == "float32"
            assert ours == near(theirs, policy)
    assert trainer.logprobs([]) == []


# --- too little memory -------------------------------------------------------------------------------------


def short_of_memory(monkeypatch: pytest.MonkeyPatch, trainer: Trainer, rows_that_fit: int) -> list[int]:
    """Make `trainer` fail above so many rows at a time; returns the sizes it tries, as it tries them."""
    tried: list[int] = []
    real = step.completion_logprobs

    def limited(model: torch.nn.Module, tokens_BL: torch.Tensor, *rest: Any) -> Any:
        if model is trainer.model:
            tried.append(len(tokens_BL))
            if len(tokens_BL) > rows_that_fit:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, tokens_BL, *rest)

    monkeypatch.setattr(step, "completion_logprobs", limited)
    return tried


def test_out_of_memory_halves_the_micro_batch_for_good(
    policy: Policy, batch: TrainingBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, plain = Trainer(policy, SETTINGS), Trainer(policy, SETTINGS)
    tried = short_of_memory(monkeypatch, small, 6)
    first, expected = small.step(batch), plain.step(batch)
    assert tried[0] == 20  # all rows at once
    assert max(tried[-3:]) <= 6
    assert small.micro_batch_tokens < int((batch.starts_B + batch.mask_BT.sum(-1)).max()) * 20
    assert first.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)  # nothing is counted twice
    assert first.loss == pytest.approx(expected.loss, abs=rounding(summands(policy), 1.0))
    assert plain.micro_batch_tokens == SETTINGS.micro_batch_tokens
    tried.clear()
    halved = small.micro_batch_tokens
    small.step(batch)
    assert small.micro_batch_tokens == halved
    assert max(tried) <= 6


def test_a_failure_in_the_middle_starts_from_clean_gradients(
    policy: Policy, batch: TrainingBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(policy, dataclasses.replace(SETTINGS, micro_batch_tokens=60))
    backward, calls = torch.autograd.backward, []

    def failing_once(loss: torch.Tensor) -> None:
        calls.append(loss)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        backward(loss)

    monkeypatch.setattr(torch.autograd, "backward", failing_once)
    report = trainer.step(batch)
    monkeypatch.undo()
    assert trainer.micro_batch_tokens <= 30
    assert report.grad_norm == pytest.approx(Trainer(policy, SETTINGS).step(batch).grad_norm, rel=1e-4)


def test_no_memory_for_one_rollout_is_an_error_that_leaves_every_byte(
    policy: Policy, batch: TrainingBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(policy, SETTINGS)
    trainer.step(batch)
    before = snapshot(trainer)
    tried = short_of_memory(monkeypatch, trainer, 0)
    with pytest.raises(
        OutOfMemoryError, match=r"no memory for a pass over one rollout of 1\d tokens; set policy"
    ):
        trainer.step(batch)
    assert tried[-1] == 1
    assert snapshot(trainer) == before
    assert trainer.policy_version == 1


def test_scoring_halves_its_passes_too(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [TokenSequence((2, 7, 3), tuple(range(5, 5 + length))) for length in (4, 9, 6, 12)]
    trainer = Trainer(policy, SETTINGS)
    expected = trainer.logprobs(sequences)
    real, most, tried = step.completion_logprobs, [2], []

    def limited(model: torch.nn.Module, tokens_BL: torch.Tensor, *rest: Any) -> Any:
        tried.append(len(tokens_BL))
        if len(tokens_BL) > most[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, tokens_BL, *rest)

    monkeypatch.setattr(step, "completion_logprobs", limited)
    for ours, theirs in zip(trainer.logprobs(sequences), expected, strict=True):
        assert ours == near(theirs, policy)
    assert tried == [4, 2, 2]
    assert trainer.micro_batch_tokens == 30  # half of four rows of fifteen
    most[0] = 0
    with pytest.raises(OutOfMemoryError, match="no memory for a pass over one rollout of 15 tokens"):
        trainer.logprobs(sequences)


def test_no_memory_for_the_moments_is_one_sentence(
    policy: Policy, batch: TrainingBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(policy, SETTINGS)

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer.optimiser, "step", full)
    with pytest.raises(OutOfMemoryError, match="no memory for the trainer's weights and moments; set policy"):
        trainer.step(batch)
    assert (trainer.policy_version, trainer.updates) == (0, 0)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


# --- an adapter, and moments in 8 bits ---------------------------------------------------------------------

LORA = dataclasses.replace(
    SETTINGS, adapter=AdapterSpec(rank=4, alpha=8.0), learning_rate=1e-2, warmup_steps=0
)


@pytest.mark.slow
@needs_peft
def test_only_the_adapter_learns_and_the_start_is_without_it(
    policy: Policy, batch: TrainingBatch, make_training_group: Make
) -> None:
    trainer = Trainer(policy, LORA)
    start = {name: tensor.clone() for name, tensor in policy.load_model().named_parameters()}
    state = trainer.state_dict()
    assert set(state) == {name for name in state if ".lora_" in name}
    first = trainer.step(batch)
    assert first.kl_start == near(0.0, policy)
    assert first.grad_norm > 0
    for name, tensor in trainer.model.get_base_model().named_parameters():
        if ".lora_" not in name:
            assert torch.equal(tensor, start[name.replace(".base_layer", "")]), name
    assert all(
        not torch.equal(state[name], new) for name, new in trainer.state_dict().items() if "_B" in name
    )

    group = make_training_group(seed=3)
    total, tokens = 0.0, 0
    for rollout in group.rollouts:
        ids = torch.tensor([[*group.prompt_ids, *rollout.tokens_T.tolist()]])
        with torch.no_grad():
            now, before = (
                torch.log_softmax(m(input_ids=ids).logits[0, len(group.prompt_ids) - 1 : -1], -1)
                for m in (trainer.model, policy.load_model())
            )
        delta = (before - now).gather(1, torch.from_numpy(rollout.tokens_T)[:, None])
        total += float((delta.exp() - 1 - delta).sum())
        tokens += len(rollout.tokens_T)
    assert total > 0
    report = trainer.step(collate([group], LORA.weight, policy))
    assert report.kl_start == pytest.approx(total / tokens, rel=1e-3)


@pytest.mark.slow
@needs_bitsandbytes
def test_moments_in_8_bits_make_nearly_the_same_steps(policy: Policy, batch: TrainingBatch) -> None:
    eight, plain = (
        Trainer(policy, dataclasses.replace(SETTINGS, optimiser=kind)) for kind in ("adamw_8bit", "adamw")
    )
    start = plain.state_dict()
    for _ in range(3):
        eight.step(batch)
        plain.step(batch)
    theirs = plain.state_dict()
    for name, tensor in eight.state_dict().items():
        moved = (theirs[name] - start[name]).norm()
        assert (tensor - theirs[name]).norm() < 0.2 * moved, name


def test_8_bits_without_bitsandbytes_is_a_config_error(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match="'adamw_8bit' and bitsandbytes cannot be used"):
        Trainer(policy, dataclasses.replace(SETTINGS, optimiser="adamw_8bit"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "adapter", [None, pytest.param(LORA.adapter, marks=needs_peft)], ids=["full", "lora"]
)
def test_recomputed_layers_give_the_same_step_and_keep_less(
    policy: Policy, batch: TrainingBatch, adapter: AdapterSpec | None
) -> None:
    kept: list[int] = []
    weights = []
    for recompute in (False, True):
        torch.manual_seed(1)  # of a new adapter
        trainer = Trainer(policy, dataclasses.replace(SETTINGS, recompute=recompute, adapter=adapter))
        kept.append(0)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[-1] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            trainer.model(input_ids=batch.tokens_BL, use_cache=False)
        trainer.step(batch)
        weights.append(trainer.state_dict())
    assert kept[1] < 0.5 * kept[0]
    for name, tensor in weights[0].items():
        assert torch.equal(weights[1][name], tensor), name

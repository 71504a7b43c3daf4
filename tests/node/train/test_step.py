"""One optimiser step: its gradient, its guard, its report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from node.rollout.policy import Policy
from node.train.batch import TrainingBatch, collate
from node.train.objectives import PpoClip
from node.train.settings import TrainSettings, Treatment
from node.train.step import Trainer

Make = Callable[..., Any]
SETTINGS = TrainSettings()


@pytest.fixture
def groups(make_training_group: Make) -> list[Any]:
    """Own groups and every treatment of foreign ones, with different trust."""
    return [
        make_training_group(seed=1),
        make_training_group(seed=2, temperature=0.7),
        make_training_group("a", seed=3, trust=0.5),
        make_training_group("a", seed=4, treatment=Treatment.HACPO, uses=1),
        make_training_group("b", seed=5, treatment=Treatment.GRAFT, trust=0.9),
    ]


@pytest.fixture
def batch(policy: Policy, groups: list[Any]) -> TrainingBatch:
    return collate(groups, SETTINGS, policy)


def gradients(trainer: Trainer, batch: TrainingBatch) -> dict[str, torch.Tensor]:
    trainer._accumulate(batch)
    return {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}


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
        for name, gradient in whole.items():
            assert torch.allclose(parts[name], gradient, atol=1e-6, rtol=1e-4), name


def test_loss_is_the_sum_of_source_means(policy: Policy, groups: list[Any]) -> None:
    """Against loops over single sequences, with PPO's clip for everybody and no compatibility weight in the
    way."""
    settings = dataclasses.replace(SETTINGS, own=PpoClip(clip_low=0.3, clip_high=0.1), external_weight=0.5)
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
                clipped = min(max(ratio, 0.7), 1.1)
                sums[group.source] -= group.trust * min(ratio * advantage, clipped * advantage)
                tokens[group.source] += 1
    expected = sum(
        weight * sums[source] / tokens[source] for source, weight in (("own", 1), ("a", 1 / 3), ("b", 1 / 6))
    )
    report = Trainer(policy, settings).step(collate(groups, settings, policy))
    assert report.loss == pytest.approx(expected, abs=1e-5)
    assert sum(share.loss for share in report.sources) == pytest.approx(report.loss, abs=1e-5)


def test_padding_changes_nothing(policy: Policy, batch: TrainingBatch, make_training_group: Make) -> None:
    """A long zero-advantage row in another source widens the batch but must not move the own gradient."""
    own = [make_training_group(seed=1), make_training_group(seed=2)]
    wide = make_training_group("long", seed=9, prompt_ids=(2, *range(5, 45), 3), advantages=(0.0,) * 4)
    narrow = gradients(Trainer(policy, SETTINGS), collate(own, SETTINGS, policy))
    widened = gradients(Trainer(policy, SETTINGS), collate([*own, wide], SETTINGS, policy))
    for name, gradient in narrow.items():
        assert torch.allclose(widened[name], gradient, atol=1e-6, rtol=1e-4), name


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
    batch = collate([group], SETTINGS, policy)
    first = trainer.step(batch)
    assert first.entropy == pytest.approx(total / tokens, abs=1e-5)
    assert first.kl_start == pytest.approx(0.0, abs=1e-6)
    second = trainer.step(batch)
    assert second.kl_start > 0


def test_start_divergence_by_hand(policy: Policy, make_training_group: Make) -> None:
    group = make_training_group(seed=3)
    trainer = Trainer(policy, dataclasses.replace(SETTINGS, learning_rate=1e-2, warmup_steps=0))
    batch = collate([group], SETTINGS, policy)
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
    assert a.weight == pytest.approx(2 / 3 * 0.75)  # lambda times mean trust
    assert b.weight == pytest.approx(1 / 3 * 0.9)
    for share in (own, a, b):
        assert 0 <= share.kept <= 1
        assert 0 <= share.ess <= 1 + 1e-6
        assert share.gap > 0
        assert share.advantage_abs > 0


def test_on_policy_has_full_effective_size(policy: Policy, make_training_group: Make) -> None:
    """mu taken from the trainer's own forward pass: ratios of one."""
    from node.rollout.engine.base import TokenSequence
    from node.rollout.engine.transformers import TransformersEngine

    group = make_training_group(seed=3)
    scored = TransformersEngine(policy).logprobs(
        [TokenSequence(group.prompt_ids, tuple(rollout.tokens_T.tolist())) for rollout in group.rollouts]
    )
    rollouts = tuple(
        dataclasses.replace(rollout, behaviour_T=logprobs, behaviour_sum=float(logprobs.sum()))
        for rollout, logprobs in zip(group.rollouts, scored, strict=True)
    )
    batch = collate([dataclasses.replace(group, rollouts=rollouts)], SETTINGS, policy)
    [own] = Trainer(policy, SETTINGS).step(batch).sources
    assert own.gap == pytest.approx(0.0, abs=1e-5)
    assert own.ess == pytest.approx(1.0, abs=1e-5)
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
    [share] = Trainer(policy, SETTINGS).step(collate([again], SETTINGS, policy)).sources
    assert share.kept == 0.0
    [share] = Trainer(policy, SETTINGS).step(collate([group], SETTINGS, policy)).sources
    assert share.kept == 1.0

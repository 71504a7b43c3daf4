"""A merge that is judged: what is adopted and what is not, and which version is which weights afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from node.clock import VirtualClock, run_virtual
from node.config import MergeConfig
from node.events import Event, MergeJudged, Notice, decode_event, encode_event
from node.rollout.engine.base import EngineError, GenerationRequest, TokenSequence
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.supervise import StageGauge
from node.train.settings import TrainSettings
from node.train.step import Trainer
from node.weight.batch import TrainingBatch, collate
from node.weights.chain.bf16 import U16, to_bits, to_tensors
from node.weights.engine_sync import EngineSync, SyncSettings
from node.weights.merge.adopt import MergeAdoption
from node.weights.merge.merger import Merge
from node.weights.merge.resolve import Used
from protocol.messages import Sampling
from tests.node.runtimes import make_runtime

if TYPE_CHECKING:
    from node.train.evaluate import HeldOut
    from node.weights.merge.merger import Merger
    from node.weights.publish import VersionPublisher

SEQUENCES = [TokenSequence((2, 7, 9, 3), tuple(range(5, 25)))]
SETTINGS = TrainSettings(measure_start_kl=False)
AUTHORS = ("alice", "bob")


class Failing(TransformersEngine):
    """Raises at the `failing`-th call of `update` or of `generate`."""

    failing: tuple[str, int] = ("", 0)

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.calls: list[str] = []

    def _count(self, what: str) -> None:
        self.calls.append(what)
        if self.failing == (what, self.calls.count(what)):
            raise EngineError("as told")

    def update(self, state: Mapping[str, torch.Tensor], policy_version: int) -> None:
        self._count("update")
        super().update(state, policy_version)

    def generate(self, requests: Sequence[GenerationRequest], *, greedy: bool = False) -> Any:
        self._count("generate")
        return super().generate(requests, greedy=greedy)


class Bench:
    """A trainer at version 4 with moments, whose weights bfloat16 holds exactly, and its engine. A prompt's
    reward is 1 where the answer is the one that the weights of the beginning give, or with `other` is not."""

    def __init__(self, policy: Policy, batch: TrainingBatch, *, prompts: int = 24) -> None:
        self.trainer = Trainer(policy, SETTINGS, policy_version=3)
        self.trainer.step(batch)
        self.bits = to_bits(self.trainer.state_dict())
        self.trainer.take(to_tensors(self.bits), 4)
        self.engine = Failing(policy)
        TransformersEngine.update(self.engine, self.trainer.state_dict(), 4)
        self.other = False
        self.probed: list[int] = []
        self.published: list[tuple[int, bool]] = []
        self.events: list[Event] = []
        self.merge: Merge | None = None
        self._requests = [
            GenerationRequest((2, 5 + number, 3), 1, number, Sampling(max_new_tokens=6))
            for number in range(prompts)
        ]
        self._answers = self._generated()
        self.engine.calls.clear()
        runtime = make_runtime(costs_s={"evaluate": 2.0, "train": 0.5}, events=self.events)
        self.sync = EngineSync(
            runtime,
            self.trainer,
            self.engine,
            cast("HeldOut", self),
            cast("VersionPublisher", self),
            SyncSettings(tolerance=1e-3, probe_every=1000, sequential=False),
        )
        self.adoption = MergeAdoption(
            runtime,
            self.trainer,
            self.sync,
            cast("Merger", self),
            cast("HeldOut", self),
            MergeConfig(confidence=0.95, tolerance=0.0),
        )

    @property
    def notices(self) -> list[tuple[str, str]]:
        return [(event.level, event.text) for event in self.events if isinstance(event, Notice)]

    # --- in place of a merger, a publisher, held-out prompts ---

    gauge = StageGauge("broadcast", VirtualClock(), "a new version")

    def take(self) -> Merge | None:
        merge, self.merge = self.merge, None
        return merge

    def offer(self, policy_version: int, state: object, *, anchor: bool = False) -> None:
        self.published.append((policy_version, anchor))

    def prompts(self) -> list[Any]:
        return [SimpleNamespace(text=text, environment="") for text in ("12", "345")]

    def rewards(self, prompts: int = 64) -> list[float]:
        self.probed.append(self.engine.policy_version)
        pairs = zip(self._generated(), self._answers, strict=True)
        return [float((answer == first) is not self.other) for answer, first in pairs]

    def _generated(self) -> list[str]:
        return [rollout.text for (rollout,) in self.engine.generate(self._requests)]

    def next(self, bits: dict[str, U16] | None) -> bool:
        """With this merge ready; None: with none."""
        if bits is not None:
            used = tuple(Used(author, "7" * 64, 0, 1.0, 1.0, 0.5) for author in AUTHORS)
            self.merge = Merge(bits, "d" * 64, "c" * 64, used, ())
        return run_virtual(self.adoption.next())

    @property
    def judged(self) -> MergeJudged:
        (event,) = [each for each in self.events if isinstance(each, MergeJudged)]
        assert decode_event(encode_event(event)) == event  # finite: JSON has no infinity
        return event

    def snapshot(self) -> dict[str, bytes]:
        """Every byte of weights and moments."""
        found = {name: tensor.numpy().tobytes() for name, tensor in self.trainer.state_dict().items()}
        for place, entries in enumerate(self.trainer.optimiser.state.values()):
            found |= {f"{place}.{name}": value.numpy().tobytes() for name, value in entries.items()}
        return found

    def assert_engine_is_trainer(self) -> None:
        assert self.engine.policy_version == self.trainer.policy_version
        np.testing.assert_allclose(
            self.engine.logprobs(SEQUENCES)[0], self.trainer.logprobs(SEQUENCES)[0], atol=1e-5
        )


@pytest.fixture(scope="module")
def policy(tiny_policy_path: Path) -> Policy:
    return Policy.open(tiny_policy_path)


@pytest.fixture
def bench(policy: Policy, make_training_group: Callable[..., Any]) -> Callable[..., Bench]:
    batch = collate([make_training_group(seed=1)], SETTINGS.weight, policy)
    return lambda **options: Bench(policy, batch, **options)


def zeros(bits: Mapping[str, U16]) -> dict[str, U16]:
    """Answers at random."""
    return {name: np.zeros_like(array) for name, array in bits.items()}


def test_the_probe_is_repeatable(bench: Callable[..., Bench]) -> None:
    made = bench()
    assert made.rewards() == made.rewards() == [1.0] * 24


def test_nothing_happens_while_no_merge_is_ready(bench: Callable[..., Bench]) -> None:
    made = bench()
    before = made.snapshot()
    assert not made.next(None)
    assert (made.events, made.published, made.engine.calls) == ([], [], [])
    assert made.snapshot() == before


def test_a_merge_that_changes_no_reward_is_adopted(bench: Callable[..., Bench]) -> None:
    made = bench()
    assert made.next(made.bits)
    assert made.probed == [4, 5]
    assert (made.trainer.policy_version, made.trainer.updates) == (5, 0)
    assert made.published == [(5, True)]
    judged = made.judged
    assert (judged.policy_version, judged.adopted, judged.prompts) == (5, True, 24)
    assert (judged.gain, judged.lower_bound) == (0.0, 0.0)
    assert (judged.contributions, judged.authors) == ("c" * 64, AUTHORS)
    assert judged.why.startswith("adopted: mean reward +0.0000 over 24 prompts")
    assert judged.judge_s == pytest.approx(2.0 + 0.5 + 2.0 + 3 * 0.5)  # probe, then adopt, copy, update
    made.assert_engine_is_trainer()
    assert not made.next(None)  # once


def test_a_better_merge_is_taken_over_exactly_with_an_optimiser_as_new(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.other = True  # what the policy answers is wrong now
    assert made.trainer.optimiser.state
    merged = zeros(made.bits)
    assert made.next(merged)
    assert made.judged.gain > 0.5
    for name, tensor in made.trainer.state_dict().items():
        assert torch.equal(tensor, to_tensors(merged)[name].float())
    assert not made.trainer.optimiser.state
    assert made.trainer.learning_rate() == pytest.approx(SETTINGS.learning_rate / SETTINGS.warmup_steps)
    made.assert_engine_is_trainer()


def test_a_damaged_merge_leaves_the_training_as_it_was_under_a_new_number(
    bench: Callable[..., Bench],
) -> None:
    made = bench()
    before = made.snapshot()
    assert not made.next(zeros(made.bits))
    assert made.probed == [4, 5]
    assert made.snapshot() == before
    assert (made.trainer.policy_version, made.trainer.updates) == (6, 1)
    assert made.published == [(6, False)]  # 5 were the merged weights, and nobody gets them
    judged = made.judged
    assert (judged.policy_version, judged.adopted, judged.prompts) == (6, False, 24)
    assert judged.lower_bound <= judged.gain < -0.5
    made.assert_engine_is_trainer()
    assert made.notices == [("info", f"a merge of 2 trainers was {made.judged.why}")]


def test_too_few_prompts_adopt_nothing_and_the_event_has_numbers(bench: Callable[..., Bench]) -> None:
    made = bench(prompts=8)
    assert not made.next(made.bits)
    judged = made.judged
    assert (judged.policy_version, judged.prompts, judged.gain, judged.lower_bound) == (6, 8, 0.0, 0.0)
    assert "8 prompts say too little" in judged.why


@pytest.mark.parametrize("failing", [("generate", 1), ("update", 1), ("generate", 2)])
def test_an_engine_that_fails_at_the_probe_gets_its_weights_back(
    bench: Callable[..., Bench], failing: tuple[str, int]
) -> None:
    made = bench()
    made.engine.failing = failing
    before = made.snapshot()
    assert not made.next(made.bits)
    assert made.snapshot() == before
    assert (made.trainer.policy_version, made.published) == (6, [(6, False)])
    made.assert_engine_is_trainer()
    assert (made.judged.adopted, made.judged.prompts, made.judged.why) == (False, 0, "not adopted: as told")
    [(level, text)] = made.notices
    assert level == "warning"
    assert "failed when it was judged: as told" in text


def test_weights_of_another_shape_are_the_engines_to_refuse(bench: Callable[..., Bench]) -> None:
    made = bench()
    assert not made.next({**made.bits, "model.norm.weight": np.zeros(3, np.uint16)})
    assert "weights do not fit" in made.judged.why
    made.assert_engine_is_trainer()


def test_an_engine_that_is_dead_ends_the_node(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.engine.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        made.next(made.bits)


def test_a_node_that_does_not_share_does_not_merge(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.sync.not_sharing = "as told"
    assert not made.next(made.bits)
    assert made.merge is not None
    assert (made.engine.calls, made.trainer.policy_version) == ([], 4)


def test_an_engine_that_computes_otherwise_with_the_merge_is_noticed_at_once(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is probed every 1000 versions, and after each merge."""
    made = bench()
    honest = made.engine.logprobs

    def wrong(sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        return [scored - np.float32(0.5) for scored in honest(sequences)]

    monkeypatch.setattr(made.engine, "logprobs", wrong)
    assert made.next(made.bits)
    assert "differs from the trainer by 0.5 nats" in made.sync.not_sharing
    assert made.published == []

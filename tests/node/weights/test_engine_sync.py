"""New weights into the engine: what is probed, what a failed probe does, and who has the device."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from node.clock import run_virtual
from node.events import Event, Notice
from node.rollout.engine.base import EngineError, TokenSequence
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.supervise import StageGauge
from node.train.step import Trainer
from node.weights.chain.bf16 import to_bits
from node.weights.engine_sync import EngineSync, SyncSettings
from tests.node.runtimes import make_runtime

if TYPE_CHECKING:
    from node.train.evaluate import HeldOut
    from node.weights.publish import VersionPublisher


class Drifting(TransformersEngine):
    """Its log-probabilities are off by `off_nats`; a reload heals it `heals` times."""

    off_nats = 0.0
    heals = False
    reloads = 0
    probes = 0
    asleep = False

    def sleep(self) -> None:
        self.asleep = True
        super().sleep()

    def wake(self) -> None:
        self.asleep = False
        super().wake()

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        self.probes += 1
        return [scored + np.float32(self.off_nats) for scored in super().logprobs(sequences)]

    def reload(self, state: Mapping[str, torch.Tensor], policy_version: int) -> None:
        self.reloads += 1
        if self.heals:
            self.off_nats = 0.0
        super().reload(state, policy_version)


class Reference:
    """A trainer whose weights are the policy's, whatever their version."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.policy_version = 0
        self.asked = lambda: None
        """Called when log-probabilities are asked for."""
        self._engine = TransformersEngine(policy)
        self._state = policy.load_model().state_dict()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._state

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        self.asked()
        return self._engine.logprobs(sequences)


class Offers:
    """In place of a publisher."""

    def __init__(self, gauge: StageGauge) -> None:
        self.gauge = gauge
        self.taken: list[tuple[int, bool]] = []
        self.states: list[Mapping[str, torch.Tensor]] = []

    def offer(self, policy_version: int, state: Mapping[str, torch.Tensor], *, anchor: bool = False) -> None:
        self.taken.append((policy_version, anchor))
        self.states.append(state)


@pytest.fixture
def policy(tiny_policy_path: Path) -> Policy:
    return Policy.open(tiny_policy_path)


@pytest.fixture
def engine(policy: Policy) -> Drifting:
    return Drifting(policy)


class Bench:
    """An engine that is kept at a trainer's weights; half a second for each piece of work."""

    def __init__(
        self,
        policy: Policy,
        engine: Drifting,
        *,
        probe_every: int = 1,
        sequential: bool = False,
        trainer: Reference | Trainer | None = None,
    ) -> None:
        self.events: list[Event] = []
        runtime = make_runtime(costs_s={"train": 0.5}, events=self.events)
        self.trainer = trainer or Reference(policy)
        self.offers = Offers(StageGauge("broadcast", runtime.clock, "a new version"))
        texts = ("12", "345", "6" * 100)
        held_out = SimpleNamespace(
            prompts=lambda: [SimpleNamespace(text=text, environment="") for text in texts]
        )
        self.sync = EngineSync(
            runtime,
            cast("Trainer", self.trainer),
            engine,
            cast("HeldOut", held_out),
            cast("VersionPublisher", self.offers),
            SyncSettings(tolerance=1e-3, probe_every=probe_every, sequential=sequential),
        )

    @property
    def told(self) -> list[tuple[str, str]]:
        return [(event.level, event.text) for event in self.events if isinstance(event, Notice)]

    def update(self, *versions: int) -> None:
        async def main() -> None:
            for version in versions:
                self.trainer.policy_version = version
                await self.sync.update(version)

        run_virtual(main())


def test_weights_arrive_with_their_version_and_a_good_engine_is_not_mentioned(
    policy: Policy, engine: Drifting
) -> None:
    made = Bench(policy, engine)
    made.update(1, 2)
    assert (engine.policy_version, engine.probes, engine.reloads) == (2, 2, 0)
    assert (made.told, made.sync.not_sharing) == ([], "")


def test_the_embedded_engine_is_probed_now_and_then_and_vllm_always(policy: Policy, engine: Drifting) -> None:
    made = Bench(policy, engine, probe_every=3)
    made.update(*range(1, 8))
    assert engine.probes == 2
    engine.probes, engine.probe_each = 0, True
    made = Bench(policy, engine, probe_every=3)
    made.update(*range(1, 8))
    assert engine.probes == 7


def test_an_engine_that_a_reload_heals_goes_on_sharing(policy: Policy, engine: Drifting) -> None:
    made = Bench(policy, engine)
    engine.off_nats, engine.heals = 0.01, True
    made.update(1)
    assert (engine.policy_version, engine.reloads, made.sync.not_sharing) == (1, 1, "")
    [(level, text)] = made.told
    assert level == "warning"
    assert "failed its probe at version 1" in text


def test_an_engine_that_stays_wrong_trains_alone_and_is_reloaded_once(
    policy: Policy, engine: Drifting
) -> None:
    made = Bench(policy, engine)
    engine.off_nats = 0.01
    made.update(1, 2, 3)
    assert (engine.policy_version, engine.reloads) == (3, 1)
    assert "at version 1 differs from the trainer by 0.01 nats" in made.sync.not_sharing
    [(level, text)] = made.told
    assert level == "error"
    assert made.sync.not_sharing in text
    assert "trains on alone" in text


def test_an_engine_without_finite_numbers_ends_the_node(policy: Policy, engine: Drifting) -> None:
    made = Bench(policy, engine)
    engine.off_nats = float("-inf")
    with pytest.raises(EngineError, match="not all is finite"):
        made.update(1)


def test_a_real_trainer_and_the_embedded_engine_agree(policy: Policy, engine: Drifting) -> None:
    from node.train.settings import TrainSettings

    made = Bench(policy, engine, trainer=Trainer(policy, TrainSettings()))
    made.update(1)
    assert (engine.probes, engine.reloads, made.told) == (1, 0, [])


@pytest.mark.parametrize("sequential", [False, True])
def test_where_engine_and_trainer_take_turns_the_engine_sleeps_while_a_step_is_trained(
    policy: Policy, engine: Drifting, sequential: bool
) -> None:
    made = Bench(policy, engine, sequential=sequential)
    calls: list[str] = []
    engine.sleep = lambda: calls.append("sleep")  # type: ignore[method-assign]
    engine.wake = lambda: calls.append("wake")  # type: ignore[method-assign]

    async def main() -> None:
        async with made.sync.alone():
            calls.append("step")
            assert made.sync.awake.is_set() is not sequential
        with pytest.raises(RuntimeError):
            async with made.sync.alone():
                raise RuntimeError
        assert made.sync.awake.is_set()

    run_virtual(main())
    assert calls == (["sleep", "step", "wake", "sleep", "wake"] if sequential else ["step"])


@pytest.mark.parametrize("sequential", [False, True])
def test_what_was_not_made_by_a_step_is_always_probed_and_the_engine_sleeps_meanwhile(
    policy: Policy, engine: Drifting, sequential: bool
) -> None:
    made = Bench(policy, engine, probe_every=100, sequential=sequential)
    seen: list[tuple[str, bool]] = []

    def change() -> None:
        seen.append(("change", engine.asleep))
        made.trainer.policy_version = 7

    made.trainer.asked = lambda: seen.append(("reference", engine.asleep))
    run_virtual(made.sync.replace(change, anchor=True))
    assert seen == [("change", sequential), ("reference", sequential)]
    assert (engine.policy_version, engine.probes, engine.asleep) == (7, 1, False)
    assert made.sync.awake.is_set()
    made.update(8)
    assert engine.probes == 1  # every 100 versions, as before
    assert made.offers.taken == [(7, True), (8, False)]
    made.trainer.policy_version = 9  # as a roll-back gives it
    run_virtual(made.sync.replace(None, anchor=False))
    assert (engine.policy_version, engine.probes, made.offers.taken[-1]) == (9, 2, (9, False))


def test_a_step_that_is_cancelled_wakes_the_engine(policy: Policy, engine: Drifting) -> None:
    made = Bench(policy, engine, sequential=True)

    async def main() -> None:
        async def step() -> None:
            async with made.sync.alone():
                await asyncio.sleep(100)

        task = asyncio.create_task(step())
        await asyncio.sleep(1)
        assert (engine.asleep, made.sync.awake.is_set()) == (True, False)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (engine.asleep, made.sync.awake.is_set()) == (False, True)

    run_virtual(main())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_rounded_once_for_an_engine_in_bfloat16_and_for_followers(
    policy: Policy, dtype: str
) -> None:
    engine = Drifting(policy, dtype=dtype)
    made = Bench(policy, engine, probe_every=100)
    made.update(1)
    (state,) = made.offers.states
    published = to_bits(state, copy=False)
    for name, array in to_bits(made.trainer.state_dict()).items():
        assert np.array_equal(published[name], array)
        given = state[name].detach()
        shared = np.shares_memory(
            published[name], given.view(torch.int16 if dtype == "bfloat16" else torch.int32).numpy()
        )
        assert shared is (dtype == "bfloat16" and array.size > 0)
    assert engine.policy_version == 1

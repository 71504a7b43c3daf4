"""New weights into the engine: what is probed, what a failed probe does, and who has the device."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from node.clock import VirtualClock, run_virtual
from node.compute import InlineCompute
from node.rollout.engine.base import EngineError, TokenSequence
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.supervise import StageGauge
from node.train.step import Trainer
from node.weights.engine_sync import EngineBroadcast


class Drifting(TransformersEngine):
    """Its log-probabilities are off by `off_nats`; a reload heals it `heals` times."""

    off_nats = 0.0
    heals = False
    reloads = 0
    probes = 0

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

    policy_version = 0

    def __init__(self, policy: Policy) -> None:
        self._engine = TransformersEngine(policy)
        self._state = policy.load_model().state_dict()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._state

    def logprobs(self, sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        return self._engine.logprobs(sequences)


@pytest.fixture
def policy(tiny_policy_path: Path) -> Policy:
    return Policy.open(tiny_policy_path)


@pytest.fixture
def engine(policy: Policy) -> Drifting:
    return Drifting(policy)


def bench(
    policy: Policy, engine: Drifting, *, probe_every: int = 1, sequential: bool = False
) -> tuple[EngineBroadcast, list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    made = EngineBroadcast(
        cast("Trainer", Reference(policy)),
        engine,
        policy,
        prompts=lambda: ["12", "345", "6" * 100],
        tolerance=1e-3,
        probe_every=probe_every,
        sequential=sequential,
        compute=InlineCompute({"train": 0.5}),
        gauge=StageGauge("broadcast", VirtualClock(), "a new version"),
        notice=lambda level, text: told.append((level, text)),
    )
    return made, told


def broadcast(made: EngineBroadcast, *versions: int) -> None:
    async def main() -> None:
        for version in versions:
            made._trainer.policy_version = version
            await made.broadcast(version)

    run_virtual(main())


def test_weights_arrive_with_their_version_and_a_good_engine_is_not_mentioned(
    policy: Policy, engine: Drifting
) -> None:
    made, told = bench(policy, engine)
    broadcast(made, 1, 2)
    assert (engine.policy_version, engine.probes, engine.reloads) == (2, 2, 0)
    assert (told, made.not_sharing) == ([], "")


def test_the_embedded_engine_is_probed_now_and_then_and_vllm_always(policy: Policy, engine: Drifting) -> None:
    made, _ = bench(policy, engine, probe_every=3)
    broadcast(made, *range(1, 8))
    assert engine.probes == 2
    engine.probes, engine.probe_each = 0, True
    made, _ = bench(policy, engine, probe_every=3)
    broadcast(made, *range(1, 8))
    assert engine.probes == 7


def test_an_engine_that_a_reload_heals_goes_on_sharing(policy: Policy, engine: Drifting) -> None:
    made, told = bench(policy, engine)
    engine.off_nats, engine.heals = 0.01, True
    broadcast(made, 1)
    assert (engine.policy_version, engine.reloads, made.not_sharing) == (1, 1, "")
    [(level, text)] = told
    assert level == "warning"
    assert "failed its probe at version 1" in text


def test_an_engine_that_stays_wrong_trains_alone_and_is_reloaded_once(
    policy: Policy, engine: Drifting
) -> None:
    made, told = bench(policy, engine)
    engine.off_nats = 0.01
    broadcast(made, 1, 2, 3)
    assert (engine.policy_version, engine.reloads) == (3, 1)
    assert "at version 1 differs from the trainer by 0.01 nats" in made.not_sharing
    [(level, text)] = told
    assert level == "error"
    assert made.not_sharing in text
    assert "trains on alone" in text


def test_an_engine_without_finite_numbers_ends_the_node(policy: Policy, engine: Drifting) -> None:
    made, _ = bench(policy, engine)
    engine.off_nats = float("-inf")
    with pytest.raises(EngineError, match="not all is finite"):
        broadcast(made, 1)


def test_a_real_trainer_and_the_embedded_engine_agree(policy: Policy, engine: Drifting) -> None:
    from node.train.settings import TrainSettings

    made, told = bench(policy, engine)
    made._trainer = Trainer(policy, TrainSettings())
    broadcast(made, 1)
    assert (engine.probes, engine.reloads, told) == (1, 0, [])


@pytest.mark.parametrize("sequential", [False, True])
def test_where_engine_and_trainer_take_turns_the_engine_sleeps_while_a_step_is_trained(
    policy: Policy, engine: Drifting, sequential: bool
) -> None:
    made, _ = bench(policy, engine, sequential=sequential)
    calls: list[str] = []
    engine.sleep = lambda: calls.append("sleep")  # type: ignore[method-assign]
    engine.wake = lambda: calls.append("wake")  # type: ignore[method-assign]

    async def main() -> None:
        async with made.alone():
            calls.append("step")
            assert made.awake.is_set() is not sequential
        with pytest.raises(RuntimeError):
            async with made.alone():
                raise RuntimeError
        assert made.awake.is_set()

    run_virtual(main())
    assert calls == (["sleep", "step", "wake", "sleep", "wake"] if sequential else ["step"])


@pytest.mark.parametrize("sequential", [False, True])
def test_what_was_not_made_by_a_step_is_always_probed_and_the_engine_sleeps_meanwhile(
    policy: Policy, engine: Drifting, sequential: bool
) -> None:
    made, _ = bench(policy, engine, probe_every=100, sequential=sequential)
    seen: list[tuple[str, bool]] = []
    offered: list[tuple[int, bool]] = []
    made._proven = lambda version, state, *, anchor: offered.append((version, anchor))

    def change() -> None:
        seen.append(("change", engine._paused))
        made._trainer.policy_version = 7

    take = made._trainer.logprobs

    def logprobs(sequences: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        seen.append(("reference", engine._paused))
        return take(sequences)

    made._trainer.logprobs = logprobs  # type: ignore[method-assign]
    run_virtual(made.replace(change, anchor=True))
    assert seen == [("change", sequential), ("reference", sequential)]
    assert (engine.policy_version, engine.probes, engine._paused) == (7, 1, False)
    assert made.awake.is_set()
    broadcast(made, 8)
    assert engine.probes == 1  # every 100 versions, as before
    assert offered == [(7, True), (8, False)]
    made._trainer.policy_version = 9  # as a roll-back gives it
    run_virtual(made.replace(None, anchor=False))
    assert (engine.policy_version, engine.probes, offered[-1]) == (9, 2, (9, False))


def test_a_step_that_is_cancelled_wakes_the_engine(policy: Policy, engine: Drifting) -> None:
    made, _ = bench(policy, engine, sequential=True)

    async def main() -> None:
        async def step() -> None:
            async with made.alone():
                await asyncio.sleep(100)

        task = asyncio.create_task(step())
        await asyncio.sleep(1)
        assert (engine._paused, made.awake.is_set()) == (True, False)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (engine._paused, made.awake.is_set()) == (False, True)

    run_virtual(main())

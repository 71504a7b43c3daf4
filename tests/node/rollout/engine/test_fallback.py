"""An engine that is lost: another goes on with the newest weights and begins anew what was in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from node.rollout.engine.base import EngineError, Generation, GenerationRequest, TokenSequence
from node.rollout.engine.fallback import FallbackEngine
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from protocol.messages import Sampling
from tests.node.rollout.rounding import LOGPROB_NATS

REQUESTS = [GenerationRequest((2, 7 + place, 3), 2, place, Sampling(max_new_tokens=6)) for place in range(3)]


class Mortal(TransformersEngine):
    """Raises at everything once it is dead."""

    name = "mortal"
    dead = False

    def logprobs(self, sequences: Any) -> Any:
        self._check()
        return super().logprobs(sequences)

    def update(self, state: Any, policy_version: int) -> None:
        self._check()
        super().update(state, policy_version)

    def open(self, *, greedy: bool = False) -> Generation:
        generation = super().open(greedy=greedy)
        real: Callable[..., Any] = generation.wait

        def wait(**options: Any) -> Any:
            self._check()
            return real(**options)

        generation.wait = wait  # type: ignore[method-assign]
        return generation

    def _check(self) -> None:
        if self.dead:
            raise EngineError("started 6 times in a row")


@pytest.fixture
def policy(tiny_policy_path: Path) -> Policy:
    return Policy.open(tiny_policy_path)


@pytest.fixture
def mortal(policy: Policy) -> Mortal:
    return Mortal(policy)


@pytest.fixture
def errors() -> list[str]:
    return []


@pytest.fixture
def engine(policy: Policy, mortal: Mortal, errors: list[str]) -> FallbackEngine:
    def fall_back(error: EngineError) -> TransformersEngine:
        errors.append(str(error))
        return TransformersEngine(policy)

    return FallbackEngine(mortal, lost=lambda: mortal.dead, fall_back=fall_back)


def moved(policy: Policy) -> dict[str, Any]:
    state = {name: tensor.clone() for name, tensor in policy.load_model().state_dict().items()}
    state["model.norm.weight"] += 0.5
    return state


def test_a_living_engine_is_used_and_its_errors_stay(engine: FallbackEngine, errors: list[str]) -> None:
    assert engine.name == "mortal"
    with pytest.raises(EngineError, match="is empty"):
        engine.logprobs([TokenSequence((), (5,))])
    with pytest.raises(EngineError, match="is empty"):
        engine.generate([GenerationRequest((), 1, 0, Sampling(max_new_tokens=2))])
    assert engine.name == "mortal"
    assert errors == []


def test_the_other_one_has_the_newest_weights(
    engine: FallbackEngine, mortal: Mortal, policy: Policy, errors: list[str]
) -> None:
    sequences = [TokenSequence((2, 7, 3), (9, 10, 11))]
    engine.update(moved(policy), 5)
    expected = engine.logprobs(sequences)[0]
    mortal.dead = True
    assert engine.logprobs(sequences)[0] == pytest.approx(expected, abs=LOGPROB_NATS)
    assert (engine.name, engine.policy_version) == ("transformers", 5)
    engine.update(policy.load_model().state_dict(), 6)
    assert engine.policy_version == 6
    assert engine.logprobs(sequences)[0] != pytest.approx(expected, abs=1e-3)
    assert errors == ["started 6 times in a row"]  # once
    with pytest.raises(EngineError, match="closed"):
        mortal.generate(REQUESTS)


def test_an_update_that_kills_is_made_on_the_other_one(
    engine: FallbackEngine, mortal: Mortal, policy: Policy
) -> None:
    mortal.dead = True
    engine.update(moved(policy), 1)
    assert (engine.name, engine.policy_version) == ("transformers", 1)


def test_what_is_in_flight_is_begun_anew_under_the_same_tickets(
    engine: FallbackEngine, mortal: Mortal, policy: Policy
) -> None:
    expected = TransformersEngine(policy).generate(REQUESTS)
    generation = engine.open()
    first = generation.start(REQUESTS[:1])
    done = dict(generation.wait())
    tickets = first + generation.start(REQUESTS[1:])
    assert tickets == sorted(set(tickets))
    mortal.dead = True
    while generation.in_flight:
        done.update(generation.wait())
    assert sorted(done) == tickets
    for ticket, rollouts in zip(tickets, expected, strict=True):
        assert [rollout.answer.token_ids for rollout in done[ticket]] == [
            r.answer.token_ids for r in rollouts
        ]
    assert generation.sampled == sum(
        len(r.answer.token_ids) // 4 for rollouts in done.values() for r in rollouts
    )
    generation.close()


def test_a_closed_generation_stays_closed_on_the_other_one(engine: FallbackEngine, mortal: Mortal) -> None:
    generation = engine.open()
    generation.start(REQUESTS)
    generation.close()
    mortal.dead = True
    assert generation.wait() == []
    assert (generation.in_flight, generation.sampled) == (0, 0)


def test_a_closed_engine_is_not_replaced(engine: FallbackEngine, mortal: Mortal, errors: list[str]) -> None:
    engine.close()
    mortal.dead = True
    with pytest.raises(EngineError):
        engine.generate(REQUESTS)
    assert errors == []


def test_a_paused_engine_is_replaced_by_a_paused_one(engine: FallbackEngine, mortal: Mortal) -> None:
    engine.pause()
    mortal.dead = True
    engine.logprobs([TokenSequence((2, 7, 3), (9,))])
    successor = engine.current
    assert isinstance(successor, TransformersEngine)
    groups: list[object] = []
    thread = threading.Thread(target=lambda: groups.extend(engine.generate(REQUESTS[:1])))
    thread.start()
    engine.logprobs([TokenSequence((2, 7, 3), (9,))])  # a pass that does not wait
    assert groups == []
    engine.resume()
    thread.join(5)
    assert len(groups) == 1

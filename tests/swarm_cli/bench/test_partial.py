"""The two loops, on an engine whose time is counted in passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest

from node.rollout.engine.base import Engine, Generation, GenerationRequest
from protocol.messages import Rollout
from swarm_cli.bench.partial import partial, synchronous
from swarm_cli.bench.workload import Group

PASS_S, ROW_S = 1.0, 0.05
"""Of one decoding pass, and of each of its rows."""


class FakeEngine(Engine):
    """A pass gives every rollout in flight a token and costs PASS_S and ROW_S for each of them."""

    name = "fake"
    dtype = "float32"

    def __init__(self) -> None:
        self.now_s = 0.0
        self.updates: list[int] = []
        """Rollouts in flight at each."""
        self.widths: list[int] = []
        """Rollouts in flight in each pass."""
        self.closed = 0
        self.running = 0
        self.arrived = 0
        """Updates that were waited for."""

    policy_version = 0  # type: ignore[assignment]

    def open(self, *, greedy: bool = False) -> Generation:
        return FakeGeneration(self)

    def update(self, *_: Any) -> None:
        self.updates.append(self.running)

    def begin_update(self) -> Callable[[], None]:
        self.update()
        return self.resume

    def resume(self) -> None:
        self.arrived += 1

    logprobs = pause = close = update  # type: ignore[assignment]

    def clock(self) -> float:
        return self.now_s


class FakeGeneration(Generation):
    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.left: dict[int, int] = {}
        self.tickets = count()

    def start(self, requests: Sequence[GenerationRequest]) -> list[int]:
        fresh = {next(self.tickets): request.min_new_tokens for request in requests}
        self.left |= fresh
        self.engine.running = len(self.left)
        return list(fresh)

    def wait(self, *, tokens: int | None = None) -> list[tuple[int, list[Rollout]]]:
        done: list[int] = []
        while self.left and not done:
            self.engine.widths.append(len(self.left))
            self.engine.now_s += PASS_S + ROW_S * len(self.left)
            self.left = {ticket: left - 1 for ticket, left in self.left.items()}
            done = [ticket for ticket, left in self.left.items() if left == 0]
        for ticket in done:
            del self.left[ticket]
        self.engine.running = len(self.left)
        return [(ticket, []) for ticket in done]

    in_flight = property(lambda self: len(self.left))
    sampled = property(lambda self: 0)

    def close(self) -> None:
        self.engine.closed += 1


def workload(*lengths: tuple[int, ...]) -> list[Group]:
    return [Group((place + 1,), each) for place, each in enumerate(lengths)]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def test_synchronous_waits_for_the_longest(engine: FakeEngine) -> None:
    run = synchronous(
        engine,
        workload((1, 2), (3, 10), (2, 2), (2, 2)),
        groups_per_step=2,
        steps=2,
        update=engine.begin_update,
        clock=engine.clock,
    )
    assert run.tokens == 16 + 8
    assert engine.widths == [4, 3, 2, *[1] * 7, 4, 4]
    assert run.wall_s == pytest.approx(12 * PASS_S + 24 * ROW_S)
    assert run.tokens_per_s == pytest.approx(24 / 13.2)
    assert engine.updates == [0, 0], "between batches"


def test_partial_keeps_the_number_in_flight_and_updates_by_groups(engine: FakeEngine) -> None:
    run = partial(
        engine,
        workload(*[(1, 2), (3, 10), (2, 2), (2, 2)] * 20),
        groups_per_step=2,
        in_flight=4,
        tokens=48,
        update=engine.begin_update,
        clock=engine.clock,
    )
    assert set(engine.widths) == {4}
    assert engine.updates, "over rollouts under way"
    assert all(running > 0 for running in engine.updates)
    assert run.updates == len(engine.updates) - 1, "the first one starts the clock"
    assert 48 <= run.tokens < 48 + 40
    # Steady state: what is finished is what is sampled, but for rollouts that the borders cut.
    assert run.tokens_per_s == pytest.approx(4 / (PASS_S + 4 * ROW_S), rel=0.25)
    assert (engine.closed, engine.arrived) == (1, len(engine.updates))


def test_a_group_counts_when_its_last_rollout_is_done(engine: FakeEngine) -> None:
    """The short rollouts end early; nothing is updated before a long one is done as well."""
    partial(
        engine,
        workload(*[(1, 5)] * 30),
        groups_per_step=1,
        in_flight=2,
        tokens=1,
        update=engine.begin_update,
        clock=engine.clock,
    )
    assert len(engine.widths) >= 5


def test_partial_gives_up_its_rollouts_when_an_update_fails(engine: FakeEngine) -> None:
    def fail() -> Callable[[], None]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        partial(
            engine,
            workload(*[(1, 1)] * 9),
            groups_per_step=1,
            in_flight=2,
            tokens=9,
            update=fail,
            clock=engine.clock,
        )
    assert engine.closed == 1

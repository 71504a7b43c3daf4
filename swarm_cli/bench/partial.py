"""Partial rollouts against synchronous ones, on any engine: who finishes more tokens in the same time?

Synchronous: a batch is generated to its end, then the weights are updated, then comes the next batch; towards
its end few rollouts keep the engine busy. Partial: a constant number is in flight, and the weights are
updated whenever a step's worth of groups is complete, beside the loop that refills them. Both update after
the same number of groups and get the same groups in the same order. The clock of partial rollouts starts with
the first update, when rollouts of every age are under way. Not for: real training, whose rewards and steps
are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from node.rollout.engine.base import Engine
from swarm_cli.bench.workload import Group, rollout

__all__ = ["Run", "Update", "partial", "synchronous"]

Clock = Callable[[], float]
Update = Callable[[], Callable[[], object]]
"""Begins to give the engine new weights; what it returns waits until it has them."""


@dataclass(frozen=True)
class Run:
    """What was finished after the first update: tokens, and how long it took."""

    tokens: int
    wall_s: float
    updates: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


def synchronous(
    engine: Engine,
    groups: Iterable[Group],
    *,
    groups_per_step: int,
    steps: int,
    update: Update,
    clock: Clock = time.perf_counter,
) -> Run:
    """`steps` batches, each to its end, each followed by an update."""
    stream = iter(groups)
    tokens = 0
    began_s = clock()
    for _ in range(steps):
        batch = list(islice(stream, groups_per_step))
        engine.generate([request for group in batch for request in group.requests()])
        tokens += sum(sum(group.lengths) for group in batch)
        update()()
    return Run(tokens, clock() - began_s, steps)


def partial(
    engine: Engine,
    groups: Iterable[Group],
    *,
    groups_per_step: int,
    in_flight: int,
    tokens: int,
    update: Update,
    clock: Clock = time.perf_counter,
) -> Run:
    """Until `tokens` were finished after the first update, with `in_flight` rollouts at all times."""
    waiting = _rollouts(groups)
    members: dict[int, tuple[int, int]] = {}
    """For each ticket the number of its group and its length in tokens."""
    unfinished: dict[int, int] = {}
    complete, finished, updates = 0, 0, 0
    began_s: float | None = None
    arrived: Callable[[], object] = int
    generation = engine.open()
    try:
        while began_s is None or finished < tokens:
            fresh = list(islice(waiting, in_flight - generation.in_flight))
            tickets = generation.start([rollout(group.prompt_ids, length) for _, group, length in fresh])
            for ticket, (number, group, length) in zip(tickets, fresh, strict=True):
                members[ticket] = number, length
                unfinished.setdefault(number, len(group.lengths))
            for ticket, _ in generation.wait():
                number, length = members.pop(ticket)
                finished += length
                unfinished[number] -= 1
                complete += unfinished[number] == 0
            if complete < groups_per_step:
                continue
            complete -= groups_per_step
            arrived()
            arrived = update()
            updates += 1
            if began_s is None:
                began_s, finished, updates = clock(), 0, 0
        return Run(finished, clock() - began_s, updates)
    finally:
        generation.close()
        arrived()


def _rollouts(groups: Iterable[Group]) -> Iterator[tuple[int, Group, int]]:
    """Every rollout with its group's number, group by group."""
    for number, group in enumerate(groups):
        for length in group.lengths:
            yield number, group, length

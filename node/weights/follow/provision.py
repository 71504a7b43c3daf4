"""How many followers keep a learner busy, how often it publishes, and how stale their groups are: ECHO-2's
rules.

    Load (measured or given) + candidate workers --provision--> Provision, or OurFault in one sentence

Pure arithmetic over what `swarm plan` measured. RECONSTRUCTED: the cost of pipelined dissemination and the
staleness bound are ECHO-2's (arXiv 2602.02192), known from summaries only; the capacity and feasibility rules
are ours (ECHO-2's kappa = S - 1 can never satisfy the bound, for dissemination and rollout take at least one
step each). A sample is a group here. Not for choosing an owner (`choose.py`), nor for moving weights.

Assumed: all links alike and free of other traffic; a blob of the size that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.chunks import chunk_bytes_for
from protocol.constants import MAX_WEIGHTS_BYTES
from protocol.errors import OurFault

__all__ = [
    "HEADROOM",
    "Load",
    "Provision",
    "Worker",
    "busy_share",
    "by_cost",
    "depth",
    "dissemination_s",
    "exposed_s",
    "needed_groups_per_s",
    "provision",
    "resulting_staleness",
    "update_bytes",
]

HEADROOM = 1.1
"""Workers are activated until they give so many times the groups that are needed (F1)."""
UNION_GROWTH = 0.75
"""Share of a sparse update that is new in the next one: two steps in one update take 1.75 times the
bytes of one step (F2 read 0.45 to 0.77 off a figure; the upper end)."""
MAX_INTERVAL = 64
"""Longest publish interval that is looked at, in steps."""


@dataclass(frozen=True)
class Worker:
    """A node that could generate for the learner. `cost` is in any unit, the same for all: money an hour, or
    1 for each."""

    name: str
    groups_per_s: float
    cost: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one learner consumes, and what its weights take to travel. All numbers are positive, but
    `apply_s` and `rollout_s` may be 0."""

    step_s: float
    """One optimiser step that waits for nothing."""
    groups: float
    """B: groups that a step takes, own ones included."""
    own_groups_per_s: float
    """What the learner's own engine generates. It is always active, and a step needs one of its groups."""
    rollout_s: float
    """From the beginning of a follower's group to the learner's pool."""
    update_bytes: float
    """M: one published update, when every step is published."""
    link_bits_per_s: float
    """b: what a node sends and receives."""
    staleness: int
    """S: versions that a group may be behind when it is trained on."""
    full_bytes: float = math.inf
    """A copy of the weights: no update is larger."""
    apply_s: float = 0.0
    """How long a follower stands still to take a new version."""
    overlap: bool = True
    """Followers generate while the next version arrives. False: they wait for it."""

    @property
    def pace_s(self) -> float:
        """Seconds from step to step at best: a step needs one own group, however many followers there are."""
        return max(self.step_s, 1 / self.own_groups_per_s)


@dataclass(frozen=True, kw_only=True)
class Provision:
    """A plan. Without workers nothing is published for them: interval 1, all else of dissemination 0."""

    workers: tuple[Worker, ...]
    """To activate, cheapest first."""
    publish_every: int
    """kappa: steps between published versions."""
    update_bytes: float
    dissemination_s: float
    exposed_s: float
    """Part of one dissemination in which followers generate nothing."""
    needed_groups_per_s: float
    """Headroom included, the own engine's share too."""
    given_groups_per_s: float
    staleness: int
    """Versions that a follower's group is behind at most when it is trained on."""
    busy_share: float
    """Share of the learner's time that is training, with these workers."""
    enough: bool
    """False: the candidates together give less than what is needed."""

    @property
    def cost(self) -> float:
        return sum(worker.cost for worker in self.workers)


def depth(followers: int) -> float:
    """h ~ 1 + log2(n): hops of a pipelined broadcast to n followers, where senders double with each hop; 0
    without followers. RECONSTRUCTED (F1)."""
    return 1 + math.log2(followers) if followers else 0.0


def dissemination_s(size_bytes: float, link_bits_per_s: float, followers: int) -> float:
    """T_diss = (M/b) (1 + (h - 1)/C), C chunks as `protocol.chunks` cuts them; 0 without followers.
    RECONSTRUCTED (F1)."""
    if not followers:
        return 0.0
    size = min(max(1, math.ceil(size_bytes)), MAX_WEIGHTS_BYTES)
    chunks = math.ceil(size / chunk_bytes_for(size))
    return 8 * size_bytes / link_bits_per_s * (1 + (depth(followers) - 1) / chunks)


def update_bytes(load: Load, publish_every: int) -> float:
    """M of an update over several steps: M (1 + g (kappa - 1)), at most a full copy. Ours, g = UNION_GROWTH;
    ECHO-2 sends full copies, whose size does not grow."""
    return min(load.full_bytes, load.update_bytes * (1 + UNION_GROWTH * (publish_every - 1)))


def exposed_s(load: Load, dissemination: float) -> float:
    """What of one dissemination keeps followers from generating: all of it, or only the application where
    they overlap. Ours (F1)."""
    return load.apply_s + (0.0 if load.overlap else dissemination)


def needed_groups_per_s(load: Load, exposed: float, publish_every: int) -> float:
    """sum q_i >= B/(T_step - T_exposed/kappa), without headroom; infinite when followers would do nothing but
    receive. Ours (F1)."""
    left_s = load.pace_s - exposed / publish_every
    return load.groups / left_s if left_s > 0 else math.inf


def resulting_staleness(load: Load, dissemination: float, publish_every: int) -> int:
    """kappa + ceil(T_diss/T_step) + ceil(T_rollout/T_step); a plan is feasible when that is at most S, which
    is kappa <= S - ceil(T_diss/T_step) - ceil(T_rollout/T_step). Ours (F1)."""
    return publish_every + math.ceil(dissemination / load.pace_s) + math.ceil(load.rollout_s / load.pace_s)


def busy_share(load: Load, groups_per_s: float, exposed: float, publish_every: int) -> float:
    """Share of the learner's time that is training: T_step over the time from step to step, which is the
    longest of the step, one own group, and B/sum q_i + T_exposed/kappa. Ours."""
    return load.step_s / max(load.pace_s, load.groups / groups_per_s + exposed / publish_every)


def by_cost(candidates: Sequence[Worker]) -> list[Worker]:
    """The order of activation: cost per group, then the faster one, then the name (F1)."""
    return sorted(candidates, key=lambda each: (each.cost / each.groups_per_s, -each.groups_per_s, each.name))


def provision(load: Load, candidates: Sequence[Worker]) -> Provision:
    """The plan of least cost that keeps the learner busy; among those the freshest. When all candidates
    together are too slow, the plan that keeps it busiest, with `enough` False. Raises OurFault, in one
    sentence, when no publish interval satisfies the staleness bound."""
    ordered = by_cost(candidates)
    solved = [_solved(load, ordered, every) for every in range(1, MAX_INTERVAL + 1)]
    plans = [plan for plan in solved if plan is not None]
    if any(not plan.workers for plan in plans):
        return plans[0]
    in_time = [plan for plan in plans if plan.dissemination_s < plan.publish_every * load.pace_s]
    feasible = [plan for plan in in_time if plan.staleness <= load.staleness]
    if not feasible:
        raise OurFault(_refusal(load, in_time))
    return min(
        feasible,
        key=lambda plan: (
            not plan.enough,
            0.0 if plan.enough else -plan.busy_share,
            plan.cost,
            plan.publish_every,
        ),
    )


def _solved(load: Load, ordered: Sequence[Worker], publish_every: int) -> Provision | None:
    """The plan for one interval. More followers take longer to reach, and what is slower to reach needs more
    followers: both only grow, so going up from none ends at the fewest that suffice. None where they would do
    nothing but receive."""
    size, count = update_bytes(load, publish_every), 0
    while True:
        dissemination = dissemination_s(size, load.link_bits_per_s, count)
        exposed = exposed_s(load, dissemination) if count else 0.0
        needed = HEADROOM * needed_groups_per_s(load, exposed, publish_every)
        if math.isinf(needed):
            return None
        more = _activated(load.own_groups_per_s, ordered, needed)
        if more <= count:
            break
        count = more
    given = load.own_groups_per_s + sum(worker.groups_per_s for worker in ordered[:count])
    return Provision(
        workers=tuple(ordered[:count]),
        publish_every=publish_every,
        update_bytes=size if count else 0.0,
        dissemination_s=dissemination,
        exposed_s=exposed,
        needed_groups_per_s=needed,
        given_groups_per_s=given,
        staleness=resulting_staleness(load, dissemination, publish_every) if count else 0,
        busy_share=busy_share(load, given, exposed, publish_every),
        enough=given >= needed,
    )


def _activated(own_groups_per_s: float, ordered: Sequence[Worker], needed: float) -> int:
    """How many of the candidates are needed, all of them when they do not suffice."""
    given, count = own_groups_per_s, 0
    while given < needed and count < len(ordered):
        given += ordered[count].groups_per_s
        count += 1
    return count


def _refusal(load: Load, in_time: Sequence[Provision]) -> str:
    """Why there is no plan, and what to change."""
    pace = f"steps of {load.pace_s:.3g} s"
    link = f"{load.link_bits_per_s / 1e6:g} Mbit/s"
    if not in_time:
        one_s = dissemination_s(load.update_bytes, load.link_bits_per_s, 1)
        return (
            f"followers cannot keep up: an update of {load.update_bytes / 1e6:.3g} MB takes {one_s:.3g} s to "
            f"one of them over {link}, with {pace}, and no publish interval up to "
            f"{MAX_INTERVAL} makes room; use a faster link (--link-mbit), smaller updates (--update-mb), "
            "or longer steps (--groups)"
        )
    best = min(in_time, key=lambda plan: (plan.staleness, plan.publish_every))
    least = best.staleness - best.publish_every
    return (
        f"no publish interval keeps staleness within {load.staleness}: {load.staleness} - "
        f"ceil({best.dissemination_s:.3g} s for {best.update_bytes / 1e6:.3g} MB to {len(best.workers)} "
        f"followers over {link} / {load.pace_s:.3g} s a step) - ceil({load.rollout_s:.3g} s a rollout / "
        f"{load.pace_s:.3g} s) = {load.staleness - least}, where at least {best.publish_every} is needed; "
        f"allow --staleness {best.staleness}, or use a faster link, smaller updates or shorter rollouts"
    )

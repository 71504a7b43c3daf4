"""The weight stage: own groups and drawn peers' groups -> one weighted batch.

    own groups --------------------+
    pool --gate--> draw (peer, then group) --> treat --> check, pad, scale --> TrainingBatch --> trainer
           lag, age, quarantine       trust    advantages    lambda

`draw` is the stage's one verb: it waits for own groups, then a little for peers' groups while peers are
active, looks up trust and staleness on the event loop, and has `weigh` do the rest beside it, because
tokenising texts again and padding take tens of milliseconds. `weigh` is a plain function. A peer's group
whose numbers may not reach the optimiser is left out and counted; a bad own group is our bug and raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray
from torch import Tensor

from node.compute import Lane
from node.membership import Membership
from node.peers.book import PeerBook
from node.rollout.policy import Policy
from node.runtime import Runtime
from node.share.accepted import Accepted
from node.share.pool import ReplayPool
from node.supervise import StageGauge
from node.weight.batch import TrainingBatch, collate
from node.weight.groups import MIN_LOGPROB, OWN_SOURCE, TrainingGroup, training_group
from node.weight.own import OwnGroups
from node.weight.settings import WeightSettings
from node.weight.staleness import Staleness, judge_staleness
from node.weight.treatment import Treatments, open_treatments
from protocol.messages import Digest, Lineage

__all__ = ["Drawn", "LogprobRows", "WeightStage", "first_logprobs", "weigh"]

REMEMBERED_PROMPTS = 4096
"""Own prompts, for the count of groups whose prompt is shared."""

LogprobRows = tuple[NDArray[np.float32] | None, ...]
"""log pi of each token, one array per rollout of a group; None where none was trained on."""


class Drawn(NamedTuple):
    """A group of a step, with what was looked up about it."""

    accepted: Accepted
    staleness: Staleness
    trust: float = 1.0
    uses: int = 0
    """How often it was trained on before."""
    prompt_shared: bool = False
    """A peer's group: this node has answered the prompt lately."""
    follower: bool = False
    """A peer's group: its author is believed to generate with the policy that is trained here."""
    ingestion: LogprobRows = ()
    """log pi when it was first trained on; empty on first use."""


def weigh(
    drawn: Sequence[Drawn],
    treatments: Treatments,
    settings: WeightSettings,
    policy: Policy,
) -> TrainingBatch:
    """The batch of a step. Blocking. Raises TrainingDataError for a bad own group; bad groups of peers are
    left out and named in `refused`."""
    groups = [_group(each, policy) for each in drawn]
    return collate(treatments.treat(groups), settings, policy)


def first_logprobs(
    batch: TrainingBatch, logprobs_BT: NDArray[np.float32]
) -> dict[Digest, tuple[NDArray[np.float32] | None, ...]]:
    """For peers' groups on first use: log pi as the step met it, which later uses are clipped against."""
    found: dict[Digest, LogprobRows] = {}
    row = 0
    for group in batch.groups:
        count = len(group.rollouts)
        if group.source != OWN_SOURCE and all(rollout.ingestion_T is None for rollout in group.rollouts):
            # Below what a group may hold no clip tells the difference.
            rows: list[NDArray[np.float32] | None] = [
                logprobs_BT[row + place, : len(rollout.tokens_T)].clip(MIN_LOGPROB, 0.0)
                for place, rollout in enumerate(group.rollouts)
            ]
            if group.left_out is not None:
                rows.insert(group.left_out, None)
            found[group.group] = tuple(rows)
        row += count
    return found


class WeightStage:
    """Everything between the pool and the trainer."""

    def __init__(
        self,
        runtime: Runtime,
        membership: Membership,
        settings: WeightSettings,
        policy: Policy,
        own: OwnGroups,
        pool: ReplayPool,
        peers: PeerBook,
    ) -> None:
        self._runtime = runtime
        self._membership = membership
        self._settings = settings
        self._policy = policy
        self._own = own
        self._pool = pool
        self._peers = peers
        self._lineage = Lineage(membership.peer_id, policy.base_model, policy.tokenizer_digest)
        self._treatments = open_treatments(settings)
        self._ingestion: Mapping[Digest, LogprobRows] = {}
        self._answered: LRUCache[int, None] = LRUCache(REMEMBERED_PROMPTS)
        """Prompts of own groups."""
        self.gauge = StageGauge("weight", runtime.clock, "a step")

    @property
    def pool_size(self) -> int:
        """Groups in the pool."""
        return len(self._pool)

    async def draw(self, policy_version: int, *, wait: bool = True) -> TrainingBatch:
        """The next batch for this version: up to I own groups, at least one, and up to J of peers. Peers'
        groups are waited for only with `wait`, for a limited time, and while peers are active, so a node
        without peers trains alone. Raises TrainingDataError for a bad own group."""
        with self.gauge.waiting("own groups"):
            own = await self._own.take(self._settings.local_groups)
        external = await self._draw_external(policy_version, wait)
        for accepted in own:
            self._answered[accepted.group.prompt.index] = None
        with self.gauge.working():
            drawn = [Drawn(accepted, self._staleness(accepted, policy_version)) for accepted in own]
            drawn += [self._look_up(accepted, uses, policy_version) for accepted, uses in external]
            batch = await self._runtime.run(
                Lane.WEIGHT, weigh, drawn, self._treatments, self._settings, self._policy
            )
        for author, error in batch.refused:
            self._peers.rejected(author, error.reason)
        return batch

    def stepped(self, batch: TrainingBatch, logprobs_BT: Tensor | None) -> None:
        """A step on `batch` has ended. `logprobs_BT`: log pi of its completions before the step; None when
        the step came to nothing, and then peers' groups start at ratio one again."""
        self._own.done(sum(group.source == OWN_SOURCE for group in batch.groups))
        if logprobs_BT is not None:
            known = {**self._ingestion, **first_logprobs(batch, logprobs_BT.numpy())}
            # For as long as the pool may give them again.
            self._ingestion = {digest: rows for digest, rows in known.items() if digest in self._pool}

    async def _draw_external(self, policy_version: int, wait: bool) -> list[tuple[Accepted, int]]:
        """Up to J fit groups of the pool, each with the number of its earlier uses."""
        wanted = self._settings.external_groups
        if not wanted:
            return []
        deadline_s = self._runtime.monotonic_s() + self._settings.external_wait_s
        while True:
            self._pool.discard(lambda accepted: not self._is_fit(accepted, policy_version))
            left_s = deadline_s - self._runtime.monotonic_s()
            if len(self._pool) >= wanted or left_s <= 0 or not wait or not self._peers.active():
                return self._pool.draw(wanted)
            self._pool.arrived.clear()
            with self.gauge.waiting("peers' groups"):
                try:
                    async with asyncio.timeout(left_s):
                        await self._pool.arrived.wait()
                except TimeoutError:
                    continue

    def _is_fit(self, accepted: Accepted, policy_version: int) -> bool:
        """The gate: not too old, not too far behind its lineage, and its author not in quarantine."""
        quarantined = self._peers.quarantined(accepted.group.author)
        return not quarantined and self._staleness(accepted, policy_version).fresh

    def _staleness(self, accepted: Accepted, policy_version: int) -> Staleness:
        """A follower's group is held against the version trained here, another lineage's against the newest
        that its author announced."""
        group = accepted.group
        newest: int | None = policy_version
        if group.lineage != self._lineage:
            newest = self._peers.newest_version(group.author, group.lineage)
        return judge_staleness(
            group.policy_version,
            group.oldest_version,
            group.policy_version if newest is None else newest,
            group.prompt.window,
            int(self._membership.window()),
            self._membership.charter.rules,
        )

    def _look_up(self, accepted: Accepted, uses: int, policy_version: int) -> Drawn:
        group = accepted.group
        ours = group.lineage == self._lineage
        return Drawn(
            accepted,
            self._staleness(accepted, policy_version),
            trust=self._peers.trust(group.author),
            uses=uses,
            prompt_shared=group.prompt.index in self._answered,
            follower=ours and self._peers.may_claim(group.author, group.lineage),
            ingestion=self._ingestion.get(accepted.digest, ()),
        )


def _group(drawn: Drawn, policy: Policy) -> TrainingGroup:
    group = training_group(drawn.accepted, policy, follower=drawn.follower)
    rollouts = group.rollouts
    if drawn.ingestion:
        rollouts = tuple(
            replace(rollout, ingestion_T=row)
            for rollout, row in zip(group.rollouts, drawn.ingestion, strict=True)
        )
    return replace(
        group,
        rollouts=rollouts,
        trust=drawn.trust,
        lag=drawn.staleness.lag,
        age_windows=drawn.staleness.age_windows,
        uses=drawn.uses,
        prompt_shared=drawn.prompt_shared,
    )

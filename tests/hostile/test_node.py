"""A whole node under attack: nothing that a peer sends ends it, teaches it, or goes uncounted.

Items 19 and 22 of the list of hostile inputs through the node's real path: gossip, fetch, verification, pool,
optimiser. The attacker has a real identity and a real network stack, and is otherwise free.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from node.clock import run_virtual
from node.events import GroupJudged, Health, NodeStopped, PeersSeen, StepDone
from node.membership import Membership
from node.rollout.engine.base import GenerationRequest
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.generate import Generator, NoGroupError
from node.rollout.policy import Policy
from node.rollout.prompts import AssignedPrompt, Universe
from node.rollout.scoring import OwnScorer
from node.transport.base import Stream
from node.transport.memory import MemoryTransport
from protocol.codec import digest, encode
from protocol.constants import MAX_ENVELOPE_BYTES
from protocol.envelope import seal
from protocol.errors import LocalProtocolError, TransportError
from protocol.messages import (
    Announcement,
    BlobRef,
    BlobReply,
    Lineage,
    PeerId,
    PromptRef,
    RolloutGroup,
    Sampling,
)
from protocol.prompts import slots, window_of
from protocol.receipts import slot_digest
from protocol.rollouts import parse_tokens
from protocol.topics import (
    ANNOUNCE_PROTOCOL,
    BLOB_PROTOCOL,
    CHARTER_PROTOCOL,
    HELLO_PROTOCOL,
    RECONCILE_PROTOCOL,
    announcement_topic,
)
from tests.node.pushing import push
from tests.node.toy import Toy, ToySwarm
from tests.node.verify.world import identity
from tests.rollouts import changed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_delta")]
replace = msgspec.structs.replace
SETTLED_S = 7.0
"""By then the victim knows its neighbours and takes what they offer."""


class Mallory:
    """A member of the swarm that sends what it likes."""

    def __init__(self, swarm: ToySwarm, transport: MemoryTransport, victim: PeerId, policy: Policy) -> None:
        self.swarm = swarm
        self.victim = victim
        self.transport = transport
        self.identity = identity("mallory")
        self.peer_id = self.identity.peer_id
        self.policy = policy
        self.engine = TransformersEngine(policy)
        self.universe = Universe(swarm.swarm_id, swarm.charter, swarm.tasks)
        self.lineage = Lineage(self.peer_id, policy.base_model, policy.tokenizer_digest)
        self.generator = Generator(
            Membership(self.identity, swarm.charter, swarm.clock),
            self.lineage,
            policy,
            self.engine,
            OwnScorer(swarm.tasks),
            swarm.config("mallory"),
        )
        self.bodies: dict[str, bytes] = {}
        self.sequence = itertools.count(1)
        self.slot = itertools.count()
        transport.serve(BLOB_PROTOCOL, self.serve)

    @classmethod
    async def join(cls, swarm: ToySwarm, victim: Toy, policy: int = 1) -> Mallory:
        transport = swarm.network.transport(identity("mallory").peer_id)
        await transport.start()
        await transport.connect(f"/memory/p2p/{victim.peer_id}")
        return cls(swarm, transport, victim.peer_id, swarm.policies[policy])

    async def serve(self, stream: Stream) -> None:
        request = msgspec.msgpack.decode(await stream.receive())
        body = self.bodies[request["digest"]]
        await stream.send(encode(BlobReply(len(body))))
        await stream.send(body)

    def honest_group(self) -> RolloutGroup:
        """A group with mixed and true rewards, in the next own slot of this window."""
        window = window_of(self.swarm.charter, self.swarm.clock.now_ms())
        mine = slots(self.swarm.swarm_id, self.swarm.charter, window, self.peer_id)
        slot = next(self.slot) % len(mine)
        prompt = self.universe.item(mine[slot])
        sampling = Sampling(self.swarm.charter.max_new_tokens)
        assigned = AssignedPrompt(PromptRef(window, slot, mine[slot]), prompt)
        for seed in itertools.count():
            request = GenerationRequest(tuple(self.policy.encode_prompt(prompt.text)), 4, seed, sampling)
            (rollouts,) = self.engine.generate([request])
            (made,) = self.generator.complete([(assigned, rollouts, 0.0)], at_ms=0)
            assert not isinstance(made, NoGroupError)
            own, _ = made
            if len(set(own.rewards)) > 1:
                return own.group
        raise AssertionError

    def announcement(self, group: RolloutGroup, body: bytes) -> Announcement:
        self.bodies[digest(body)] = body
        return Announcement(
            lineage=group.lineage,
            policy_version=group.policy_version,
            mean_version=group.mean_version,
            oldest_version=group.oldest_version,
            prompt=group.prompt,
            completions=completions_of(group),
            rewards=tuple(each.reward for each in group.rollouts),
            body=BlobRef(digest(body), len(body)),
        )

    async def offer(self, group: RolloutGroup) -> None:
        """Announce and serve a group, whatever is in it."""
        body = msgspec.msgpack.encode(group)
        await self.gossip(msgspec.msgpack.encode(self.announcement(group, body)))

    async def gossip(self, payload: bytes) -> None:
        """Sign and publish any payload."""
        envelope = seal(
            self.identity,
            swarm_id=self.swarm.swarm_id,
            topic=announcement_topic(self.swarm.swarm_id),
            sequence=next(self.sequence),
            payload=payload,
            now_ms=self.swarm.clock.now_ms(),
            ttl_ms=60_000,
        )
        await push(self.transport, self.victim, envelope)


Attack = Callable[[Mallory, Toy], Awaitable[None]]


def attacked(
    tmp_path: Path,
    policies: Sequence[Policy],
    attack: Attack,
    check: Callable[[Toy, Toy, Mallory], None],
    **settings: Any,
) -> None:
    """A victim and an honest peer do 20 steps while `attack` runs; both end well and learn of each other."""

    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            victim = await swarm.add("victim", 0, train__steps=20, **settings)
            honest = await swarm.add("honest", 1, bootstraps=[victim], train__steps=20)
            mallory = await Mallory.join(swarm, victim)
            swarm.start()
            await asyncio.sleep(SETTLED_S)
            await attack(mallory, victim)
            await swarm.finished()
            for toy in (victim, honest):
                await toy.task
                assert toy.of(NodeStopped)[0].reason == "steps done"
                assert len(toy.of(StepDone)) == 20
                assert all(bool(torch.isfinite(tensor).all()) for tensor in toy.trainer.state_dict().values())
            assert honest.peer_id in trained_on(victim)
            assert victim.peer_id in trained_on(honest)
            check(victim, honest, mallory)

    run_virtual(main())


def trained_on(toy: Toy) -> set[str]:
    return {share.source for step in toy.of(StepDone) for share in step.sources}


def verdicts(toy: Toy, mallory: Mallory) -> Counter[str]:
    """Reasons by which what Mallory offered was refused, "" for what was accepted."""
    return Counter(event.reason for event in toy.of(GroupJudged) if event.author == mallory.peer_id)


def row(toy: Toy, mallory: Mallory) -> Any:
    return next(each for each in toy.of(PeersSeen)[-1].peers if each.peer_id == mallory.peer_id)


def unharmed(victim: Toy, honest: Toy, mallory: Mallory) -> None:
    assert mallory.peer_id not in trained_on(victim) | trained_on(honest)
    assert row(victim, mallory).accepted == 0


# --- bytes that mean nothing --------------------------------------------------------------------------------


def test_garbage_on_gossip_and_streams(tmp_path: Path, policies: Sequence[Policy]) -> None:
    async def attack(mallory: Mallory, victim: Toy) -> None:
        rng = random.Random(1)
        for size in (1, 5, 100, 1000, MAX_ENVELOPE_BYTES):
            await push(mallory.transport, victim.peer_id, rng.randbytes(size))
        for payload in (b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 9999, rng.randbytes(500)):
            await mallory.gossip(payload)
        group = mallory.honest_group()
        said = mallory.announcement(group, encode(group))
        for number in (math.nan, math.inf, -math.inf):
            await mallory.gossip(msgspec.msgpack.encode(replace(said, rewards=(number, 0.0, 0.0, 1.0))))
        for protocol in (
            ANNOUNCE_PROTOCOL, HELLO_PROTOCOL, BLOB_PROTOCOL, CHARTER_PROTOCOL, RECONCILE_PROTOCOL, "/nosuch"
        ):  # fmt: skip
            for data in (
                b"",
                b"\xff\xff\xff\xff",
                b"\0\0\0\0",
                b"\0\0\0\5\xc1\xc1\xc1\xc1\xc1",
                rng.randbytes(64),
            ):
                try:
                    channel = (await mallory.transport.open_stream(victim.peer_id, protocol)).channel
                    if data:
                        await channel.write(data)
                    else:
                        channel.close()
                except TransportError:
                    continue
            await asyncio.sleep(0.2)

    def check(victim: Toy, honest: Toy, mallory: Mallory) -> None:
        unharmed(victim, honest, mallory)
        refused = victim.of(Health)[-1].refused
        assert refused["decode"] >= 8
        assert refused["frame_size"] >= 3
        assert refused["empty_frame"] >= 3
        assert sum(victim.transport.refusals.counters().values()) >= 9
        assert {peer for peer, _ in victim.transport.refusals.counters()} == {mallory.peer_id}
        assert "handler" not in refused  # no exception of ours at the boundary

    attacked(tmp_path, policies, attack, check)


def test_a_neighbour_that_never_answers_and_bodies_that_never_come(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    async def silence(stream: Stream) -> None:
        await stream.receive()
        await asyncio.Event().wait()

    async def attack(mallory: Mallory, victim: Toy) -> None:
        for protocol in (HELLO_PROTOCOL, BLOB_PROTOCOL, RECONCILE_PROTOCOL):
            mallory.transport.serve(protocol, silence)
        for _ in range(6):
            await mallory.offer(mallory.honest_group())
            await asyncio.sleep(0.3)

    def check(victim: Toy, honest: Toy, mallory: Mallory) -> None:
        unharmed(victim, honest, mallory)
        # an honest body was waiting all the time, and one loop of several was held up
        assert sum(step.groups_external for step in victim.of(StepDone)[10:]) >= 10  # of 20

    attacked(tmp_path, policies, attack, check, share__fetch_timeout_s=3.0)


# --- item 22: numbers that must not reach the optimiser -----------------------------------------------------


def completions_of(group: RolloutGroup) -> str:
    """The digest of a group that may hold what no honest node can hash."""
    try:
        return slot_digest(group.author, group.lineage, group.prompt, group.rollouts)
    except LocalProtocolError:
        return "0" * 64


def floats(*values: float) -> bytes:
    return np.asarray(values, dtype="<f4").tobytes()


def with_first(group: RolloutGroup, **changes: Any) -> RolloutGroup:
    return replace(group, rollouts=(changed(group.rollouts[0], **changes), *group.rollouts[1:]))


def spoiled(group: RolloutGroup) -> dict[str, RolloutGroup]:
    """The same group with one thing wrong at a time."""
    first = group.rollouts[0].answer
    count = len(first.token_ids) // 4

    def logprobs(value: float) -> RolloutGroup:
        return with_first(group, logprobs=floats(value, *[-1.0] * (count - 1)))

    return {
        "nan": logprobs(math.nan),
        "inf": logprobs(math.inf),
        "minus inf": logprobs(-math.inf),
        "1e30": logprobs(1e30),
        "-1e30": logprobs(-1e30),
        "fewer log-probabilities": with_first(group, logprobs=first.logprobs[:-4]),
        "half a number": with_first(group, logprobs=first.logprobs[:-1], token_ids=first.token_ids[:-1]),
        "no tokens": with_first(group, token_ids=b"", logprobs=b"", versions=b""),
        "outside the vocabulary": with_first(group, token_ids=b"\xff\xff\xff\x7f" + first.token_ids[4:]),
        "newer than its group": with_first(group, versions=b"\xff\xff\xff\xff" + first.versions[4:]),
        "too many tokens": with_first(
            group, token_ids=b"\5\0\0\0" * 6, logprobs=floats(*[-1.0] * 6), versions=b"\0" * 24
        ),
        "reward nan": with_first(group, reward=math.nan),
        "reward inf": with_first(group, reward=math.inf),
        "reward 1e30": with_first(group, reward=1e30),
        "temperature": replace(group, sampling=replace(group.sampling, temperature=1e-9)),
        "fewer rollouts": replace(group, rollouts=group.rollouts[:-1]),
    }


REASONS = {
    "nan": "not_finite",
    "inf": "not_finite",
    "minus inf": "not_finite",
    "1e30": "positive_logprob",
    "-1e30": "impossible_logprobs",
    "fewer log-probabilities": "array_length",
    "half a number": "array_length",
    "no tokens": "empty",
    "outside the vocabulary": "token_range",
    "newer than its group": "version_order",
    "too many tokens": "too_long",
    "reward nan": "not_finite",
    "reward inf": "not_finite",
    "reward 1e30": "false_reward",
    "temperature": "sampling",
    "fewer rollouts": "group_size",
}


def weights(toy: Toy) -> dict[str, bytes]:
    """Every byte of parameters and optimiser state."""
    trainer = toy.trainer
    found = {name: tensor.numpy().tobytes() for name, tensor in trainer.state_dict().items()}
    for place, entries in enumerate(trainer.optimiser.state.values()):
        found |= {f"{place}.{name}": value.numpy().tobytes() for name, value in entries.items()}
    return found


def test_hostile_numbers_leave_weights_and_optimiser_byte_identical(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    """The same node twice, with and without the attack: own groups, steps and bytes are the same."""

    async def main(under_attack: bool) -> tuple[dict[str, bytes], Counter[str], Counter[str]]:
        async with ToySwarm(tmp_path / str(under_attack), policies) as swarm:
            # It waits for nobody, so that the attack cannot even shift its prompts; nothing is quarantined,
            # so that every lie is looked at.
            victim = await swarm.add(
                "victim", 0, train__steps=40, train__external_wait_s=0.0, weight__quarantine_windows=1e-6
            )
            mallory = await Mallory.join(swarm, victim)
            swarm.start(victim)
            await asyncio.sleep(SETTLED_S)
            if under_attack:
                for name in REASONS:  # a slot of its own for each
                    await mallory.offer(spoiled(mallory.honest_group())[name])
                    await asyncio.sleep(0.4)
            await swarm.finished()
            refused = Counter(row(victim, mallory).rejected if under_attack else {})
            assert victim.of(StepDone)[-1].policy_version == 40
            assert {share.source for step in victim.of(StepDone) for share in step.sources} == {"own"}
            return weights(victim), verdicts(victim, mallory), refused

    calm, _, _ = run_virtual(main(False))
    attacked_bytes, judged, refused = run_virtual(main(True))
    assert attacked_bytes == calm
    assert judged[""] == 0
    expected = Counter(REASONS.values())
    assert {reason: refused[reason] for reason in expected} == dict(expected)


def test_claiming_the_victims_own_policy_gains_nothing_but_its_checks(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    """Versions that were never made and other base models under its name are refused before anything is
    fetched; a plausible claim passes all checks and has the weight of its author's trust."""

    async def attack(mallory: Mallory, victim: Toy) -> None:
        ours = victim.node.role.lineage
        for claim in (
            {"lineage": ours, "policy_version": 10_000},
            {"lineage": ours, "policy_version": 2**63 - 1},
            {"lineage": replace(ours, base_model="0" * 64)},
        ):
            await mallory.offer(replace(mallory.honest_group(), **claim))
            await asyncio.sleep(0.5)
        await mallory.offer(replace(mallory.honest_group(), lineage=ours))
        await asyncio.sleep(3)

    def check(victim: Toy, honest: Toy, mallory: Mallory) -> None:
        assert row(victim, mallory).rejected == {"future_version": 2, "other_model": 1}

    attacked(tmp_path, policies, attack, check)


def test_a_lineage_may_begin_at_any_version_and_overflows_nothing(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    async def attack(mallory: Mallory, victim: Toy) -> None:
        await mallory.offer(replace(mallory.honest_group(), policy_version=2**63 - 1))
        await asyncio.sleep(0.5)
        for version in (2**32 - 1, 2**31, 2**16):
            group = mallory.honest_group()
            rollouts = tuple(
                changed(each, versions=np.full_like(parse_tokens(each).versions_T, version).tobytes())
                for each in group.rollouts
            )
            same = {"policy_version": version, "mean_version": float(version), "oldest_version": version}
            await mallory.offer(replace(group, rollouts=rollouts, **same))
            await asyncio.sleep(0.5)

    def check(victim: Toy, honest: Toy, mallory: Mallory) -> None:
        # Tokens that lie 2**63 versions apart are stale, as is what is far behind its lineage's newest, and
        # stale is no blame.
        assert row(victim, mallory).policy_version == 2**32 - 1
        assert set(row(victim, mallory).rejected) == {"stale"}

    attacked(tmp_path, policies, attack, check)


# --- item 19: rewards that are claimed, prompts that are picked ---------------------------------------------


def upside_down(group: RolloutGroup) -> RolloutGroup:
    rollouts = tuple(replace(each, reward=1.0 - each.reward) for each in group.rollouts)
    return replace(group, rollouts=rollouts)


def test_false_rewards_are_found_by_scoring_and_cost_their_sender(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    async def attack(mallory: Mallory, victim: Toy) -> None:
        for _ in range(3):
            await mallory.offer(upside_down(mallory.honest_group()))
            await asyncio.sleep(0.3)

    def check(victim: Toy, honest: Toy, mallory: Mallory) -> None:
        unharmed(victim, honest, mallory)
        for toy in (victim, honest):
            # one was enough: what came later was not fetched
            assert verdicts(toy, mallory) == {"false_reward": 1}
            assert row(toy, mallory).rejected == {"false_reward": 1}
            assert row(toy, mallory).trust == 0.0  # quarantine
        (event,) = [each for each in victim.of(GroupJudged) if each.author == mallory.peer_id]
        assert event.rewards == tuple(float(len(text) % 2) for text in event.completions)  # ours

    attacked(tmp_path, policies, attack, check)


def test_without_verification_the_same_lie_is_learnt(tmp_path: Path, policies: Sequence[Policy]) -> None:
    """Else the test above would measure nothing."""

    async def attack(mallory: Mallory, victim: Toy) -> None:
        for _ in range(3):
            await mallory.offer(upside_down(mallory.honest_group()))
            await asyncio.sleep(0.3)

    def check(victim: Toy, honest: Toy, mallory: Mallory) -> None:
        assert mallory.peer_id in trained_on(victim)
        assert mallory.peer_id not in trained_on(honest)
        assert verdicts(victim, mallory)[""] >= 1

    attacked(tmp_path, policies, attack, check, verify__enabled=False)


def test_without_verification_absurd_claims_still_end_nothing(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    async def attack(mallory: Mallory, victim: Toy) -> None:
        for reward in (1e200, -1e200, 1.7e308, 1e30, 1001.0):
            group = mallory.honest_group()
            rollouts = tuple(replace(each, reward=reward * (n % 2)) for n, each in enumerate(group.rollouts))
            await mallory.offer(replace(group, rollouts=rollouts))
            await asyncio.sleep(0.3)

    def check(victim: Toy, honest: Toy, mallory: Mallory) -> None:
        unharmed(victim, honest, mallory)
        assert row(victim, mallory).rejected["reward_range"] >= 1

    attacked(tmp_path, policies, attack, check, verify__enabled=False)


@pytest.mark.parametrize(
    "pick", ["another slot's prompt", "a slot beyond the last", "an easy question", "the future"]
)
def test_prompts_that_are_not_the_senders_are_refused(
    tmp_path: Path, policies: Sequence[Policy], pick: str
) -> None:
    async def attack(mallory: Mallory, victim: Toy) -> None:
        group = mallory.honest_group()
        prompt = group.prompt
        match pick:
            case "another slot's prompt":
                group = replace(group, prompt=replace(prompt, slot=prompt.slot + 1))
            case "a slot beyond the last":
                group = replace(group, prompt=replace(prompt, slot=mallory.swarm.charter.slots_per_window))
            case "an easy question":
                group = replace(group, question="0")
            case "the future":
                group = replace(group, prompt=replace(prompt, window=prompt.window + 10_000))
        await mallory.offer(group)

    def check(victim: Toy, honest: Toy, mallory: Mallory) -> None:
        unharmed(victim, honest, mallory)
        reason = "future" if pick == "the future" else "tampered_prompt"
        assert row(victim, mallory).rejected == {reason: 1}
        # all but the easy question are seen in the announcement, and not fetched
        assert verdicts(victim, mallory).total() == (pick == "an easy question")
        quarantined = row(victim, mallory).trust == 0.0
        assert quarantined == (reason != "future")

    attacked(tmp_path, policies, attack, check)


def test_a_liar_alone_is_not_waited_for(tmp_path: Path, policies: Sequence[Policy]) -> None:
    """A peer in quarantine goes on announcing; a node with no other peer trains at full speed."""

    async def main() -> None:
        async with ToySwarm(tmp_path, policies) as swarm:
            victim = await swarm.add("victim", 0, train__steps=60)
            mallory = await Mallory.join(swarm, victim)
            swarm.start(victim)
            await asyncio.sleep(SETTLED_S)
            await mallory.offer(upside_down(mallory.honest_group()))
            await asyncio.sleep(2)
            assert row(victim, mallory).trust == 0.0
            caught_at = swarm.clock.now_ms()
            while not victim.node.finished.is_set():
                await mallory.offer(mallory.honest_group())
                await asyncio.sleep(0.5)
            later = [step for step in victim.of(StepDone) if step.at > caught_at + 1000]
            assert len(later) > 20
            assert max(step.wait_s for step in later) < 0.5
            assert verdicts(victim, mallory) == {"false_reward": 1}

    run_virtual(main())


def test_a_body_sent_again_under_the_senders_name_counts_once(
    tmp_path: Path, policies: Sequence[Policy]
) -> None:
    async def attack(mallory: Mallory, victim: Toy) -> None:
        group = mallory.honest_group()
        for _ in range(5):  # other envelopes, the same announcement
            await mallory.offer(group)
            await asyncio.sleep(0.3)
        await mallory.offer(replace(group, question=group.question))
        other = mallory.honest_group()
        await mallory.offer(replace(other, prompt=group.prompt, question=group.question))  # equivocation
        await asyncio.sleep(0.3)

    def check(victim: Toy, honest: Toy, mallory: Mallory) -> None:
        rejected = row(victim, mallory).rejected
        assert verdicts(victim, mallory)[""] == 1
        assert rejected["equivocation"] == 1
        assert set(rejected) <= {"duplicate", "equivocation"}
        uses = sum(
            share.groups
            for step in victim.of(StepDone)
            for share in step.sources
            if share.source == mallory.peer_id
        )
        assert uses <= 2

    attacked(tmp_path, policies, attack, check)

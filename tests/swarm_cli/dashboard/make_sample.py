"""Writes `sample.jsonl`: a short run of one node among three peers, from formulas alone, always the same.

python -m tests.swarm_cli.dashboard.make_sample
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from node.events import (
    CheckCount,
    CheckOutcome,
    Evaluated,
    Event,
    GroupJudged,
    Health,
    NodeStarted,
    NodeStopped,
    Notice,
    PeersSeen,
    PeerStatus,
    SourceShare,
    StagesSeen,
    StageStatus,
    StepDone,
    encode_event,
)

SAMPLE = Path(__file__).with_name("sample.jsonl")
START = 1_700_000_000_000
STEP_MS = 2_500
STEPS = 48
GROUP_SIZE = 6
ALICE = "12D3KooWAlice1nodeXk3vQfT8mJ2rS7wYbZc5dNhLp4uKgEaM9x"
BOB = "12D3KooWBobby2nodeXk3vQfT8mJ2rS7wYbZc5dNhLp4uKgEaB7q"
CAROL = "12D3KooWCarol3nodeXk3vQfT8mJ2rS7wYbZc5dNhLp4uKgEaC5t"
MALLORY = "12D3KooWMaLLo4nodeXk3vQfT8mJ2rS7wYbZc5dNhLp4uKgEaX1z"


def sample_events() -> Iterator[Event]:
    """The whole run, in order."""
    yield NodeStarted(
        at=START,
        name="alice",
        peer_id=ALICE,
        swarm="demo",
        swarm_id="5f2c" * 16,
        addresses=("/ip4/127.0.0.1/tcp/4001", "/ip4/127.0.0.1/udp/4001/quic-v1"),
        model="tiny-digits",
        params=1_213_056,
        engine="transformers 5.19, cpu, float32",
        sandbox="strong: namespaces, seccomp, no network",
        run_dir="/home/alice/.local/share/murmuration/runs/demo-1",
    )
    yield Notice(at=START + 40, level="info", text="listening on /ip4/127.0.0.1/tcp/4001")
    yield _evaluated(START + 900, 0, "before")
    for step in range(1, STEPS + 1):
        at = START + 1_000 + step * STEP_MS
        yield _stages(at - 1_400, step)
        yield from _groups(at - 1_000, step)
        yield _step(at, step)
        yield _peers(at + 100, step)
        if step == 6:
            yield Notice(at=at + 150, level="warning", text="clock is 812 ms behind the median of 3 peers")
        if step == 20:
            yield Notice(at=at + 150, level="info", text="checkpoint v20 written")
        if step == 31:
            yield Notice(
                at=at + 150, level="error", text="disk has 311 MB left; checkpoints are paused at 256 MB"
            )
        if step % 12 == 0 and step < STEPS:
            yield _evaluated(at + 200, step, "during")
        yield _health(at + 300, step)
    at = START + 1_000 + (STEPS + 1) * STEP_MS
    yield _stages(at - 900, STEPS + 1)
    yield _evaluated(at, STEPS, "after")


def stopped_event() -> NodeStopped:
    """What a node says last; not part of the sample, so that it shows a running node."""
    return NodeStopped(at=START + 200_000, reason="steps reached", steps=STEPS, wall_s=123.0)


def _learnt(step: int) -> float:
    return 0.12 + 0.62 * (1 - math.exp(-step / 16))


def _wobble(step: int, phase: float) -> float:
    return math.sin(2.1 * step + phase) * 0.5 + math.sin(0.7 * step + 2 * phase) * 0.5


def _evaluated(at: int, step: int, moment: str) -> Evaluated:
    sampled = round(_learnt(step) - 0.02, 4)
    greedy = round(_learnt(step) + 0.05, 4)
    return Evaluated(
        at=at,
        policy_version=step,
        moment=moment,
        prompts=128,
        sampled=sampled,
        greedy=greedy,
        sampled_tasks={"chain_sum": sampled, "reverse": round(sampled * 0.9, 4)},
        greedy_tasks={"chain_sum": greedy, "reverse": round(greedy * 0.9, 4)},
        evaluate_s=0.8,
    )


def _stages(at: int, step: int) -> StagesSeen:
    def stage(name: str, queued: int, capacity: int, waiting_for: str, waiting_s: float) -> StageStatus:
        return StageStatus(
            stage=name,
            queued=queued,
            capacity=capacity,
            waiting_for=waiting_for,
            waiting_s=round(waiting_s, 3),
        )

    return StagesSeen(
        at=at,
        stages=(
            stage("rollout", 12 + step % 4, 16, "", 0.0),
            stage("verify", step % 7, 64, "fetched bodies", 0.2 + 0.1 * (step % 5)),
            stage("share", 0, 32, "offers", 1.25),
            stage("weight", 0, 0, "a step", 0.4),
            stage("train", 0, 0, "", 0.0),
            stage("broadcast", 0, 0, "a new version", 48.0 if step > STEPS else 2.0),
        ),
    )


def _groups(at: int, step: int) -> Iterator[GroupJudged]:
    a, b = 10 + step * 7 % 80, 3 + step * 11 % 60
    wrong = (str(a + b + 1), str(a - b), f"{a}{b}", "I think it is a big number", str(a + b), str(a + b))
    for number, (author, reason) in enumerate(
        ((ALICE, ""), (BOB, ""), (CAROL, ""), (MALLORY, "false_reward"))
    ):
        if author != ALICE and (step + number) % 3:
            continue
        rewards = tuple(1.0 if text == str(a + b) else 0.0 for text in wrong)
        checks = [
            CheckOutcome(check="schema", verdict="accept", reason="", cost_s=0.0002),
            CheckOutcome(check="freshness", verdict="accept", reason="", cost_s=0.0001),
            CheckOutcome(check="copies", verdict="accept", reason="", cost_s=0.0001),
            CheckOutcome(check="provenance", verdict="accept", reason="", cost_s=0.0011),
        ]
        if reason:
            checks.append(
                CheckOutcome(check="reward", verdict="reject", reason="claimed 1.00, got 0.00", cost_s=0.0142)
            )
        else:
            checks.append(CheckOutcome(check="reward", verdict="accept", reason="", cost_s=0.0139))
            checks.append(
                CheckOutcome(
                    check="plausibility",
                    verdict="suspect",
                    reason="gap 4.31 nats a token, 4.00 allowed",
                    cost_s=0.021,
                )
                if author == CAROL and step % 2
                else CheckOutcome(
                    check="plausibility", verdict="accept", reason="gap 0.41 nats a token", cost_s=0.021
                )
            )
        yield GroupJudged(
            at=at + number * 150,
            author=author,
            own=author == ALICE,
            accepted=not reason,
            reason=reason,
            group=f"{step * 2654435761 % 2**32:08x}{number:04x}",
            environment="chain_sum",
            window=170_000_000 + step // 4,
            slot=step % 64,
            policy_version=max(0, step - 1 - number),
            question=f"State the final answer to the following arithmetic problem: {a} + {b} =",
            completions=wrong,
            rewards=tuple(1.0 for _ in rewards) if reason else rewards,
            checks=tuple(checks) if author != ALICE else (),
        )


def _step(at: int, step: int) -> StepDone:
    def source(name: str, groups: int, weight: float, gap: float) -> SourceShare:
        return SourceShare(
            source=name,
            groups=groups,
            tokens=groups * GROUP_SIZE * 9,
            weight=weight,
            loss=-0.02,
            kept=0.97,
            dropped=0.01,
            clipped=0.02,
            ess=0.91,
            advantage_abs=0.6,
            gap=gap,
            k1=round(0.9 * gap, 4),
            k3=round(0.5 * gap, 4),
            lags=(groups * GROUP_SIZE * 4, groups * GROUP_SIZE * 5, 0, 0, 0, 0, 0, 0),
        )

    reward = round(min(1.0, max(0.0, _learnt(step) + 0.06 * _wobble(step, 0.3))), 4)
    return StepDone(
        at=at,
        policy_version=step,
        loss=round(0.4 * math.exp(-step / 20) + 0.03 * _wobble(step, 1.1), 4),
        reward=reward,
        reward_external=round(reward * 0.92, 4),
        entropy=round(1.9 * math.exp(-step / 40), 4),
        kl_start=round(0.004 * step, 4),
        length_mean=8.4,
        finished_share=0.98,
        zero_variance_share=round(0.2 + 0.004 * step, 4),
        grad_norm=round(0.8 + 0.2 * _wobble(step, 2.0), 4),
        learning_rate=2e-4,
        skipped=False,
        ess=0.88,
        kl_step=0.0021,
        groups_local=8,
        groups_external=6,
        hacpo_groups=2,
        graft_groups=0,
        prompts_shared=3,
        staleness=0.62,
        age_windows=0.4,
        off_policy_share=0.12,
        sources=(
            source("own", 8, 1.0, 0.01),
            source(BOB, 3, 0.42, 0.38),
            source(CAROL, 3, 0.31, 0.77),
        ),
        kinds=(source("own", 8, 1.0, 0.01), source("foreign", 6, 0.73, 0.57)),
        pool=22 + step % 9,
        generate_s=1.31,
        train_s=0.92,
        wait_s=0.11,
    )


def _peers(at: int, step: int) -> PeersSeen:
    def peer(
        peer_id: str, name: str, accepted: int, trust: float, lag: float, age: float, **changes: object
    ) -> PeerStatus:
        fields: dict[str, object] = {
            "connected": True,
            "rejected": {},
            "policy_version": max(0, step - 2),
            "last_seen_at": at - 700,
            "same_tokenizer": True,
            **changes,
        }
        return PeerStatus(
            peer_id=peer_id, name=name, accepted=accepted, trust=trust, lag=lag, age_windows=age, **fields
        )

    return PeersSeen(
        at=at,
        peers=(
            peer(BOB, "bob", step * 3, 0.93, 1.5, 0.4, rejected={"stale": 2}),
            peer(CAROL, "carol", step * 2, 0.71, 12.3, 1.2, same_tokenizer=False, policy_version=step),
            peer(
                MALLORY,
                "mallory",
                0,
                0.04,
                0.0,
                0.0,
                connected=step < 40,
                rejected={"false_reward": step, "copied": 3, "rate": 1},
                last_seen_at=at - 700 if step < 40 else START + 1_000 + 40 * STEP_MS,
            ),
        ),
    )


def _health(at: int, step: int) -> Health:
    return Health(
        at=at,
        loop_lag_p99_s=0.012,
        rss_bytes=612_000_000 + step * 10_000,
        transport_restarts=0,
        sandbox_restarts=0,
        refused={"rate": 1} if step > 30 else {},
        announced=step * 8,
        bodies_fetched=step * 6,
        bodies_served=step * 5,
        checks=(
            CheckCount(check="schema", accepted=step * 6, rejected=0, suspected=0, cost_s=0.001 * step),
            CheckCount(check="reward", accepted=step * 5, rejected=step, suspected=0, cost_s=0.08 * step),
        ),
    )


def sample_bytes() -> bytes:
    """The file's content."""
    return b"".join(encode_event(event) for event in sample_events())


if __name__ == "__main__":
    SAMPLE.write_bytes(sample_bytes())

"""Events as lines: what is worth one, and that foreign text is harmless in it."""

from __future__ import annotations

from node.events import Evaluated, NodeStarted, NodeStopped, Notice, StagesSeen, StepDone
from swarm_cli.progress import demo_line, progress_line, reachable

PEER = "12D3KooWFMM2t31FiAagEyie4coBshMqpk4z15uxzNzywd7cBHkG"
LOOPBACK = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"
OUTSIDE = f"/ip4/192.0.2.7/tcp/1/p2p/{PEER}"


def started(*addresses: str, run_dir: str = "/srv/node one/runs/latest") -> NodeStarted:
    return NodeStarted(
        at=1, name="ada", peer_id=PEER, swarm="de\x1bmo", swarm_id="a" * 64, addresses=addresses,
        model="/m/wren", params=334_080, engine="transformers", sandbox="strong", run_dir=run_dir,
    )  # fmt: skip


def step(version: int, *, skipped: bool = False, rolled_back: bool = False) -> StepDone:
    return StepDone(
        at=1, policy_version=version, loss=-0.5, reward=0.25, reward_external=0.0, entropy=0.5, kl_start=0.0,
        length_mean=1.0, finished_share=1.0, zero_variance_share=0.0, grad_norm=1.0, learning_rate=1e-4,
        skipped=skipped, rolled_back=rolled_back, groups_local=4, groups_external=3, hacpo_groups=0,
        graft_groups=0, prompts_shared=0,
        staleness=0.5, age_windows=0.0, sources=(), pool=0, generate_s=0.0, train_s=0.0, wait_s=0.0,
    )  # fmt: skip


def test_a_start_tells_how_to_join_watch_and_follow() -> None:
    line = progress_line(started(LOOPBACK, OUTSIDE))
    assert f"swarm join {OUTSIDE}" in line
    assert "swarm monitor ada --home '/srv/node one'" in line
    assert "tail -F '/srv/node one/runs/latest/metrics.jsonl'" in line
    assert "\x1b" not in line


def test_without_a_network_there_is_nothing_to_join() -> None:
    assert "swarm join" not in progress_line(started())


def test_an_address_for_others_is_not_loopback_if_there_is_another() -> None:
    assert reachable([LOOPBACK, OUTSIDE]) == OUTSIDE
    assert reachable([LOOPBACK]) == LOOPBACK
    assert reachable([]) == ""


def test_a_demo_prints_every_tenth_step_and_every_failed_one() -> None:
    shown = [version for version in range(1, 31) if demo_line(step(version))]
    assert shown == [10, 20, 30]
    assert "SKIPPED" in demo_line(step(7, skipped=True))
    assert "ROLLED BACK" in demo_line(step(7, rolled_back=True))
    assert all(progress_line(step(version)) for version in range(1, 31))


def test_lines_are_one_line_each() -> None:
    events = [
        step(10),
        Notice(at=1, level="warning", text="careful"),
        NodeStopped(at=1, reason="steps done", steps=3, wall_s=2.0),
        Evaluated(
            at=1, policy_version=0, moment="before", prompts=8, sampled=0.5, greedy=0.75,
            sampled_tasks={"reasoning_gym/chain_sum": 0.5}, greedy_tasks={}, evaluate_s=0.1,
        ),
    ]  # fmt: skip
    for event in events:
        assert progress_line(event).count("\n") == 0
    assert "held-out before: 0.500 at T=1" in progress_line(events[-1])
    assert demo_line(started(LOOPBACK)) == f"wren, 0.33 M parameters, {PEER}"
    assert demo_line(events[2]) == ""


def test_text_of_peers_is_harmless() -> None:
    notice = Notice(at=1, level="warning", text="refused: \x1b]8;;http://evil\x07 \u202e[bold]x")
    line = progress_line(notice)
    assert not {"\x1b", "\x07", "\u202e"} & set(line)
    assert "[bold]" in line  # the console parses no markup


def test_snapshots_are_not_worth_a_line() -> None:
    assert progress_line(StagesSeen(at=1, stages=())) == ""

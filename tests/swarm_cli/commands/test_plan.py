"""`swarm plan`: from flags, from a run's metrics, and what it says when something is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from node.events import (
    Event,
    NodeStarted,
    StagesSeen,
    StageStatus,
    StepDone,
    VersionPublished,
    WeightsSeen,
    encode_event,
)
from swarm_cli.commands.plan import Measured, measure
from tests.swarm_cli.conftest import Swarm

GIVEN = {
    "--step-s": "10",
    "--groups": "20",
    "--groups-per-s": "0.5",
    "--rollout-s": "8",
    "--update-mb": "1",
    "--link-mbit": "20",
}
Write = Callable[..., Path]


def flags(**changed: str | None) -> list[str]:
    """GIVEN with changes; None leaves a flag out."""
    named = {f"--{key.replace('_', '-')}": value for key, value in changed.items()}
    both = {**GIVEN, **named}
    return [word for flag, value in both.items() if value is not None for word in (flag, value)]


def zeros(kind: type[Event], /, **fields: Any) -> Any:
    """An event with nothing in it but `fields`."""
    empty: dict[type, Any] = {int: 0, float: 0.0, str: "", bool: False}
    rest = {
        field.name: empty.get(field.type, ())
        for field in msgspec.structs.fields(kind)
        if field.required and field.name not in fields
    }
    return kind(**rest, **fields)


def step(k: int, **fields: Any) -> StepDone:
    """Step k of a node that makes 4 groups in 2 s of generation, trains 3 s and waits 1 s, all in 5 s."""
    usual = {"groups_local": 4, "generate_s": 2.0, "train_s": 3.0, "wait_s": 1.0}
    return zeros(StepDone, at=5000 * k, policy_version=k, **{**usual, **fields})


def stages(waiting_for: str) -> StagesSeen:
    status = StageStatus(stage="train", queued=0, capacity=0, waiting_for=waiting_for, waiting_s=0.0)
    return StagesSeen(at=0, stages=(status,))


def published(kind: str, size: int) -> VersionPublished:
    return zeros(VersionPublished, at=0, kind=kind, blob_bytes=size, full_bytes=10_000_000)


STARTED = zeros(NodeStarted, at=0)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes events, or lines as they are, to the metrics of a run of the home; returns that path."""

    def write(*events: Event | bytes, run: str = "latest", config: dict[str, Any] | None = None) -> Path:
        folder = tmp_path / "home" / "runs" / run
        folder.mkdir(parents=True, exist_ok=True)
        lines = [each if isinstance(each, bytes) else encode_event(each) for each in events]
        (folder / "metrics.jsonl").write_bytes(b"".join(lines))
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
        return folder / "metrics.jsonl"

    return write


# --- measured -----------------------------------------------------------------------------------------------


def test_no_file_says_nothing(tmp_path: Path) -> None:
    assert measure(tmp_path / "metrics.jsonl") == Measured()


def test_what_a_run_says(write: Write) -> None:
    seen = zeros(WeightsSeen, at=0, followers=3)
    sizes = [published("anchor", 9_000_000), published("delta", 100), published("delta", 300)]
    assert measure(write(STARTED, *(step(k) for k in range(1, 6)), *sizes, seen)) == Measured(
        steps=5,
        step_s=4.0,
        groups=4,
        groups_per_s=2.0,
        engine_groups_per_s=2.0,
        rollout_s=2.0,
        update_bytes=200,
        full_bytes=10_000_000,
        busy_share=0.8,
        followers=3,
    )


def test_while_steps_wait_for_own_groups_what_came_out_counts(write: Write) -> None:
    """4 groups in 5 s, although the engine makes 2 a second while it works; a wait for peers is another."""
    steps = [step(k) for k in range(1, 6)]
    starved = measure(write(*steps, stages("own groups"), stages("")))
    assert (starved.groups_per_s, starved.engine_groups_per_s) == (0.8, 2.0)
    assert measure(write(*steps, stages("peers' groups"), stages(""))).groups_per_s == 2.0


def test_only_the_newest_attempt_counts(write: Write) -> None:
    old = [step(k, train_s=300.0) for k in range(1, 9)]
    seen = zeros(WeightsSeen, at=0, followers=3)
    new = measure(write(STARTED, *old, published("delta", 7), seen, STARTED, step(1), step(2)))
    assert (new.steps, new.step_s, new.update_bytes, new.followers) == (2, 4.0, None, 0)


def test_one_evaluation_between_two_steps_does_not_count(write: Write) -> None:
    steps = [step(1), step(2), step(3), zeros(StepDone, at=500_000, train_s=3.0, wait_s=1.0)]
    assert measure(write(*steps)).step_s == 4.0


def test_one_step_alone_is_what_it_trained(write: Write) -> None:
    alone = measure(write(step(1)))
    assert (alone.step_s, alone.busy_share) == (3.0, None)


def test_lines_that_cannot_be_read_are_passed_over(write: Write) -> None:
    torn = encode_event(step(3))[:40]
    strange = [b"\xff\xfe\n", b'{"type":"StepDone","at":"now"}\n', b'{"type":"Unknown"}\n', b"\n"]
    assert measure(write(step(1), *strange, step(2), torn)).steps == 2


def test_only_the_last_steps_are_measured(write: Write) -> None:
    steps = [step(k, train_s=3.0 if k > 300 else 300.0) for k in range(1, 401)]
    assert measure(write(*steps)).step_s == 4.0


# --- printed ------------------------------------------------------------------------------------------------


def test_from_flags_alone(swarm: Swarm) -> None:
    ended = swarm("plan", *flags(), "--json")
    facts = json.loads(ended.out)
    assert (ended.code, ended.err) == (0, "")
    assert facts["followers"] == 4
    assert facts["workers"][0] == {"name": "follower-1", "groups_per_s": 0.5, "cost": 1.0}
    assert (facts["publish_every"], facts["staleness"], facts["enough"]) == (1, 3, True)
    assert (facts["busy_now"], facts["busy_then"]) == (0.25, 1.0)
    assert (facts["local_groups"], facts["external_groups"]) == (5, 15)
    assert facts["dissemination_s"] == pytest.approx(0.4 * (1 + 2 / 62))


def test_the_table_says_the_same(swarm: Swarm) -> None:
    out = swarm("plan", *flags()).out
    assert "publish every                 1 step" in out
    assert [line.split()[:3] for line in out.splitlines() if "busy" in line] == [["learner", "busy", "25%"]]
    assert "6 allowed" in out


def test_from_a_run(swarm: Swarm, write: Write) -> None:
    """Its configuration has the link; workers are as fast as the engine while it generates."""
    steps = [step(k, groups_local=4, groups_external=4) for k in range(1, 6)]
    config = {"broadcast": {"upload_mbit": 16}}
    write(*steps, stages("own groups"), published("delta", 1_000_000), config=config)
    facts = json.loads(swarm("plan", "--json").out)
    assert (facts["measured_steps"], facts["groups"], facts["busy_now"]) == (5, 8, 0.8)
    assert (facts["link_mbit"], facts["dissemination_s"]) == (16, 0.5)
    assert (facts["own_groups_per_s"], facts["workers"][0]["groups_per_s"]) == (0.8, 2.0)
    assert facts["followers"] == 1


def test_flags_stand_before_what_was_measured(swarm: Swarm, write: Write) -> None:
    write(*(step(k) for k in range(1, 6)), run="other")
    facts = json.loads(swarm("plan", *flags(rollout_s=None), "--run", "other", "--json").out)
    assert (facts["step_s"], facts["rollout_s"]) == (10, 2.0)


def test_named_workers_are_activated_by_cost(swarm: Swarm) -> None:
    workers = ["--worker", "dear:2:9", "--worker", "a:1", "--worker", "b:1:0.5"]
    ended = swarm("plan", *flags(), *workers, "--json")
    assert [each["name"] for each in json.loads(ended.out)["workers"]] == ["b", "a"]
    assert "b, a" in swarm("plan", *flags(), *workers).out


def test_too_few_workers_end_with_one_and_the_best_plan(swarm: Swarm) -> None:
    ended = swarm("plan", *flags(), "--worker", "a:0.5", "--json")
    facts = json.loads(ended.out)
    assert (ended.code, facts["enough"], facts["busy_then"]) == (1, False, 0.5)
    assert ended.err == "all 1 workers and this node give 1 of 2.2 groups a second; name more with --worker\n"


def test_an_own_engine_that_is_too_slow_for_one_group_a_step_is_told(swarm: Swarm) -> None:
    ended = swarm("plan", *flags(groups_per_s="0.05"), "--worker", "a:2")
    assert ended.code == 0
    assert "a step takes at least one own group, for which this node needs 20 s" in ended.err


# --- bad input ----------------------------------------------------------------------------------------------


def test_no_interval_is_one_sentence(swarm: Swarm) -> None:
    ended = swarm("plan", *flags(rollout_s="70"))
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("swarm: no publish interval keeps staleness within 6: 6 - ceil(")
    assert ended.err.count("\n") == 1


def test_what_is_missing_is_named_by_its_flag(swarm: Swarm, write: Write) -> None:
    nothing = swarm("plan")
    assert (nothing.code, nothing.out) == (2, "")
    assert "metrics.jsonl does not exist; give --step-s, --groups, --groups-per-s, --rollout-s" in nothing.err
    write(*(step(k) for k in range(1, 6)))
    some = swarm("plan")
    assert some.err.endswith("does not say all that a plan needs; give --update-mb, --link-mbit\n")


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
@pytest.mark.parametrize("flag", ["--step-s", "--link-mbit", "--apply-s", "--full-mb"])
def test_numbers_are_positive(swarm: Swarm, flag: str, value: str) -> None:
    ended = swarm("plan", *flags(), flag, value)
    assert ended.code == 2
    assert f"{flag} {float(value):g} is not a positive number" in ended.err


@pytest.mark.parametrize(
    ("worker", "sentence"),
    [
        ("a", "is not of the form NAME:RATE[:COST]"),
        ("a:", "is not of the form NAME:RATE[:COST]"),
        ("a:1:2:3", "is not of the form NAME:RATE[:COST]"),
        ("a:fast", "is not of the form NAME:RATE[:COST]"),
        (":1", "needs a name"),
        ("a:0", "a rate above 0"),
        ("a:nan", "a rate above 0"),
        ("a:1:-1", "a cost of at least 0"),
    ],
)
def test_workers_are_checked(swarm: Swarm, worker: str, sentence: str) -> None:
    ended = swarm("plan", *flags(), "--worker", worker)
    assert ended.code == 2
    assert f"--worker {worker!r}" in ended.err
    assert sentence in ended.err


def test_workers_have_names_of_their_own(swarm: Swarm) -> None:
    assert "is there twice" in swarm("plan", *flags(), "--worker", "a:1", "--worker", "a:2").err


def test_metrics_that_may_not_be_read(swarm: Swarm, tmp_path: Path) -> None:
    (tmp_path / "home" / "runs" / "latest" / "metrics.jsonl").mkdir(parents=True)
    ended = swarm("plan", *flags())
    assert ended.code == 2
    assert "metrics.jsonl cannot be read: Is a directory" in ended.err

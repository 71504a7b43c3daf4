"""Followers as a person runs them: real processes, real network daemons, an owner that is killed."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import psutil
import pytest

from swarm_cli.demo.processes import EventTail
from tests.swarm_cli.test_real_processes import (
    LOOPBACK,
    QUICK,
    START_S,
    Start,
    await_event,
    descendants,
    end,
    is_start,
    metrics_of,
    start,
    tmp_path,
)

__all__ = ["start", "tmp_path"]  # fixtures

pytestmark = [pytest.mark.slow, pytest.mark.net, pytest.mark.timeout(300)]


def events(metrics: Path, kind: str) -> list[object]:
    return [event for event in EventTail(metrics).read() if type(event).__name__ == kind]


def test_followers_generate_for_an_owner_that_trains_on_their_groups(start: Start, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    demo = start(
        "demo", "--nodes", "1", "--followers", "2", "--steps", "60", "--json", "--keep", kept, *QUICK
    )  # fmt: skip
    code, out, err = end(demo, START_S)
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    (owner,), followers = result["nodes"], result["followers"]
    assert owner["steps"] == 60
    assert owner["groups_followers"] > 0
    assert owner["staleness_followers"] > 0
    published = {
        event.policy_version: event.digest  # type: ignore[attr-defined]
        for event in events(metrics_of(kept / "wren"), "VersionPublished")
    }
    assert len(followers) == 2
    for follower in followers:
        assert follower["owner"] == owner["peer_id"]
        assert follower["version"] > 10
        assert follower["digest"] == published[follower["version"]]
        assert follower["groups_generated"] >= follower["accepted"] > 0
        assert follower["received_bytes"] > 0
    # Before they are believed, their groups count as those of a foreign policy.
    assert sum(follower["trained"] for follower in followers) >= owner["groups_followers"]


def test_followers_go_on_on_the_same_chain_when_their_owner_was_killed(start: Start, tmp_path: Path) -> None:
    home, other = tmp_path / "owner", tmp_path / "follower"
    begin = ("run", "--home", home, "--name", "owner", "--steps", "100000", *QUICK)
    # No checkpoint is ever written: what the owner goes on from is what it has published.
    often = ("--set", "train.checkpoint_every=100000", "--set", "train.external_wait_s=0.2")
    owner = start(*begin, *often, *LOOPBACK)
    address = await_event(metrics_of(home), owner, is_start).addresses[0]  # type: ignore[attr-defined]
    follower = start(
        "join", address, "--yes", "--home", other, "--name", "follower", "--set", "role=follower",
        *QUICK, *LOOPBACK,
    )  # fmt: skip
    here = await_event(metrics_of(other), follower, is_start).addresses[0]  # type: ignore[attr-defined]
    await_event(metrics_of(other), follower, lambda event: reached(event) >= 5)

    left = descendants(owner)
    owner.kill()
    owner.communicate()
    psutil.wait_procs(left, timeout=15)
    at_kill = events(metrics_of(home), "VersionPublished")[-1].policy_version  # type: ignore[attr-defined]

    again = start(*begin, *often, "--set", f"network.listen={address.partition('/p2p/')[0]}",
                  "--set", f"network.bootstraps=['{here}']")  # fmt: skip
    await_event(metrics_of(other), follower, lambda event: reached(event) >= at_kill + 5)
    # from the last step, or from what was published, whichever is newer
    resumed = [
        re.search(r"goes on from .*?v(?:ersion )?(\d+)", event.text)  # type: ignore[attr-defined]
        for event in events(metrics_of(home), "Notice")
    ]
    assert max(int(found[1]) for found in resumed if found) >= at_kill
    published = [
        event.policy_version  # type: ignore[attr-defined]
        for event in events(metrics_of(home), "VersionPublished")
    ]
    assert published == sorted(set(published))  # the chain never went back
    versions = [
        event.policy_version  # type: ignore[attr-defined]
        for event in events(metrics_of(other), "VersionReached")
    ]
    assert versions == sorted(set(versions))
    digests = {
        event.policy_version: event.digest  # type: ignore[attr-defined]
        for event in events(metrics_of(home), "VersionPublished")
    }
    assert all(
        digests.get(event.policy_version, event.digest) == event.digest  # type: ignore[attr-defined]
        for event in events(metrics_of(other), "VersionReached")
    )
    told = [event.text for event in events(metrics_of(other), "Notice")]  # type: ignore[attr-defined]
    assert not any("silent" in text for text in told), told
    for process in (again, follower):
        stop(process)


def reached(event: object) -> int:
    return event.policy_version if type(event).__name__ == "VersionReached" else -1  # type: ignore[attr-defined]


def stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    code, _, err = end(process)
    assert code == 130, err
    assert "Traceback" not in err

"""`swarm monitor`: which feeds its arguments name, and what it says when they name nothing."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from swarm_cli.commands.monitor import choose_feeds, monitor
from swarm_cli.dashboard.feed import FileFeed, ReplayFeed, SocketFeed
from tests.swarm_cli.dashboard.make_sample import SAMPLE


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path


def serve(home: Path, name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(home / "run" / f"{name}.sock"))
    listener.listen()
    return listener


def test_without_arguments_all_living_nodes_of_the_home(home: Path) -> None:
    with serve(home, "bob"), serve(home, "alice"):
        serve(home, "dead").close()
        feeds = choose_feeds((), home=home)
    assert [feed.view.label for feed in feeds] == ["alice", "bob"]
    assert all(isinstance(feed, SocketFeed) for feed in feeds)


def test_nodes_by_name_or_by_path(home: Path) -> None:
    with serve(home, "alice"):
        by_name, by_path = choose_feeds(("alice", str(home / "run" / "alice.sock")), home=home)
    assert isinstance(by_name, SocketFeed)
    assert isinstance(by_path, SocketFeed)
    assert by_name.path == by_path.path


def test_a_recording_and_a_run_directory(tmp_path: Path) -> None:
    (replay,) = choose_feeds((), replay=SAMPLE, speed=2.0)
    assert isinstance(replay, ReplayFeed)
    (tmp_path / "metrics.jsonl").touch()
    (followed,) = choose_feeds((), run_dir=tmp_path)
    assert isinstance(followed, FileFeed)
    assert followed.path == tmp_path / "metrics.jsonl"


def test_errors_say_what_to_do(home: Path) -> None:
    with pytest.raises(ConfigError, match="start one with `swarm run`"):
        choose_feeds((), home=home)
    with serve(home, "alice"), pytest.raises(ConfigError, match="did you mean 'alice'"):
        choose_feeds(("alise",), home=home)
    with pytest.raises(ConfigError, match="exclude each other"):
        choose_feeds(("alice",), replay=SAMPLE)
    with pytest.raises(ConfigError, match="not a file"):
        choose_feeds((), replay=home / "none.jsonl")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is not a file"):
        choose_feeds((), run_dir=home)


def test_without_a_terminal_it_names_the_other_way() -> None:
    with pytest.raises(ConfigError, match="swarm status --json"):
        monitor(replay=SAMPLE)

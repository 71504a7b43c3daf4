"""`swarm doctor`: each check alone, and the command with its exit code."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from node.config import load_config
from node.keys import create_key
from node.lock import hold
from node.paths import Home
from swarm_cli.commands import doctor
from swarm_cli.commands.doctor import Finding
from tests.swarm_cli.conftest import Swarm

PLENTY = 2**40


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def test_this_installation_is_sound() -> None:
    assert doctor.check_versions().ok
    assert doctor.check_imports().ok


def test_an_old_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.9.1+cpu")
    finding = doctor.check_versions()
    assert not finding.ok
    assert "torch 2.9.1+cpu" in finding.detail
    assert "pip install" in finding.fix


def test_a_home_is_judged_before_it_exists(home: Home, tmp_path: Path) -> None:
    assert doctor.check_home(home, PLENTY).ok
    assert not home.root.exists()
    assert not doctor.check_home(home, 2**20).ok
    (tmp_path / "file").touch()
    assert "cannot be written" in doctor.check_home(Home(tmp_path / "file" / "x"), PLENTY).detail
    assert "too long" in doctor.check_home(Home(tmp_path / ("x" * 90)), PLENTY).detail


def test_a_running_node_is_mentioned(home: Home) -> None:
    with hold(home.create().lock):
        finding = doctor.check_home(home, PLENTY)
    assert finding.ok
    assert "a node runs here now" in finding.detail


def test_a_key_is_read_as_a_node_would(home: Home) -> None:
    assert "no key yet" in doctor.check_key(home.key).detail
    create_key(home.key)
    assert doctor.check_key(home.key).ok
    home.key.chmod(0o644)
    assert "chmod 600" in doctor.check_key(home.key).detail
    home.key.unlink()
    home.key.symlink_to("elsewhere")
    assert not doctor.check_key(home.key).ok


def test_a_charter_is_read_as_a_node_would(home: Home) -> None:
    config = load_config([], {"home": home.create().root})
    assert doctor.check_charter(config).ok
    home.charter.write_bytes(b"damaged")
    finding = doctor.check_charter(config)
    assert not finding.ok
    assert "these bytes are no charter" in finding.detail


def test_a_port_in_use_is_found() -> None:
    assert doctor.check_listen("/ip4/0.0.0.0/tcp/0").ok
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        assert not doctor.check_listen(f"/ip4/127.0.0.1/tcp/{busy.getsockname()[1]}").ok


@pytest.mark.parametrize(
    ("now_s", "skew_s", "ok", "words"),
    [
        (1_600_000_000, None, False, "set the clock"),
        (1_800_000_000, None, True, ""),
        (1_800_000_000, 2.9, True, ""),
        (1_800_000_000, 300.0, False, "time synchronisation"),
        (1_800_000_000, -300.0, False, "time synchronisation"),
    ],
)
def test_the_clock(now_s: float, skew_s: float | None, ok: bool, words: str) -> None:
    finding = doctor.check_clock(now_s, skew_s)
    assert finding.ok is ok
    assert words in finding.fix


def test_one_failure_makes_the_exit_code(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    for check in ("_check_policy", "_check_network"):
        monkeypatch.setattr(doctor, check, lambda *_: Finding("network", True, "up"))
    monkeypatch.setattr(doctor, "_check_sandbox", lambda: Finding("sandbox", True, "strong"))
    ended = swarm("doctor")
    assert ended.code == 0
    assert ended.out.count("ok  ") == 9
    monkeypatch.setattr(doctor, "_check_sandbox", lambda: Finding("sandbox", False, "weak", "allow seccomp"))
    ended = swarm("doctor")
    assert ended.code == 1
    assert "FAIL sandbox: weak\n     -> allow seccomp\n" in ended.out
    ended = swarm("doctor", "--json")
    assert ended.code == 1
    assert [each["check"] for each in json.loads(ended.out) if not each["ok"]] == ["sandbox"]


@pytest.mark.slow
@pytest.mark.net
def test_a_malformed_peer_is_a_finding(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = doctor._check_network("hello")
    assert not finding.ok
    assert "'hello' is no address" in finding.detail

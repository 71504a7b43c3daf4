"""One node per home."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from node.state.lock import hold, is_held
from protocol.errors import ConfigError

ROOT = Path(__file__).parents[3]


def test_the_second_one_is_told_who_was_first(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert not is_held(lock)
    with hold(lock):
        assert is_held(lock)
        with (
            pytest.raises(ConfigError, match=rf"another node \(process {os.getpid()}\) runs with the home"),
            hold(lock),
        ):
            pytest.fail("two owners")
        assert is_held(lock)
    assert not is_held(lock)
    with hold(lock):
        assert lock.read_text() == f"{os.getpid()}\n"


def test_a_lock_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot open"), hold(tmp_path / "nosuch" / "lock"):
        pytest.fail("no folder")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot open"), hold(tmp_path / "link"):
        pytest.fail("followed a link")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.slow
def test_a_killed_owner_leaves_no_lock(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    code = (
        "import pathlib, sys\nfrom node.state.lock import hold\n"
        f"with hold(pathlib.Path({str(lock)!r})):\n    print('held', flush=True)\n    sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        assert is_held(lock)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert not is_held(lock)

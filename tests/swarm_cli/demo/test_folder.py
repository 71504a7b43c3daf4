"""The demo's folder goes away, with the demo or after it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from swarm_cli.demo.folder import demo_folder, remove_orphans


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_it_is_removed_also_after_an_error(temporary: Path) -> None:
    def work() -> None:
        with demo_folder(None) as root:
            (root / "wren" / "runs").mkdir(parents=True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert list(temporary.iterdir()) == []


def test_a_killed_demos_folder_is_removed_by_the_next(temporary: Path) -> None:
    orphan, making, other = (temporary / name for name in ("swarm-demo-dead", "swarm-demo-new", "else"))
    for folder in (orphan, making, other):
        folder.mkdir()
    (orphan / "lock").touch()
    (other / "lock").touch()
    with demo_folder(None) as root:
        assert not orphan.exists()
        assert making.exists()  # no lock yet: it may be a demo that starts right now
        assert other.exists()
        assert remove_orphans(temporary) == 0  # the running one is locked
        assert root.is_dir()


def test_a_kept_folder_is_new_and_stays(tmp_path: Path) -> None:
    with demo_folder(tmp_path / "kept") as root:
        (root / "wren").mkdir()
    assert (tmp_path / "kept" / "wren").is_dir()
    with pytest.raises(ConfigError, match="is not empty; choose a new one"), demo_folder(tmp_path / "kept"):
        pytest.fail("mixed two demos")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot use the folder --keep"), demo_folder(tmp_path / "file"):
        pytest.fail("used a file")


def test_without_a_temporary_folder_it_says_what_to_do(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "nosuch"))
    with pytest.raises(ConfigError, match="set TMPDIR, or use --keep"), demo_folder(None):
        pytest.fail("made one")

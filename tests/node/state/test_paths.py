"""Where files of a node lie."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from node.state.paths import Home, bundled, default_home
from protocol.errors import ConfigError

ROOT = Path(__file__).parents[3]


def test_home_comes_from_the_variable_else_the_platform(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SWARM_HOME", "~/swarm")
    assert default_home() == tmp_path / "swarm"
    monkeypatch.setenv("SWARM_HOME", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_home() == tmp_path / "data" / "murmuration"


def test_folders_are_closed_to_others(tmp_path: Path) -> None:
    home = Home(tmp_path / "deep" / "home").create()
    for folder in (home.root, home.state, home.sockets):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert home.create() == home  # a second start finds them there


def test_everything_lies_under_the_home(tmp_path: Path) -> None:
    home = Home(tmp_path)
    run = home.run("first").create()
    assert run.log.parent.is_dir()
    paths = [home.key, home.charter, home.state, home.socket("wren"), run.config, run.metrics, run.log]
    assert all(tmp_path in path.parents for path in [*paths, run.checkpoints])
    assert len(set(paths)) == len(paths)
    assert home.run("second").root != run.root


def test_a_socket_path_that_no_kernel_binds_is_refused_in_words(tmp_path: Path) -> None:
    name = "x" * (100 - len(str(tmp_path / "run" / ".sock")))
    assert len(str(Home(tmp_path).socket(name))) == 100
    with pytest.raises(ConfigError, match="too long for a Unix socket; choose a shorter SWARM_HOME"):
        Home(tmp_path).socket(name + "x")


def test_bundled_files_are_found_in_the_source_tree() -> None:
    assert bundled("demo.toml") == ROOT / "configs" / "demo.toml"
    with pytest.raises(ConfigError, match=r"'nosuch.toml' is not part of this installation"):
        bundled("nosuch.toml")

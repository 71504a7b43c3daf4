"""What the tests of opening a node start from: an empty home, the demo's rules, and tasks in this process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.config import NodeConfig, load_config
from node.environment.host import TrustedHost
from node.environment.tasks import open_environment
from node.state.paths import Home, bundled
from node.state.tasks import blobs_of
from protocol.identity import Identity
from protocol.messages import Charter

OURS = Identity.from_seed(b"o" * 32)


@contextlib.contextmanager
def trusted(config: NodeConfig, charter: Charter) -> Iterator[TrustedHost]:
    """The tasks of `charter` without a worker, which takes two seconds to start."""
    blobs = blobs_of(Home(config.home), charter.environments)
    yield TrustedHost(
        {
            spec.name: open_environment(spec.name, json.loads(spec.config), blobs=blobs)
            for spec in charter.environments
        }
    )


@pytest.fixture(autouse=True)
def tasks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swarms are founded without the sandbox."""
    monkeypatch.setattr("node.open.charter.open_host", trusted)


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    """Of a node with a new home."""
    home = Home(tmp_path / "home").create()
    return load_config([], {"home": home.root})


def rules(**changes: str) -> str:
    """The demo's, as TOML, with texts in them replaced."""
    text = bundled("demo-charter.toml").read_text(encoding="utf-8")
    for old, new in changes.items():
        text = text.replace(old, new)
    return text

"""What the tests of opening a node start from: an empty home, and the demo's rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.config import NodeConfig, load_config
from node.state.paths import Home, bundled
from protocol.identity import Identity

OURS = Identity.from_seed(b"o" * 32)


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

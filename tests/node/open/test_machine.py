"""How much memory a node finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.config import load_config
from node.open import machine
from node.open.machine import machine_of


def test_memory_is_the_smallest_of_what_is_free_and_what_may_be_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = load_config([], {"policy.device": "cpu"})
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert 0 < machine_of(config).free_bytes <= machine_of(config).total_bytes
    (tmp_path / "memory.max").write_text("max\n")
    free = machine_of(config).free_bytes
    assert free > 1_000_000
    (tmp_path / "memory.max").write_text("1000000\n")
    assert machine_of(config).free_bytes == 1_000_000
    (tmp_path / "memory.current").write_text("400000\n")
    assert machine_of(config).free_bytes == 1_000_000  # how much of that are cached files is not told
    (tmp_path / "memory.stat").write_text("anon 250000\ninactive_file 90000\nactive_file 10000\n")
    assert machine_of(config).free_bytes == 700_000
    (tmp_path / "memory.current").write_text("9000000\n")
    assert machine_of(config).free_bytes == 0
    config = load_config([], {"policy.device": "cpu", "policy.memory_gib": 1.5})
    assert machine_of(config).free_bytes == 1.5 * 2**30

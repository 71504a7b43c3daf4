"""How the yardstick's process ends when it does not do its work; what it measures is tested with vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from node.config import VllmConfig
from node.rollout.engine.base import EngineError
from swarm_cli.bench import baseline
from swarm_cli.bench.baseline import BareVllm

PYTHON = (sys.executable, "-I", "-S", "-c")
SILENT = "import time; time.sleep(60)"
FAILING = "import sys; sys.stdin.readline(); sys.exit('ImportError: nothing here\\nbye')"
READY_ONLY = "import sys, time; print('true', flush=True); time.sleep(60)"


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Every process that is started; the file of its errors hangs on as `child.stderr`."""
    started: list[subprocess.Popen[bytes]] = []
    popen: Any = subprocess.Popen

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        child = popen(*args, **options)
        child.stderr = options["stderr"]
        started.append(child)
        return child

    monkeypatch.setattr(baseline.subprocess, "Popen", start)
    monkeypatch.setattr(baseline, "_on_cpu", lambda: True)
    return started


def open_bare(monkeypatch: pytest.MonkeyPatch, program: str, start_timeout_s: float = 20.0) -> BareVllm:
    monkeypatch.setattr(baseline, "_COMMAND", (*PYTHON, program))
    return BareVllm(Path("model"), VllmConfig(start_timeout_s=start_timeout_s), max_model_len=64)


def left_open(child: subprocess.Popen[bytes]) -> list[str]:
    streams = {"stdin": child.stdin, "stdout": child.stdout, "stderr": child.stderr}
    return [name for name, stream in streams.items() if stream is not None and not stream.closed]


def test_a_child_that_is_silent_is_ended(
    monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]]
) -> None:
    with pytest.raises(EngineError, match=r"^bare vLLM gave no answer within 0\.05 s"):
        open_bare(monkeypatch, SILENT, start_timeout_s=0.05)
    (child,) = children
    assert child.returncode == -9
    assert left_open(child) == []


def test_a_child_that_fails_leaves_its_reason_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]]
) -> None:
    with pytest.raises(EngineError, match=r"^bare vLLM ended with code 1: ImportError: nothing here$"):
        open_bare(monkeypatch, FAILING)
    assert left_open(children[0]) == []


def test_a_workload_has_a_deadline_too(
    monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]]
) -> None:
    bare = open_bare(monkeypatch, READY_ONLY)
    monkeypatch.setattr(baseline, "TURN_S", 0.05)
    with pytest.raises(EngineError, match=r"no answer within 0\.05 s"):
        bare.generate([[1, 2]], [4])
    bare.close()
    bare.close()
    assert children[0].returncode == -9
    assert left_open(children[0]) == []

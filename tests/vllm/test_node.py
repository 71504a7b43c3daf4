"""Whole nodes with vLLM, as a person starts them: real processes, a killed engine, a swarm of two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from node.events import StepDone
from swarm_cli.demo.processes import EventTail

SMALL = (
    "rollout.engine=vllm", "vllm.kv_cache_mib=64", "vllm.max_context=128", "evaluate.prompts_per_task=4",
)  # fmt: skip
START_S = 240.0


def swarm(*arguments: str | Path) -> subprocess.Popen[str]:
    settings = [part for setting in SMALL for part in ("--set", setting)] if arguments[0] == "run" else []
    return subprocess.Popen(
        [sys.executable, "-m", "swarm_cli", *map(str, arguments), *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def await_step(
    metrics: Path, process: subprocess.Popen[str], wanted: Callable[[StepDone], bool] = lambda step: True
) -> None:
    tail, end_s = EventTail(metrics), time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        if any(isinstance(event, StepDone) and wanted(event) for event in tail.read()):
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no such step: {process.communicate()[1]}")


def engine_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The process that holds the model: vLLM titles it, and it has the most memory of our children."""
    children = psutil.Process(process.pid).children(recursive=True)
    (engine,) = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
    return engine


def test_a_killed_engine_is_replaced_and_the_run_ends_well(tmp_path: Path) -> None:
    home = tmp_path / "home"
    process = swarm(
        "run", "--home", home, "--steps", "60", "--json",
        "--set", "network.transport=none", "--set", "rollout.max_in_flight=48",
    )  # fmt: skip
    metrics = home / "runs/latest/metrics.jsonl"
    await_step(metrics, process)
    os.kill(engine_of(process).pid, signal.SIGKILL)
    out, err = process.communicate(timeout=START_S)
    assert process.returncode == 0, err
    assert "the vLLM engine process was ended by SIGKILL; it is started again with version" in err
    events = EventTail(metrics).read()
    assert len([event for event in events if isinstance(event, StepDone)]) == 60
    assert json.loads(out)["Evaluated"]["moment"] == "after"


def test_ctrl_c_ends_a_node_with_rollouts_under_way(tmp_path: Path) -> None:
    home = tmp_path / "home"
    process = swarm(
        "run", "--home", home, "--steps", "100000",
        "--set", "network.transport=none", "--set", "rollout.max_in_flight=48",
    )  # fmt: skip
    await_step(home / "runs/latest/metrics.jsonl", process)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to all of its processes
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "it is started again" not in err
    assert err.endswith("swarm: interrupted\n")
    assert not [child for child in psutil.wait_procs(children, timeout=15)[1] if child.is_running()]
    assert list((home / "runs/latest/checkpoints").glob("v*"))


def test_two_nodes_of_a_demo_train_on_each_others_rollouts_of_vllm(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    process = swarm(
        "demo", "--engine", "vllm", "--nodes", "2", "--steps", "100000", "--json", "--keep", kept,
        "--set", "evaluate.prompts_per_task=4",
    )  # fmt: skip
    for name in ("wren", "starling"):  # their engines take different times to start: no step number is safe
        await_step(kept / name / "runs/latest/metrics.jsonl", process, lambda step: step.groups_external > 0)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert not [child for child in psutil.wait_procs(children, timeout=15)[1] if child.is_running()]

"""Whole nodes with vLLM, as a person starts them: real processes, a killed engine, a swarm of two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from node.events import Evaluated, StepDone
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


def await_step(metrics: Path, process: subprocess.Popen[str]) -> None:
    tail, end_s = EventTail(metrics), time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        if any(isinstance(event, StepDone) for event in tail.read()):
            return
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no step: {process.communicate()[1]}")


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


def test_two_nodes_of_a_demo_share_rollouts_of_vllm(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    process = swarm(
        "demo", "--engine", "vllm", "--nodes", "2", "--steps", "12", "--json", "--keep", kept,
        "--set", "evaluate.prompts_per_task=4",
    )  # fmt: skip
    out, err = process.communicate(timeout=2 * START_S)
    assert process.returncode == 0, err
    for node in json.loads(out)["nodes"]:
        events = EventTail(kept / node["name"] / "runs/latest/metrics.jsonl").read()
        steps = [event for event in events if isinstance(event, StepDone)]
        assert len(steps) == 12
        assert sum(step.groups_external for step in steps) > 0
        assert [event.moment for event in events if isinstance(event, Evaluated)] == ["before", "after"]

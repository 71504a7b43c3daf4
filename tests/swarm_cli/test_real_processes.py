"""The command as a person uses it: real processes, real network daemons, real sandboxes, real signals.

Each test starts what it needs and asserts that nothing is left: no process, no folder. Steps and evaluations
are few; what the nodes learn is tested elsewhere.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from swarm_cli.commands.env import TEMPLATE
from swarm_cli.demo.processes import EventTail

pytestmark = [pytest.mark.slow, pytest.mark.net, pytest.mark.timeout(300)]

QUICK = ("--set", "evaluate.prompts_per_task=8")
LOOPBACK = ("--set", "network.listen=/ip4/127.0.0.1/tcp/0")
START_S = 120.0
"""Far above what a start takes, for machines with one busy core."""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Like pytest's, with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="swarm-test-") as folder:
        yield Path(folder)


@pytest.fixture
def start(start_swarm: Start) -> Iterator[Start]:
    """Start commands; whatever a failed test left of them is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
        started.append(start_swarm(*arguments, **environment))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.communicate()


def await_event(metrics: Path, process: subprocess.Popen[str], wanted: Callable[[object], bool]) -> object:
    """The first event that is `wanted`, while `process` runs."""
    tail, end_s = EventTail(metrics), time.monotonic() + START_S
    while time.monotonic() < end_s:
        for event in tail.read():
            if wanted(event):
                return event
        if process.poll() is not None:
            pytest.fail(f"ended with {process.returncode}: {process.communicate()[1]}")
        time.sleep(0.1)
    pytest.fail(f"nothing of that kind in {metrics}")


def is_step(event: object) -> bool:
    return type(event).__name__ == "StepDone"


def metrics_of(home: Path) -> Path:
    return home / "runs/latest/metrics.jsonl"


def newest_checkpoint(home: Path) -> int:
    """Version of the newest saved weights, 0 without any."""
    return max((int(path.name[1:]) for path in (home / "runs/latest/checkpoints").glob("v*")), default=0)


def is_start(event: object) -> bool:
    return type(event).__name__ == "NodeStarted"


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def end(process: subprocess.Popen[str], timeout_s: float = 30.0) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def assert_gone(processes: list[psutil.Process], timeout_s: float = 15.0) -> None:
    assert processes
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    assert [each.cmdline() for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []


def ask(start: Start, *arguments: str | Path) -> tuple[int, str, str]:
    return end(start(*arguments), 60.0)


# --- run, join, status, doctor ------------------------------------------------------------------------------


def test_run_join_status_and_ctrl_c(start: Start, tmp_path: Path) -> None:
    """Two homes on one machine: the second finds the first by its printed address, and groups flow."""
    first, second = tmp_path / "first", tmp_path / "second"
    run = start("run", "--home", first, "--name", "first", "--steps", "100000", *QUICK, *LOOPBACK)
    started = await_event(metrics_of(first), run, is_start)
    address = started.addresses[0]  # type: ignore[attr-defined]
    join = start(
        "join", address, "--yes", "--home", second, "--name", "second", "--steps", "100000",
        *QUICK, *LOOPBACK, "--set", "policy.path=models/wren",
    )  # fmt: skip
    for home, process in ((second, join), (first, run)):
        await_event(
            metrics_of(home),
            process,
            lambda event: is_step(event) and event.groups_external > 0,  # type: ignore[attr-defined]
        )
    assert (second / "charter.bin").read_bytes() == (first / "charter.bin").read_bytes()

    code, out, _ = ask(start, "status", "--home", second, "--json")
    (facts,) = json.loads(out)
    assert code == 0
    assert facts["name"] == "second"
    assert facts["peers_connected"] == 1
    assert [stage["stage"] for stage in facts["stages"]] == [
        "rollout", "verify", "share", "weight", "train", "broadcast"
    ]  # fmt: skip
    assert all({"waiting_for", "waiting_s"} <= stage.keys() for stage in facts["stages"])

    code, _, err = ask(start, "run", "--home", first)
    assert code == 2
    assert f"another node (process {run.pid}) runs with the home {first}" in err

    for process, home in ((join, second), (run, first)):
        if process is run:
            code, out, _ = ask(start, "doctor", "--home", tmp_path / "third", "--peer", address, "--json")
            assert code == 0, out
            checks = {each["check"]: each["detail"] for each in json.loads(out)}
            assert "answers, clock" in checks["network"]
        children = descendants(process)
        process.send_signal(signal.SIGINT)
        code, _, err = end(process)
        assert code == 130
        assert "stopped after" in err
        assert "join it:  swarm join /ip4/127.0.0.1/tcp/" in err
        assert err.endswith("swarm: interrupted\n")
        assert_gone(children)
        stopped = EventTail(metrics_of(home)).read()[-1]
        assert newest_checkpoint(home) == stopped.steps > 0  # type: ignore[union-attr]
        assert list((home / "run").iterdir()) == []
        assert not list(home.rglob("*.tmp"))
        assert_no_secret(home, err)


RIDDLES = """
name = "riddles"
max_new_tokens = 4
universe_size = 1024
[[environments]]
file = "riddle.py"
"""


def test_a_task_in_a_file_goes_from_its_author_to_who_joins(start: Start, tmp_path: Path) -> None:
    """The second node gets code and questions after consent, and both train on each other's groups."""
    first, second = tmp_path / "first", tmp_path / "second"
    (tmp_path / "riddle.py").write_text(TEMPLATE.format(name="riddle"))
    demo = (Path(__file__).parents[2] / "configs/demo-charter.toml").read_text(encoding="utf-8")
    (tmp_path / "rules.toml").write_text(RIDDLES + demo[demo.index("[[tokenizers]]") :])
    common = (
        "--config",
        "demo.toml",
        "--steps",
        "100000",
        "--set",
        "policy.path=models/wren",
        *QUICK,
        *LOOPBACK,
    )
    rules = f"charter={tmp_path / 'rules.toml'}"
    run = start("run", "--home", first, "--name", "first", "--set", rules, *common)
    started = await_event(metrics_of(first), run, is_start)
    address = started.addresses[0]  # type: ignore[attr-defined]

    code, _, err = ask(start, "join", address, "--yes", "--home", second, *LOOPBACK)
    assert code == 2
    assert "the task file/riddle is code of the founder" in err
    assert not (second / "tasks").exists()
    trust = ("--yes", "--trust-environment", "file/riddle")
    join = start("join", address, *trust, "--home", second, "--name", "second", *common)
    for home, process in ((second, join), (first, run)):
        await_event(
            metrics_of(home),
            process,
            lambda event: is_step(event) and event.groups_external > 0,  # type: ignore[attr-defined]
        )
    theirs, ours = ([*(home / "tasks").iterdir()] for home in (first, second))
    assert [each.name for each in ours] == [each.name for each in theirs]
    assert ours[0].read_bytes() == theirs[0].read_bytes()
    for process in (join, run):
        process.send_signal(signal.SIGINT)
        assert end(process)[0] == 130


def assert_no_secret(home: Path, *texts: str) -> None:
    """The private key is in its file and nowhere else that a node writes."""
    seed = (home / "identity.key").read_bytes()[4:36]
    forms = [seed, seed.hex().encode(), base64.b64encode(seed)[:40], repr(seed)[2:-1].encode()]
    written = [
        path.read_bytes() for path in home.rglob("*") if path.is_file() and path.name != "identity.key"
    ]
    for data in [*written, *(text.encode() for text in texts)]:
        assert not any(form in data for form in forms)


def test_an_address_where_nobody_listens(start: Start, tmp_path: Path) -> None:
    peer = "12D3KooWFMM2t31FiAagEyie4coBshMqpk4z15uxzNzywd7cBHkG"
    code, out, err = ask(start, "join", f"/ip4/127.0.0.1/tcp/1/p2p/{peer}", "--home", tmp_path / "home")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"swarm: /ip4/127.0.0.1/tcp/1/p2p/{peer} cannot be reached")
    assert not (tmp_path / "home" / "charter.bin").exists()


@pytest.mark.parametrize("kind", ["code", "auto_map", "empty"])
def test_a_model_folder_that_is_refused(start: Start, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    sentence = "lacks config.json"
    if kind != "empty":
        for file in (Path(__file__).parents[2] / "configs/models/wren").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        sentence = "models that bring code are refused"
    if kind == "code":
        (folder / "modeling_evil.py").write_text("raise SystemExit('ran')")
    if kind == "auto_map":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "evil.Evil"}}))
    code, _, err = ask(
        start, "run", "--home", tmp_path / "home", "--set", "network.transport=none", "--set",
        f"policy.path={folder}",
    )  # fmt: skip
    assert code == 2
    assert sentence in err.splitlines()[-1]
    assert "Traceback" not in err


def test_run_ends_by_itself_and_again_in_the_same_home(start: Start, tmp_path: Path) -> None:
    for _ in range(2):
        code, out, err = ask(
            start,
            "run",
            "--home",
            tmp_path,
            "--set",
            "network.transport=none",
            "--steps",
            "2",
            *QUICK,
            "--json",
        )
        assert code == 0, err
        assert json.loads(out)["NodeStopped"]["reason"] == "steps done"
        assert f"tail -F {tmp_path}/runs/latest/metrics.jsonl" in err
    ran = json.loads((tmp_path / "runs/latest/config.json").read_bytes())
    policy, train, supervise = ran["policy"], ran["train"], ran["supervise"]
    assert (policy["device"], policy["tuning"], policy["sharing"]) == ("cpu", "full", "concurrent")
    assert (train["optimiser"], supervise["enabled"]) == ("adamw", True)


def test_a_second_ctrl_c_does_not_wait_for_the_work_in_flight(start: Start, tmp_path: Path) -> None:
    run = start("run", "--home", tmp_path, *LOOPBACK, "--set", "evaluate.prompts_per_task=3000")
    metrics = tmp_path / "runs/latest/metrics.jsonl"
    await_event(metrics, run, lambda event: type(event).__name__ == "StagesSeen")  # evaluates by then
    children = descendants(run)
    run.send_signal(signal.SIGINT)
    await_event(metrics, run, lambda event: type(event).__name__ == "NodeStopped")
    run.send_signal(signal.SIGINT)
    code, _, err = end(run)
    assert code == 130
    assert "again to stop at once" in err
    assert not err.endswith("swarm: interrupted\n")  # the end in order would say so
    assert_gone(children)
    code, _, err = ask(start, "status", "--home", tmp_path)
    assert (code, "no node is running here" in err) == (1, True)


# --- demo ---------------------------------------------------------------------------------------------------


def test_the_demo_ends_with_one_line_of_json(start: Start, tmp_path: Path) -> None:
    demo = start(
        "demo", "--nodes", "2", "--steps", "4", "--with-liar", "--json", *QUICK, TMPDIR=str(tmp_path)
    )
    code, out, err = end(demo, START_S)
    assert code == 0, err
    (line,) = out.splitlines()
    nodes = json.loads(line)["nodes"]
    assert [(node["name"], node["steps"]) for node in nodes] == [("wren", 4), ("starling", 4)]
    assert all(node["eval_last"] is not None for node in nodes)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_node_fails_the_demo_in_one_sentence(start: Start, tmp_path: Path) -> None:
    demo = start("demo", "--nodes", "1", "--json", "--set", "policy.device=cuda", TMPDIR=str(tmp_path))
    code, out, err = end(demo, START_S)
    if code == 0:
        pytest.skip("this machine has a CUDA device")
    assert (code, out) == (1, "")
    last = err.splitlines()[-1]
    assert "failed with exit code 2, its last words: " in last
    assert "torch sees no CUDA device" in last
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("how", "nodes"), [("ctrl_c", "2"), ("twice", "1")])
def test_an_interrupted_demo_leaves_nothing(start: Start, tmp_path: Path, how: str, nodes: str) -> None:
    """SIGTERM takes the same way; a simulation gets it below."""
    demo = start("demo", "--nodes", nodes, "--steps", "100000", *QUICK, TMPDIR=str(tmp_path))
    (metrics,) = await_paths(tmp_path, "swarm-demo-*/wren/runs/latest/metrics.jsonl")
    await_event(metrics, demo, is_step)
    children = descendants(demo)
    if how == "ctrl_c":
        os.killpg(demo.pid, signal.SIGINT)
    else:
        demo.send_signal(signal.SIGINT)
        time.sleep(0.2)
        demo.send_signal(signal.SIGINT)
    code, out, err = end(demo)
    assert (code, out) == (130, "")
    assert err.endswith("swarm: interrupted\n")
    assert_gone(children, 5.0)
    assert list(tmp_path.iterdir()) == []


def test_nodes_of_a_killed_demo_end_and_the_next_one_cleans_up_and_prints_a_table(
    start: Start, tmp_path: Path
) -> None:
    folder, kept = tmp_path / "tmp", tmp_path / "kept"
    folder.mkdir()
    killed = start("demo", "--nodes", "1", "--steps", "100000", *QUICK, TMPDIR=str(folder))
    (metrics,) = await_paths(folder, "swarm-demo-*/wren/runs/latest/metrics.jsonl")
    await_event(metrics, killed, is_step)
    children = descendants(killed)
    killed.kill()
    assert_gone(children)
    killed.communicate()
    assert list(folder.iterdir()) != []

    demo = start(
        "demo", "--transport", "memory", "--nodes", "2", "--steps", "10", "--keep", kept, *QUICK,
        COLUMNS="100", TMPDIR=str(folder),
    )  # fmt: skip
    code, out, err = end(demo, START_S)
    assert code == 0, err
    assert list(folder.iterdir()) == []
    assert max(map(len, out.splitlines())) <= 100
    assert f"kept in {kept}" in out
    assert (kept / "wren/runs/latest/metrics.jsonl").is_file()
    lines = err.splitlines()
    assert all(line.startswith(("simulating", "wren      ", "starling  ")) for line in lines)
    assert len(lines) < 12


def test_an_interrupted_simulation_leaves_nothing(start: Start, tmp_path: Path) -> None:
    demo = start("demo", "--transport", "memory", "--steps", "100000", *QUICK, TMPDIR=str(tmp_path))
    (metrics,) = await_paths(tmp_path, "swarm-demo-*/wren/runs/latest/metrics.jsonl")
    await_event(metrics, demo, is_step)
    children = descendants(demo)
    demo.terminate()
    code, out, err = end(demo)
    assert (code, out) == (130, "")
    assert "Traceback" not in err
    assert_gone(children)
    assert list(tmp_path.iterdir()) == []


def await_paths(folder: Path, pattern: str) -> list[Path]:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if found := list(folder.glob(pattern)):
            return found
        time.sleep(0.05)
    pytest.fail(f"no {pattern} in {folder}")

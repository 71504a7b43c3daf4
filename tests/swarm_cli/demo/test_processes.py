"""The demo's processes, with small programs in place of nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from node.events import NodeStopped, Notice, encode_event
from swarm_cli.demo import processes
from swarm_cli.demo.plan import DemoOptions, PlannedNode, make_plan
from swarm_cli.demo.processes import DemoError, EventTail, check_alive, running, signals_interrupt, stop

ROOT = Path(__file__).parents[3]
SLEEPER = "import time; print('ready', flush=True); time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPER}"


@pytest.fixture
def node(tmp_path: Path) -> PlannedNode:
    return make_plan(DemoOptions(nodes=1, transport="memory"), tmp_path, {}).nodes[0]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes nodes run `code` instead of `swarm run`."""

    def use(code: str) -> None:
        real = subprocess.Popen

        def popen(command: list[str], **options: object) -> subprocess.Popen[bytes]:
            return real([sys.executable, "-c", code, *command[3:]], **options)  # type: ignore[call-overload, no-any-return]

        monkeypatch.setattr(processes.subprocess, "Popen", popen)

    return use


def words(node: PlannedNode) -> str:
    return (node.home.root / "output.log").read_text()


def await_words(node: PlannedNode, wanted: str) -> None:
    end_s = time.monotonic() + 20
    while wanted not in words(node):
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_a_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = EventTail(path)
    assert tail.read() == []
    first, second = Notice(at=1, level="info", text="x"), NodeStopped(at=2, reason="r", steps=1, wall_s=1.0)
    line = encode_event(second)
    path.write_bytes(encode_event(first) + line[:5])
    assert tail.read() == [first]
    with path.open("ab") as file:
        file.write(line[5:])
    assert tail.read() == [second]
    assert tail.read() == []


@pytest.mark.slow
def test_a_failed_process_is_quoted_in_one_sentence(
    node: PlannedNode, program: Callable[[str], None]
) -> None:
    program("import sys; print('first'); print('swarm: no CUDA \\x1b[31m device'); sys.exit(2)")
    with running([node]) as children:
        children[0].wait()
        with pytest.raises(
            DemoError, match="wren failed with exit code 2, its last words: 'no CUDA"
        ) as failed:
            check_alive([node], children)
    assert failed.value.exit_code == 1
    assert "\n" not in str(failed.value)
    assert "\x1b" not in str(failed.value)


@pytest.mark.slow
def test_leaving_ends_what_runs(node: PlannedNode, program: Callable[[str], None]) -> None:
    program(SLEEPER)
    with running([node]) as children:
        await_words(node, "ready")
        check_alive([node], children)
    assert children[0].returncode == -signal.SIGTERM


@pytest.mark.slow
def test_an_interrupt_while_stopping_ends_the_patience(
    node: PlannedNode, program: Callable[[str], None]
) -> None:
    program(STUBBORN)
    began_s = time.monotonic()
    with signals_interrupt(), running([node]) as children:
        await_words(node, "ready")
        signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        stop(children)
    assert children[0].returncode == -signal.SIGKILL
    assert time.monotonic() - began_s < processes.STOP_S


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_ending_signal_interrupts_the_block_only(number: signal.Signals) -> None:
    before = signal.getsignal(number)

    def wait() -> None:
        with signals_interrupt():
            os.kill(os.getpid(), number)
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        wait()
    assert signal.getsignal(number) is before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_a_child_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time\n"
        "from swarm_cli.demo.plan import DemoOptions, make_plan\n"
        "from swarm_cli.demo import processes\n"
        "real = processes.subprocess.Popen\n"
        f"processes.subprocess.Popen = lambda c, **o: real([sys.executable, '-c', {SLEEPER!r}], **o)\n"
        "options = DemoOptions(nodes=2, transport='memory')\n"
        f"plan = make_plan(options, pathlib.Path({str(tmp_path)!r}), {{}})\n"
        "with processes.running(plan.nodes) as children:\n"
        "    print(*[child.pid for child in children], flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(children) == 2
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


@pytest.mark.slow
def test_a_childs_configuration_is_the_planned_one_only(
    node: PlannedNode, program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SWARM_HOME` of the person must not move the demo's nodes into the person's home."""
    monkeypatch.setenv("SWARM_HOME", "/somewhere/else")
    program("import os, sys; print(sorted(k for k in os.environ if k.startswith('SWARM_')), sys.argv[1:])")
    with running([node]) as children:
        children[0].wait()
    assert words(node).startswith("[] ['run', '--config', ")

"""The node's side of scoring: the scores of in-process scoring, typed failures, replacement, no orphans."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest

import node.sandbox.host
from node.environment.host import Answers, FailureReason, HostFailure, ScoredGroup
from node.environment.records import Completion
from node.environment.tasks import open_environment
from node.sandbox.channel import ChannelError
from node.sandbox.host import SandboxedHost
from node.sandbox.records import ForkResult, ForkStatus, Outcome, SandboxLimits
from node.sandbox.replies import questions_of, scores_of
from protocol.errors import SandboxError
from protocol.messages import EnvironmentSpec
from tests.asking import scored

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

SPELL, COUNTDOWN = "reasoning_gym/spell_backward", "reasoning_gym/countdown"
CONFIG = {"min_word_len": 3, "max_word_len": 5}
SPECS = [EnvironmentSpec(SPELL, '{"max_word_len":5,"min_word_len":3}'), EnvironmentSpec(COUNTDOWN)]


@pytest.fixture(scope="module")
def scorer() -> Iterator[SandboxedHost]:
    with SandboxedHost(SPECS) as started:
        yield started


def completions(*texts: str, finished: bool = True) -> list[Completion]:
    return [Completion(text, finished) for text in texts]


@linux_only
@pytest.mark.slow
def test_scores_equal_those_computed_in_process(scorer: SandboxedHost) -> None:
    environment = open_environment(SPELL, CONFIG)
    for seed in range(5):
        prompt = environment.prompt(seed, 0)
        group = completions(str(prompt.entry["answer"]), "no", "") + completions("x", finished=False)
        result = scored(scorer, SPELL, seed, group)
        assert result == ScoredGroup(tuple(environment.score(prompt, each) for each in group))
        assert isinstance(result, ScoredGroup)
        assert result.scores[0].reward == 1.0


@linux_only
@pytest.mark.slow
def test_an_empty_group_has_no_scores(scorer: SandboxedHost) -> None:
    assert scored(scorer, SPELL, 0, []) == ScoredGroup(())
    assert scored(scorer, COUNTDOWN, 0, []) == ScoredGroup(())


@linux_only
@pytest.mark.slow
def test_threads_get_their_own_answers(scorer: SandboxedHost) -> None:
    environment = open_environment(SPELL, CONFIG)
    words = [str(environment.prompt(index, 0).entry["answer"]) for index in range(8)]
    results: dict[int, ScoredGroup | HostFailure] = {}

    def ask(index: int) -> None:
        results[index] = scored(scorer, SPELL, index, completions(words[index]))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    for index in range(8):
        result = results[index]
        assert isinstance(result, ScoredGroup)
        assert result.scores[0].reward == 1.0


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "detail"),
    [
        (completions("a", "\ud800"), "not valid Unicode"),
        (completions("x" * 300_000), "300000 bytes, more than 262144"),
        (completions(*["a"] * 65), "65 completions, more than 64"),
    ],
)
def test_what_needs_no_worker_to_be_refused(
    scorer: SandboxedHost, group: list[Completion], detail: str
) -> None:
    result = scored(scorer, SPELL, 0, group)
    assert isinstance(result, HostFailure)
    assert (result.reason, result.detail) == (FailureReason.MALFORMED, detail)


@linux_only
@pytest.mark.slow
def test_a_broken_prompt_is_nobodys_fault(scorer: SandboxedHost) -> None:
    """Seeds below zero are refused by the environment; the worker goes on."""
    assert scorer.questions(SPELL, [-1]) == [None]
    result = scored(scorer, SPELL, -1, completions("a"))
    assert result == HostFailure(FailureReason.UNAVAILABLE, "ValueError", 0)
    assert not FailureReason.UNAVAILABLE.is_authors_fault
    assert isinstance(scored(scorer, SPELL, 0, completions("a")), ScoredGroup)
    unknown = scored(scorer, "reasoning_gym/sudoku", 0, completions("a"))
    assert isinstance(unknown, HostFailure)
    assert unknown.reason is FailureReason.UNAVAILABLE


@linux_only
@pytest.mark.slow
def test_a_dead_worker_is_replaced_with_growing_pauses() -> None:
    now_s = 100.0
    with SandboxedHost(SPECS[:1], monotonic_s=lambda: now_s) as scorer:

        def kill_and_ask() -> ScoredGroup | HostFailure:
            pid = scorer.worker_pid
            assert pid is not None
            processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            os.kill(processes[-1].pid, signal.SIGKILL)
            psutil.wait_procs(processes[1:], timeout=10)
            return scored(scorer, SPELL, 0, completions("a"))

        first = kill_and_ask()
        assert isinstance(first, HostFailure)
        assert first.reason is FailureReason.UNAVAILABLE
        with mock.patch.object(node.sandbox.host, "WorkerProcess", side_effect=ChannelError("no process")):
            for restarts, pause_s in enumerate((0.5, 1.0, 2.0), start=1):
                for _ in range(2):  # the second is refused without an attempt
                    refused = scored(scorer, SPELL, 0, completions("a"))
                    assert isinstance(refused, HostFailure)
                    assert refused.reason is FailureReason.UNAVAILABLE
                    assert (scorer.restarts, scorer.worker_pid) == (restarts, None)
                now_s += pause_s - 0.1
                assert isinstance(scored(scorer, SPELL, 0, completions("a")), HostFailure)
                assert scorer.restarts == restarts
                now_s += 0.1
        assert isinstance(scored(scorer, SPELL, 0, completions("a")), ScoredGroup)
        assert scorer.restarts == 4


@linux_only
@pytest.mark.slow
def test_own_work_does_not_wait_for_strangers_answers() -> None:
    """Nor does a stranger's answer that hangs keep the next own one from its score."""
    with SandboxedHost(SPECS, SandboxLimits(cpu_s=90, wall_s=90, request_s=90)) as scorer:
        endless = completions("9**9**9")
        thread = threading.Thread(target=lambda: scored(scorer, COUNTDOWN, 0, endless))
        thread.start()
        assert scorer.worker_pid is not None
        while len(psutil.Process(scorer.worker_pid).children(recursive=True)) < 3:
            thread.join(timeout=0.001)  # until a fork evaluates the answer
        (own,) = scorer.score([group("a")])
        assert isinstance(own, ScoredGroup)
        assert all(isinstance(each, str) for each in scorer.questions(SPELL, range(300)))
        assert thread.is_alive()
    thread.join(timeout=5)


@linux_only
@pytest.mark.slow
def test_close_leaves_no_process() -> None:
    scorer = SandboxedHost(SPECS[:1])
    scorer.start()
    assert scorer.worker_pid is not None
    processes = [
        psutil.Process(scorer.worker_pid),
        *psutil.Process(scorer.worker_pid).children(recursive=True),
    ]
    assert len(processes) == 3
    scorer.close()
    assert psutil.wait_procs(processes, timeout=5)[1] == []
    scorer.close()
    closed = scored(scorer, SPELL, 0, completions("a"))
    assert closed == HostFailure(FailureReason.UNAVAILABLE, "the sandbox is not running")
    with pytest.raises(SandboxError, match="closed"):
        scorer.start()


@linux_only
@pytest.mark.slow
def test_close_does_not_wait_for_an_endless_answer() -> None:
    scorer = SandboxedHost(SPECS[1:], SandboxLimits(cpu_s=90, wall_s=90, request_s=90))
    scorer.start()
    assert scorer.worker_pid is not None
    worker = psutil.Process(scorer.worker_pid)
    processes = [worker, *worker.children(recursive=True)]
    results: list[ScoredGroup | HostFailure] = []
    endless = completions("9**9**9")
    thread = threading.Thread(target=lambda: results.append(scored(scorer, COUNTDOWN, 0, endless)))
    thread.start()
    while len(worker.children(recursive=True)) < len(processes):
        thread.join(timeout=0.001)  # until a fork evaluates the answer
    scorer.close()
    thread.join(timeout=5)
    assert psutil.wait_procs(processes, timeout=5)[1] == []
    assert isinstance(results[0], HostFailure)
    assert results[0].reason is FailureReason.UNAVAILABLE


@linux_only
@pytest.mark.slow
def test_killing_the_node_ends_the_worker_even_amid_an_endless_answer() -> None:
    code = (
        "import sys, threading\n"
        "from node.environment.host import Answers\n"
        "from node.environment.records import Completion\n"
        "from protocol.messages import EnvironmentSpec\n"
        "from node.sandbox.records import SandboxLimits\n"
        "from node.sandbox.host import SandboxedHost\n"
        "limits = SandboxLimits(cpu_s=90, wall_s=90, request_s=90)\n"
        f"scorer = SandboxedHost([EnvironmentSpec({COUNTDOWN!r})], limits)\n"
        "scorer.start()\n"
        f"work = lambda: scorer.score([Answers({COUNTDOWN!r}, 0, (Completion('9**9**9', True),))])\n"
        "threading.Thread(target=work).start()\n"
        "sys.stdout.write(f'{scorer.worker_pid}\\n'); sys.stdout.flush()\n"
    )
    root = Path(__file__).parents[3]
    node = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert node.stdout is not None
        worker = psutil.Process(int(node.stdout.readline()))
        processes = [worker, *worker.children(recursive=True)]
        node.send_signal(signal.SIGKILL)
        node.communicate(timeout=10)
        assert psutil.wait_procs(processes, timeout=10)[1] == []
    finally:
        node.kill()


@linux_only
@pytest.mark.slow
def test_an_environment_that_cannot_be_opened_says_why() -> None:
    with pytest.raises(SandboxError, match="spell_backward: word may not be set"):
        SandboxedHost([EnvironmentSpec(SPELL, '{"word":1}')]).start()


EVIL = """
import socket
from pathlib import Path

def tried(attempt):
    try:
        attempt()
    except OSError as error:
        return type(error).__name__
    return "it worked"

DONE = [
    tried(lambda: Path({secret!r}).read_bytes()),
    tried(lambda: Path({folder!r}, "marker").write_text("x")),
    tried(lambda: socket.create_connection(("127.0.0.1", {port}), timeout=1)),
]

def load(config):
    raise ValueError(f"imported, and tried: {{DONE}}")
"""


@linux_only
@pytest.mark.slow
def test_nothing_of_an_environment_is_imported_before_the_walls_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its author may do at import what an answer may do later: nothing."""
    packages, secret = tmp_path / "packages", tmp_path / "identity.key"
    secret.write_bytes(b"key")
    info = packages / "evil-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[murmuration.environments]\nevil = evil_tasks:load\n")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        source = EVIL.format(secret=str(secret), folder=str(tmp_path), port=listener.getsockname()[1])
        (packages / "evil_tasks").mkdir()
        (packages / "evil_tasks/__init__.py").write_text(source)
        monkeypatch.syspath_prepend(str(packages))
        with pytest.raises(SandboxError) as refused:
            SandboxedHost([EnvironmentSpec("evil", "{}")]).start()
    assert "imported, and tried: ['FileNotFoundError', 'PermissionError', 'OSError']" in str(refused.value)
    assert not (tmp_path / "marker").exists()


def test_specs_are_checked_before_any_process() -> None:
    with pytest.raises(SandboxError, match="not JSON"):
        SandboxedHost([EnvironmentSpec(SPELL, "{")])
    with pytest.raises(SandboxError, match="JSON object"):
        SandboxedHost([EnvironmentSpec(SPELL, "[]")])
    with pytest.raises(SandboxError, match="different names"):
        SandboxedHost([SPECS[0], SPECS[0]])


def test_before_start_nothing_is_scored() -> None:
    scorer = SandboxedHost(SPECS)
    result = scored(scorer, SPELL, 0, completions("a"))
    assert result == HostFailure(FailureReason.UNAVAILABLE, "the sandbox is not running")
    with pytest.raises(SandboxError, match="start"):
        _ = scorer.report


def group(*texts: str, seed: int = 0) -> Answers:
    return Answers(SPELL, seed, tuple(completions(*texts)))


@pytest.mark.parametrize(
    ("status", "reason"),
    [(status, FailureReason(status.value)) for status in ForkStatus if status.value in set(FailureReason)],
)
def test_each_end_of_a_fork_has_its_reason(status: ForkStatus, reason: FailureReason) -> None:
    outcome = Outcome(1, (ForkResult(3, 1, status, "why", b""),))
    assert scores_of(outcome, [group(*"abcd")]) == ([HostFailure(reason, "why", 3)], [])


def test_missing_results_are_malformed() -> None:
    ((result,), shared) = scores_of(Outcome(1, ()), [group(*"ab")])
    assert isinstance(result, HostFailure)
    assert (result.reason, shared) == (FailureReason.MALFORMED, [])


def test_a_fork_that_several_groups_shared_says_which_to_try_alone() -> None:
    outcome = Outcome(1, (ForkResult(0, 3, ForkStatus.TIMEOUT, "CPU time", b""),))
    results, shared = scores_of(outcome, [group("a"), group("b", "c"), group()])
    assert results[:2] == [HostFailure(FailureReason.TIMEOUT, "CPU time")] * 2
    assert results[2] == ScoredGroup(())
    assert shared == [0, 1]


def test_a_request_that_broke_is_nobodys_fault() -> None:
    outcome = Outcome(1, (ForkResult(0, 0, ForkStatus.BROKEN, "OSError", b""),))
    assert scores_of(outcome, [group("a")])[0] == [HostFailure(FailureReason.UNAVAILABLE, "OSError")]
    assert questions_of(outcome, 2, 100)[0] == [HostFailure(FailureReason.UNAVAILABLE, "OSError")] * 2


def test_limits_have_room_for_the_worst_honest_answer() -> None:
    limits = SandboxLimits()
    assert limits.cpu_s < limits.wall_s < limits.request_s

"""Answers that attack: through the real worker, behind every combination of walls that a machine may offer.

Two kinds of proof. With all layers, an attack is a typed rejection. With the detection layer off, the
answer's code really runs, and the walls alone must keep it from having any effect: an attack that gets what
it wants exits with status 42, which no wall produces. After each attack an honest group must score as before,
in the same worker.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from node.environment.host import FailureReason, HostFailure, ScoredGroup
from node.environment.records import Completion, Score
from node.environment.tasks import open_environment
from node.sandbox.host import SandboxedHost
from node.sandbox.records import Layer, SandboxLimits, Scored
from protocol.messages import EnvironmentSpec
from tests.asking import scored

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")]

COUNTDOWN, PUZZLE24, POLYNOMIAL, SPELL = (
    f"reasoning_gym/{task}"
    for task in ("countdown", "puzzle24", "polynomial_multiplication", "spell_backward")
)
SPECS = [EnvironmentSpec(name) for name in (COUNTDOWN, PUZZLE24, POLYNOMIAL, SPELL)]
LIMITS = SandboxLimits(cpu_s=1, wall_s=4.0, memory_bytes=128 * 1024 * 1024)
SEED = 7
GOT_IT = "exit status 42"

WALLS = {
    "everything": tuple(Layer),
    "all walls": (Layer.NAMESPACES, Layer.LANDLOCK, Layer.SECCOMP),
    "namespaces": (Layer.NAMESPACES,),
    "landlock and seccomp": (Layer.LANDLOCK, Layer.SECCOMP),
}


@pytest.fixture(scope="module")
def scorers() -> Iterator[dict[str, SandboxedHost]]:
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(SandboxedHost(SPECS, LIMITS, layers=layers))
            for name, layers in WALLS.items()
        }


@pytest.fixture(params=WALLS)
def walled(request: pytest.FixtureRequest, scorers: dict[str, SandboxedHost]) -> Iterator[SandboxedHost]:
    """One of the scorers; afterwards it must still be the same worker, and an honest group must score."""
    scorer = scorers[request.param]
    absent = set(WALLS[request.param]) - set(scorer.report.layers)
    if absent:
        pytest.skip(f"this machine does not offer {sorted(absent)}: {scorer.report.missing}")
    yield scorer
    assert_honest_scores(scorer)
    assert scorer.restarts == 0


@pytest.fixture
def full(scorers: dict[str, SandboxedHost]) -> Iterator[SandboxedHost]:
    yield scorers["everything"]
    assert_honest_scores(scorers["everything"])
    assert scorers["everything"].restarts == 0


def solution() -> str:
    entry = open_environment(COUNTDOWN, {}).prompt(SEED, 0).entry
    return str(entry["metadata"]["expression"])


def answers(*texts: str) -> list[Completion]:
    return [Completion(text=text, finished=True) for text in texts]


def assert_honest_scores(scorer: SandboxedHost) -> None:
    result = scored(scorer, COUNTDOWN, SEED, answers(solution(), "1 + 1", "no idea"))
    assert isinstance(result, ScoredGroup), result
    assert [score.reward for score in result.scores] == [1.0, 0.0, 0.0]


def attack(scorer: SandboxedHost, source: str) -> ScoredGroup | HostFailure:
    """Have the countdown scorer run `source`, which ends with status 42 when it got what it wanted."""
    result = scored(scorer, COUNTDOWN, SEED, answers(f"exec({source + GOT_IT_CODE!r})"))
    if isinstance(result, HostFailure):
        assert result.detail != GOT_IT, f"the attack succeeded: {source}"
    if Layer.DETECTION in scorer.report.layers:
        assert result == HostFailure(FailureReason.FORBIDDEN, "name exec", 0)
    return result


GOT_IT_CODE = "\nimport os; os._exit(42)"


def test_the_attacks_would_succeed_without_walls() -> None:
    """What proves that the tests below test something: the scorer does execute the answer."""
    code = (
        "from node.environment.records import Completion; from node.environment.tasks import *; "
        "e = open_environment('reasoning_gym/countdown', {}); "
        f"e.score(e.prompt(0, 0), Completion({f'exec({GOT_IT_CODE!r})'!r}, True))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=False)
    assert done.returncode == 42


def test_the_answer_does_run_behind_the_walls(scorers: dict[str, SandboxedHost]) -> None:
    for name in ("all walls", "namespaces", "landlock and seccomp"):
        result = scored(scorers[name], COUNTDOWN, SEED, answers(f"exec({GOT_IT_CODE!r})"))
        assert result == HostFailure(FailureReason.CRASHED, GOT_IT, 0)


def test_writing_a_file(walled: SandboxedHost, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for place in (tmp_path, Path("/tmp"), Path("/dev/shm"), Path("/")):
        path = place / "swarm-attack"
        attack(walled, f"open({str(path)!r}, 'w').write('x')")
        assert not path.exists()


def test_reading_a_key_file_of_the_same_user(walled: SandboxedHost, tmp_path: Path) -> None:
    key = tmp_path / "identity.key"
    key.touch(0o600)
    key.write_text("secret")
    attack(walled, f"open({str(key)!r}).read()")


def test_reading_a_world_readable_file(walled: SandboxedHost, tmp_path: Path) -> None:
    """The sandbox must not lean on file modes: the operator's other files are often open to all."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == tmp_path.owner() and folder != Path("/") and "pytest" in str(folder):
            folder.chmod(0o755)
    (tmp_path / "notes").write_text("private")
    attack(walled, f"open({str(tmp_path / 'notes')!r}).read()")
    attack(walled, "open('/etc/passwd').read()")


def test_listing_home(walled: SandboxedHost) -> None:
    attack(walled, f"import os\nif not set(os.listdir({str(Path.home())!r})) - {{'.pyenv'}}: raise OSError")


def test_connecting_to_loopback(walled: SandboxedHost) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        port = listener.getsockname()[1]
        attack(walled, f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")
        attack(walled, f"import socket; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', {port}))")
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_connecting_to_an_abstract_unix_socket(walled: SandboxedHost) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0swarm-test")
        listener.listen()
        attack(walled, "import socket; socket.socket(socket.AF_UNIX).connect('\\0swarm-test')")


def test_reading_the_environment_of_the_node(walled: SandboxedHost) -> None:
    attack(walled, f"open('/proc/{os.getpid()}/environ', 'rb').read(1)")
    attack(walled, f"open('/proc/{walled.worker_pid}/environ', 'rb').read(1)")


def test_inheriting_the_environment_of_the_node(
    walled: SandboxedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack(walled, "import os\nif 'HOME' not in os.environ and 'PATH' not in os.environ: raise OSError")


def test_signalling_the_node_and_another_process(walled: SandboxedHost) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        attack(walled, f"import os; os.kill({os.getpid()}, 0)")
        attack(walled, f"import os; os.kill({victim.pid}, 9)")
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.communicate(timeout=10)


def test_killing_the_worker(walled: SandboxedHost) -> None:
    """Process 1 of a pid namespace ignores it; without one the filter kills the attacker."""
    scored(walled, COUNTDOWN, SEED, answers("exec('import os; os.kill(os.getppid(), 9)')"))
    scored(walled, COUNTDOWN, SEED, answers("exec('import os; os.kill(-1, 9)')"))


def test_fork_bomb(walled: SandboxedHost) -> None:
    before = len(psutil.Process().children(recursive=True))
    attack(walled, "import os\nfor _ in range(100): os.fork()")
    attack(walled, "import threading\nfor _ in range(100): threading.Thread(target=input).start()")
    attack(walled, "import subprocess; subprocess.run(['/bin/true'])")
    assert len(psutil.Process().children(recursive=True)) <= before


def test_ten_gigabytes_at_once(walled: SandboxedHost) -> None:
    attack(walled, "bytearray(10**10)")


def test_memory_in_small_pieces(scorers: dict[str, SandboxedHost]) -> None:
    """The scorer swallows MemoryError; the worker sees the peak, and the answer gets no score for it."""
    scorer = scorers["all walls"]
    source = "a = []\nwhile True: a.append(bytearray(b'x' * 10**6))"
    result = scored(scorer, COUNTDOWN, SEED, answers(f"exec({source!r})"))
    assert isinstance(result, HostFailure)
    assert result.reason is FailureReason.MEMORY
    assert_honest_scores(scorer)


def test_patching_the_scorer_for_the_next_request(walled: SandboxedHost) -> None:
    scored(
        walled,
        COUNTDOWN,
        SEED,
        answers(
            "exec('import node.environment.tasks as e; from node.environment.records import Score; "
            "e.ReasoningGymEnvironment.score = lambda *_: Score(reward=9.0, components=())')"
        ),
    )


def test_patching_the_scorer_for_the_siblings(scorers: dict[str, SandboxedHost]) -> None:
    """Without the detection layer the first answer runs; the other two have forks of their own."""
    patch = (
        "exec('import node.environment.tasks as e; from node.environment.records import Score; "
        "e.ReasoningGymEnvironment.score = lambda *_: Score(reward=9.0, components=())')"
    )
    result = scored(scorers["all walls"], COUNTDOWN, SEED, answers(patch, "1 + 1", solution()))
    assert isinstance(result, ScoredGroup)
    assert [score.reward for score in result.scores] == [0.0, 0.0, 1.0]


def forged(*rewards: float) -> bytes:
    return msgspec.msgpack.encode([Scored(Score(reward, ()), "") for reward in rewards])


# Expressions for the bytes which the answer writes in place of its scores.
FORGERIES = {
    "two rewards": repr(forged(1.0, 1.0)),
    "not a number": repr(forged(float("nan"))),
    "infinite": repr(forged(float("inf"))),
    "nonsense": repr(b"\xc1\xc1\xc1"),
    "nothing": repr(b""),
    "a deep nest": "b'\\x91' * 50_000",
    "a huge claim": repr(b"\xdd\xff\xff\xff\xff"),
    "trailing bytes": repr(forged(1.0) + b"\x00"),
}


def writing(payload: str) -> str:
    """An answer that writes `payload` to every descriptor it has, then ends as if all were well."""
    source = (
        "import os\nfor fd in range(3, 200):\n"
        f" try: os.write(fd, {payload})\n"
        " except OSError: pass\n"
        "os._exit(0)"
    )
    return f"exec({source!r})"


@pytest.mark.parametrize("forgery", FORGERIES)
def test_writing_nonsense_to_the_reply_pipe(scorers: dict[str, SandboxedHost], forgery: str) -> None:
    scorer = scorers["all walls"]
    result = scored(scorer, COUNTDOWN, SEED, answers("1 + 1", writing(FORGERIES[forgery])))
    assert isinstance(result, HostFailure)
    assert (result.reason, result.completion) == (FailureReason.MALFORMED, 1)
    assert_honest_scores(scorer)


def test_writing_ones_own_reward(scorers: dict[str, SandboxedHost]) -> None:
    """What the detection layer is for. Without it the forger pays itself, but not a sibling."""
    answer = writing(repr(forged(1.0)))
    detected = scored(scorers["everything"], COUNTDOWN, SEED, answers("1 + 1", answer))
    assert detected == HostFailure(FailureReason.FORBIDDEN, "name exec", 1)
    undetected = scored(scorers["all walls"], COUNTDOWN, SEED, answers("1 + 1", answer))
    assert isinstance(undetected, ScoredGroup)
    assert [score.reward for score in undetected.scores] == [0.0, 1.0]


def test_flooding_the_reply_pipe(scorers: dict[str, SandboxedHost]) -> None:
    source = (
        "import os\nfor fd in range(3, 200):\n"
        " try:\n  while True: os.write(fd, b'x' * 65536)\n"
        " except OSError: pass"
    )
    result = scored(scorers["all walls"], COUNTDOWN, SEED, answers(f"exec({source!r})"))
    assert isinstance(result, HostFailure)
    assert result.reason is FailureReason.MALFORMED
    assert_honest_scores(scorers["all walls"])


def test_closing_the_pipe_and_staying(scorers: dict[str, SandboxedHost]) -> None:
    source = "import os; os.closerange(0, 200)\nwhile True: pass"
    result = scored(scorers["all walls"], COUNTDOWN, SEED, answers(f"exec({source!r})"))
    assert isinstance(result, HostFailure)
    assert result.reason is FailureReason.TIMEOUT
    assert_honest_scores(scorers["all walls"])


@pytest.mark.parametrize("environment", [COUNTDOWN, PUZZLE24])
def test_never_returning(full: SandboxedHost, environment: str) -> None:
    """No bytecode runs in that multiplication, so only the kernel can end it."""
    result = scored(full, environment, SEED, answers("9**9**9"))
    assert isinstance(result, HostFailure)
    assert result.reason is FailureReason.TIMEOUT


def test_a_group_of_slow_answers_has_one_budget() -> None:
    limits = SandboxLimits(cpu_s=30, wall_s=30.0, request_s=2.0)
    with SandboxedHost(SPECS[:1], limits) as scorer:
        result = scored(scorer, COUNTDOWN, SEED, answers(*["9**9**9"] * 8))
        assert isinstance(result, HostFailure)
        assert result.reason is FailureReason.TIMEOUT
        assert_honest_scores(scorer)


@pytest.mark.parametrize("environment", [COUNTDOWN, PUZZLE24, POLYNOMIAL])
@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('true')",
        "().__class__.__base__.__subclasses__()",
        "open('/tmp/swarm-attack', 'w')",
        "eval('1')",
        "getattr(1, 'real')",
        "'{0.real}'.format(1)",
        "(lambda: (yield))().gi_frame",
        "[0]*10**10",
        "breakpoint()",
        "(lambda: getattr)()",
    ],
)
def test_code_is_a_typed_rejection(
    full: SandboxedHost, environment: str, answer: str, capfd: pytest.CaptureFixture[str]
) -> None:
    result = scored(full, environment, SEED, answers(answer))
    assert isinstance(result, HostFailure), result
    assert result.reason is FailureReason.FORBIDDEN
    assert result.reason.is_authors_fault
    assert not Path("/tmp/swarm-attack").exists()
    assert capfd.readouterr() == ("", "")


def test_reading_the_oracle(scorers: dict[str, SandboxedHost]) -> None:
    """In `string_insertion` and others a bare `eval` sees the scorer's own variables."""
    name = "reasoning_gym/string_insertion"
    with SandboxedHost([EnvironmentSpec(name)], LIMITS) as scorer:
        honest = str(open_environment(name, {}).prompt(SEED, 0).entry["answer"])
        result = scored(scorer, name, SEED, answers(honest, 'entry["answer"]'))
        assert isinstance(result, HostFailure)
        assert (result.reason, result.detail, result.completion) == (FailureReason.FORBIDDEN, "name entry", 1)


def test_text_is_harmless_where_answers_are_not_evaluated(full: SandboxedHost) -> None:
    hostile = [
        "__import__('os').abort()",
        "9**9**9",
        "\x00\x1b]8;;x\x07",
        "\N{RIGHT-TO-LEFT OVERRIDE}",
        "[" * 5000,
    ]
    result = scored(full, SPELL, SEED, answers(*hostile))
    assert isinstance(result, ScoredGroup)
    assert [score.reward for score in result.scores] == [0.0] * len(hostile)

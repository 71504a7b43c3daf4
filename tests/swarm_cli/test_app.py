"""The entry point: starts fast, turns errors into one sentence and an exit code, matches its documents."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import typer

from protocol.errors import AddressError, SandboxError, SwarmError
from swarm_cli import app as module
from swarm_cli.app import app, main
from tests.swarm_cli.conftest import Swarm

ROOT = Path(__file__).parents[2]
COLD_START_S = 0.5
HEAVY = ("torch", "transformers", "hivemind", "reasoning_gym", "pydantic", "textual", "numpy", "cryptography")


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(**_: str) -> None:
        raise error

    monkeypatch.setattr(module, "app", fail)


@pytest.mark.slow
def test_help_starts_within_half_a_second() -> None:
    """Best of several, so that a busy machine does not count; processor time where it stays busy."""
    walls_s, processor_s = [], []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began_s = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "swarm_cli", "--help"], cwd=ROOT, check=True, capture_output=True
        )
        walls_s.append(time.perf_counter() - began_s)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(processor_s) < COLD_START_S
    if os.getloadavg()[0] < (os.cpu_count() or 1):
        assert min(walls_s) < COLD_START_S


@pytest.mark.slow
def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom swarm_cli.app import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        f"sys.stderr.write(','.join(m for m in {HEAVY!r} if m in sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "Train language models" in result.stdout
    assert result.stderr == ""


def test_the_installed_script_is_this_entry_point() -> None:
    (script,) = [entry for entry in entry_points(group="console_scripts") if entry.name == "swarm"]
    assert script.load() is main


@pytest.mark.slow
def test_the_installed_script_runs() -> None:
    script = shutil.which("swarm", path=str(Path(sys.executable).parent))
    if script is None:
        pytest.skip("the distribution is not installed beside this interpreter")
    result = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert "demo" in result.stdout


def test_every_command_of_the_readme_exists() -> None:
    """Words after `swarm` in the README are commands, and options in its code are theirs."""
    group = typer.main.get_command(app)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    lines = re.findall(r"^swarm ([a-z][^#\n]*)", blocks, re.MULTILINE) + re.findall(
        r"`swarm ([a-z][^`]*)`", text
    )
    assert len(lines) > 8
    for line in lines:
        words = line.split()
        command = group.commands[words[0]]  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            command = command.commands[words[1]]
        known = {
            name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in words if word.startswith("--")} <= known, line


def test_every_command_has_help_of_one_sentence(swarm: Swarm) -> None:
    for words in (["demo"], ["run"], ["join"], ["monitor"], ["status"], ["doctor"], ["key"], ["config"]):
        ended = swarm(*words, "--help")
        assert ended.code == 0
        assert "Usage: swarm" in ended.out


@pytest.mark.parametrize(
    ("error", "code"),
    [(AddressError("'x' is no address"), 2), (SandboxError("too weak"), 1), (SwarmError("a\n  * b"), 1)],
)
def test_errors_of_ours_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: SwarmError, code: int
) -> None:
    raising(monkeypatch, error)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    assert capsys.readouterr().err == f"swarm: {' '.join(str(error).split())}\n"


@pytest.mark.slow
def test_the_story_of_a_bug_shows_no_local_variables(tmp_path: Path) -> None:
    code = (
        "import swarm_cli.commands.key as key\nfrom swarm_cli.app import main\nimport sys\n"
        "def broken(home):\n    secret = 'a' + 'b' * 30 + 'c'\n    raise RuntimeError('a bug')\n"
        "key._home = broken\nsys.argv = ['swarm', 'key', 'show']\nmain()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    (story,) = tmp_path.glob("swarm-bug-*.txt")
    assert "RuntimeError: a bug" in result.stderr
    assert "Traceback" in story.read_text()
    assert "b" * 30 not in result.stderr + story.read_text()


def test_an_interrupt_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for error in (KeyboardInterrupt(), SystemExit(130)):
        raising(monkeypatch, error)
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 130
        assert capsys.readouterr().err == "swarm: interrupted\n"


def test_wrong_words_and_options_are_wrong_input(swarm: Swarm) -> None:
    for words in (
        ["frobnicate"],
        ["run", "--bogus"],
        ["demo", "--nodes", "0"],
        ["demo", "--steps", "many"],
        ["join"],
    ):
        ended = swarm(*words)
        assert ended.code == 2
        assert ended.out == ""
        assert "Traceback" not in ended.err


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_command_quietly() -> None:
    command = f"{sys.executable} -m swarm_cli config schema | head -c 1"
    result = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "{"
    assert result.stderr == ""

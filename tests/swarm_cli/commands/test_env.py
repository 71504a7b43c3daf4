"""`swarm env`: what a person sees who writes a task."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from node.environment.probe import Probe
from node.open.check import Shown, TaskCheck
from protocol.errors import ConfigError
from swarm_cli.app import app

REPORT = TaskCheck(
    name="file/t",
    pin="sha256:" + "0" * 64,
    bytes=12,
    distinct=7,
    held_out=1,
    evaluates_answers=False,
    question_ms=0.25,
    score_ms=0.5,
    probe=Probe(0.0, 0.25, "10"),
    refused=(),
    told=("it is small",),
    table=(Shown("1 +\x1b[31m 1 =", held_out=True, answer="2", reward=1.0),),
)


def swarm(*words: str) -> tuple[int, str]:
    ended = CliRunner().invoke(app, ["env", *words])
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return ended.exit_code, ended.output


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_new_writes_a_task_once() -> None:
    code, said = swarm("new", "riddle")
    assert code == 0
    assert "swarm env check riddle.py" in said
    compile(Path("riddle.py").read_text(), "riddle.py", "exec")
    Path("riddle.py").write_text("mine")
    with pytest.raises(ConfigError, match=r"riddle\.py is there already"):
        swarm("new", "riddle")
    assert Path("riddle.py").read_text() == "mine"
    for name in ("../x", "a b", "class", ""):
        with pytest.raises(ConfigError, match="cannot name a task"):
            swarm("new", name)


@pytest.mark.parametrize("refused", [(), ("it pays anything",)])
def test_check_says_what_it_found(refused: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    import msgspec

    asked: list[tuple[Path, dict[str, str]]] = []

    def check_task(path: Path, config: dict[str, str]) -> TaskCheck:
        asked.append((path, config))
        return replace(REPORT, refused=refused)

    monkeypatch.setattr("node.open.check.check_task", check_task)
    code, said = swarm("check", "t.py", "-s", "answer=boxed")
    assert asked == [(Path("t.py"), {"answer": "boxed"})]
    assert "\x1b" not in said
    assert "note: it is small" in said
    assert ("FAIL: it pays anything" in said) == (code == 2) == bool(refused)
    assert ("ok: a swarm can train on it" in said) == (not refused)
    code, said = swarm("check", "t.py", "--json")
    assert msgspec.json.decode(said[said.index("{") :])["distinct"] == 7


def test_list_knows_files_beside_what_is_built_in() -> None:
    swarm("new", "riddle")
    Path("other.py").write_text("print('no task')")
    Path("broken.py").write_text("def reward(")
    _, said = swarm("list", "--json")
    found = json.loads(said)
    assert found["riddle.py"] == "a task in a file, file/riddle"
    assert "is not valid Python" in found["broken.py"]
    assert "other.py" not in found
    assert found["reasoning_gym/chain_sum"] == "built in"

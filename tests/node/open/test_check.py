"""What `swarm env check` finds out about a task, in real sandboxes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from node.open.check import TaskCheck, check_task
from protocol.errors import ConfigError
from swarm_cli.commands.env import TEMPLATE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux"),
]


RANDOM = "def row(rng): return {'question': str(rng.random())}\n"
NOTHING = "def reward(answer, row): return 0"


def checked(folder: Path, code: str) -> TaskCheck:
    file = folder / "t.py"
    file.write_text(f"evaluates_answers = False\n{code}")
    return check_task(file, {})


def test_the_template_is_a_task(tmp_path: Path) -> None:
    file = tmp_path / "sums.py"
    file.write_text(TEMPLATE.format(name="sums"))
    report = check_task(file, {})
    assert (report.name, report.refused) == ("file/sums", ())
    assert report.distinct <= 100  # two digits
    assert 0 < report.held_out < report.distinct
    assert not report.evaluates_answers
    # Of the constants only "10" is a sum at all often: 9 of 100 pairs; 24 questions.
    assert report.probe.best in {"10", "1", "2"}
    assert len(report.table) == 10


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "words = {'one', 'two', 'three', 'four', 'five'}\n"  # in the order of their hashes
            "def row(rng): return {'question': ' '.join(words) + str(rng.random())}\n" + NOTHING,
            "a question differs between two runs",
        ),
        (RANDOM + "def reward(answer, row): return hash(answer) % 8 / 8", "differs between two runs"),
        (
            RANDOM + "def reward(answer, row): return 1",
            "it pays 1.00 for senseless text",
        ),
        (
            "rows = [{'question': 'one'}]\n" + NOTHING,
            "no question is held out of 1 different ones",
        ),
    ],
)
def test_what_no_swarm_can_train_on(tmp_path: Path, code: str, words: str) -> None:
    assert words in "; ".join(checked(tmp_path, code).refused)


def test_what_its_author_should_know(tmp_path: Path) -> None:
    report = checked(
        tmp_path,
        "def row(rng): return {'question': str(rng.randint(0, 30))}\n"
        "def reward(answer, row): return 0.75 if answer == 'A' else len(answer) if answer == '?!' else 0",
    )
    assert report.refused == ()
    told = "; ".join(report.told)
    assert "counts as wrong for a fault of the task: it raised ValueError" in told.replace(
        "count as", "counts as"
    )
    assert "it pays 0.75 for answering 'A' always" in told
    assert "different questions; a policy may learn them by heart" in told


def test_rows_are_tried_with_their_own_answers(tmp_path: Path) -> None:
    file = tmp_path / "capitals.jsonl"
    rows = [{"question": f"capital of {each}?", "answer": f"City {each}"} for each in range(80)]
    file.write_text("\n".join(map(json.dumps, rows)))
    report = check_task(file, {})
    assert (report.name, report.refused) == ("rows/capitals", ())
    assert all(each.reward == 1.0 and each.answer[5:] in each.question for each in report.table)
    assert check_task(file, {"compare": "number"}).refused == (
        f"it pays nothing for its own answers, as {report.table[0].answer!r}",
    )


def test_what_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^file/t cannot be opened: NameError: name 'nothing'"):
        checked(tmp_path, "nothing")

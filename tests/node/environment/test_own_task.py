"""Tasks in files: what a person writes becomes one blob, and the blob a task like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from node.environment.guard import guarded_question, guarded_score
from node.environment.own_task import OwnTask
from node.environment.pack import is_task_path, pack
from node.environment.records import Completion, Environment
from node.environment.rows import solution_of
from node.environment.tasks import open_environment
from protocol.codec import digest, encode
from protocol.errors import ConfigError
from protocol.tasks import TaskBundle, unpack

SUMS = 'rows = "sums.jsonl"\ndef reward(answer, row):\n    return float(answer == row["answer"])\n'
ROWS = [{"question": f"{each} + 1 =", "answer": str(each + 1)} for each in range(40)]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def task(code: str = "", rows: list[dict[str, Any]] | None = None, **config: object) -> Environment:
    """By the way that the sandbox's worker takes."""
    blob = encode(TaskBundle(code, lines(rows or [])))
    name = "file/t" if code else "rows/t"
    return open_environment(name, config, {}, {name: blob})


def reward(environment: Environment, text: str, seed: int = 3, *, finished: bool = True) -> float:
    prompt = environment.prompt(seed, 0)
    score, fault = guarded_score(environment, prompt, Completion(text, finished))
    assert fault == "", fault
    return score.reward


def test_code_with_rows_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_bytes(lines(ROWS))
    (tmp_path / "my sums.py").write_text(SUMS)
    name, blob = pack(tmp_path / "my sums.py")
    assert name == "file/my-sums"
    opened = open_environment(name, {}, {}, {name: blob})
    asked = {opened.prompt(seed, 0).text for seed in range(400)}
    assert asked == {row["question"] for row in ROWS}  # each of 40 is missed by 400 draws once in 20,000
    solution = solution_of(blob, {}, 3)
    assert solution is not None
    assert opened.prompt(3, 0).text == f"{int(solution) - 1} + 1 ="
    assert (reward(opened, f" {solution}\n"), reward(opened, "x")) == (1.0, 0.0)
    assert reward(opened, solution, finished=False) == 0.0


def test_equal_files_are_equal_blobs_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "1", "answer": "2"}\n\n')
    (tmp_path / "b.jsonl").write_text('{"answer":"2","question":"1"}')
    (tmp_path / "c.csv").write_text("answer,question\n2,1\n")
    (tmp_path / "d.csv").write_text("answer,question\n2,1\n3,2\n")
    first, second, third, fourth = (
        digest(pack(tmp_path / file)[1]) for file in sorted(p.name for p in tmp_path.iterdir())
    )
    assert first == second == third != fourth


def test_rows_from_a_function_depend_on_the_seed_alone() -> None:
    code = (
        'def row(rng):\n    return {"question": str(rng.random())}\ndef reward(answer, row):\n    return 1\n'
    )
    one, two = task(code), task(code)
    assert [one.prompt(seed, 0).text for seed in range(5)] == [two.prompt(seed, 0).text for seed in range(5)]
    assert len({one.prompt(seed, 0).text for seed in range(50)}) == 50


def test_rewards_by_name_are_weighed_and_shown() -> None:
    code = (
        'rows = [{"question": "q"}]\nweights = {"right": 2.0, "short": 0.5}\nreward_range = (-1, 1)\n'
        'def reward(answer, row):\n    return {"right": 0.25, "short": -1.0, "polite": 1}\n'
    )
    opened = task(code)
    score = opened.score(opened.prompt(0, 0), Completion("x", finished=True))
    assert score.reward == 2.0 * 0.25 - 0.5 + 1.0
    assert dict(score.components) == {
        "score": 1.0, "exact": 1.0, "finished": 1.0, "right": 0.25, "short": -1.0, "polite": 1.0
    }  # fmt: skip


def test_score_sees_the_whole_completion() -> None:
    code = (
        'rows = [{"question": "q"}]\nanswer = "boxed"\n'
        "def score(completion, row):\n"
        "    return 0.5 if not completion.finished else len(completion.text) / 10\n"
    )
    opened = task(code)
    assert opened.prompt(0, 0).text == "q\nGive the final answer as \\boxed{answer}."
    assert reward(opened, r"it is \boxed{abc}") == 0.3
    assert reward(opened, r"\boxed{abc}", finished=False) == 0.5
    assert reward(opened, "abc") == 0.0  # no answer, no reward
    assert reward(task(code, answer="whole"), "abc") == 0.3  # the charter's word comes first


@pytest.mark.parametrize(
    ("returned", "fault"),
    [
        ("2", "it raised ValueError"),
        ("float('nan')", "it raised ValueError"),
        ("None", "it raised TypeError"),
        ("'much'", "it raised ValueError"),
        ("{'right': 7}", "it raised ValueError"),
        ("1 / 0", "it raised ZeroDivisionError"),
    ],
)
def test_a_reward_that_is_none_is_a_fault_and_nothing(returned: str, fault: str) -> None:
    opened = task(f'rows = [{{"question": "q"}}]\ndef reward(answer, row):\n    return {returned}\n')
    score, told = guarded_score(opened, opened.prompt(0, 0), Completion("x", finished=True))
    assert (score.reward, told) == (0.0, fault)


def test_a_row_that_fails_has_no_question() -> None:
    opened = task("def row(rng):\n    return {}\ndef reward(answer, row):\n    return 1\n")
    assert guarded_question(opened, 1) is None


@pytest.mark.parametrize(
    ("compare", "solution", "equal", "other"),
    [
        ("text", "New York", " new\u00a0york. ", "york"),
        ("number", "1,000", "$1e3", "100"),
        ("number", "0.50", "50%", "0.5"),
        ("math", r"\frac{1}{2}", "$0.5$", "$0.25$"),
        ("math", "$x^2+2x+1$", "$(x+1)^2$", "$x^2$"),
    ],
)
def test_rows_alone_are_compared_by_meaning(compare: str, solution: str, equal: str, other: str) -> None:
    if compare == "math":
        pytest.importorskip("math_verify")
    opened = task(
        "", [{"task": "q", "solution": solution}], question="task", solution="solution", compare=compare
    )
    if (compare, solution) == ("number", "0.50"):
        equal, other = other, equal  # a percent sign is how it is written, not a hundredth
    assert (reward(opened, equal), reward(opened, other)) == (1.0, 0.0)
    assert opened.evaluates_answers == (compare == "math")


@pytest.mark.parametrize(
    ("code", "rows", "config", "words"),
    [
        ("x = (", None, {}, "file/t cannot be opened: SyntaxError"),
        ("1 / 0", None, {}, "file/t cannot be opened: ZeroDivisionError: division by zero"),
        ("rows = [{}]", None, {}, r"must define reward\(answer, row\), or score"),
        ("def reward(a, r): return 1", None, {}, "needs rows"),
        ("rows = 7\ndef reward(a, r): return 1", None, {}, "rows must be the name of a file, or a list"),
        ("rows = []\ndef reward(a, r): return 1", None, {}, "1 to 1000000 rows, this one 0"),
        ("rows = [{}]\nreward = 7", None, {}, "reward must be a function, not 7"),
        ("rows = [{'q': 1}]\ndef reward(a, r): return 1", None, {}, "row 1 has no column 'question'; .* 'q'"),
        (
            "rows = [{'question': 1}]\nreward_range = 1, 0\ndef reward(a, r): return 1",
            None,
            {},
            "reward_range",
        ),
        (
            "rows = [{'question': 1}]\nweights = {'a': 'b'}\ndef reward(a, r): return 1",
            None,
            {},
            "weights must",
        ),
        (SUMS, ROWS, {"compare": "text"}, "compare may not be set; the nearest valid name is 'question'"),
        ("", [{"question": "q"}], {}, "row 1 has no column 'answer'"),
        ("", ROWS, {"compare": "maths"}, "compare = 'maths' is unknown; it is one of 'text'"),
        ("", ROWS, {"solution": 7}, "solution must be text, not 7"),
        ("", ROWS, {"answer": "regex"}, "needs a pattern"),
        ("", ROWS, {"answer": "regex:("}, "has no valid pattern"),
        ("", ROWS, {"answer": "boxed:x"}, "is unknown"),
    ],
)
def test_what_is_no_task(
    code: str, rows: list[dict[str, Any]] | None, config: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        task(code, rows, **config)


@pytest.mark.parametrize(
    ("file", "data", "words"),
    [
        ("a.jsonl", b"", "has no rows"),
        ("a.jsonl", b"[1]\n", "line 1 is no JSON object: b'\\[1\\]"),
        ("a.jsonl", b'{"a": 1}\n{"a"', "line 2: "),
        ("a.jsonl", b'{"a": NaN}\n', "row 1 holds what JSON cannot say"),
        ("a.jsonl", b'{"a": "' + b"x" * 70_000 + b'"}', "row 1 has 70009 bytes, more than 65536"),
        ("a.csv", b"a,b\n1\n", "row 2 has another number of cells"),
        ("a.csv", b"a,b\n1,2,3\n", "row 2 has another number of cells"),
        ("a.csv", b"a\n\xff\n", "no CSV file in UTF-8"),
        ("a.txt", b"x", "is none of .py, .jsonl, .csv, .parquet"),
        ("a.parquet", b"x" * 20, "no table that pyarrow reads"),
        ("a.py", b"", "has 0 characters"),
        ("a.py", b"\xff", "cannot be read as UTF-8"),
        ("a.py", b"def (", "is not valid Python"),
        ("a.py", b'rows = "gone.jsonl"', "gone.jsonl cannot be read: No such file"),
    ],
)
def test_files_that_cannot_be_packed(tmp_path: Path, file: str, data: bytes, words: str) -> None:
    if file == "a.parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / file).write_bytes(data)
    with pytest.raises(ConfigError, match=words):
        pack(tmp_path / file)


def test_tables_of_pyarrow_are_the_same_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"answer": ["2", "3"], "question": ["1", "2"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    dataset = tmp_path / "dataset"
    dataset.mkdir()
    file = str(dataset / "data-00000-of-00001.arrow")
    with pyarrow.OSFile(file, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "a.jsonl").write_text('{"question":"1","answer":"2"}\n{"question":"2","answer":"3"}\n')
    rows = {unpack(pack(tmp_path / each)[1]).rows for each in ("a.parquet", "a.jsonl", "dataset")}
    assert len(rows) == 1


def test_what_a_person_means_by_a_word() -> None:
    assert is_task_path("riddle.py")
    assert is_task_path("./rows")
    assert not is_task_path("reasoning_gym/chain_sum")


def test_a_blob_that_is_none() -> None:
    with pytest.raises(ConfigError, match="these bytes are no task"):
        OwnTask("file/t", b"\x00", {})

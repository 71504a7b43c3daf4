"""Finding an answer in what a talkative policy says."""

from __future__ import annotations

import time

import pytest

from node.environment.answers import AnswerKind, AnswerRule, answer_rule


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("17", "17"),
        ("8 + 9 = 17.", "17"),
        ("= -3", "-3"),
        ("8-3", "3"),
        ("(-3)", "-3"),
        ("(2)-3", "3"),
        ("x-3", "3"),
        ("it is 3.50!", "3.50"),
        ("1,024", "1024"),
        ("-1,234,567.5 it is", "-1234567.5"),
        ("1,2,3", "3"),
        ("1,2345", "2345"),
        ("12,345,67", "67"),
        ("version 1.2.3", "3"),
        ("٣ or 4", "4"),
        ("seven", None),
        ("", None),
        ("٣", None),
    ],
)
def test_the_last_number(text: str, number: str | None) -> None:
    assert AnswerRule(AnswerKind.LAST_NUMBER).extract(text) == number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>7</answer>", "7"),
        ("so <answer>\n 7 \n</answer>.", "7"),
        ("<answer>6</answer><answer>7</answer>", "7"),
        ("<answer>6 <answer>7</answer>", "7"),
        ("<answer>7</answer> and <answer>", "7"),
        ("<answer></answer>", ""),
        ("<answer>7", None),
        ("7</answer>", None),
        ("</answer><answer>7", None),
        ("", None),
    ],
)
def test_the_last_tags(text: str, answer: str | None) -> None:
    assert AnswerRule(AnswerKind.TAGS).extract(text) == answer


def test_the_whole_is_the_answer() -> None:
    assert AnswerRule(AnswerKind.WHOLE).extract(" <answer>7</answer> ") == " <answer>7</answer> "
    assert AnswerRule(AnswerKind.WHOLE).question("2+2=") == "2+2="


@pytest.mark.parametrize("kind", [each for each in AnswerKind if each is not AnswerKind.REGEX])
@pytest.mark.parametrize(
    "piece",
    [
        "<answer>",
        "</answer>",
        "9",
        "1,",
        "111,",
        "1.",
        "-",
        "111,111,1111",
        "<answer></answer>",
        "\\boxed{",
        "A ",
    ],
)
def test_no_text_takes_long(kind: AnswerKind, piece: str) -> None:
    """A stranger writes the text: 200,000 characters in 10 ms or so, and not in minutes."""
    started_s = time.perf_counter()
    AnswerRule(kind).extract(piece * (200_000 // len(piece)))
    assert time.perf_counter() - started_s < 0.5


@pytest.mark.parametrize(
    ("rule", "text", "answer"),
    [
        ("boxed", r"so \boxed{\frac{1}{2}} and no more", r"\frac{1}{2}"),
        ("boxed", r"\boxed{1} then \boxed{ 2 }", "2"),
        ("boxed", r"\boxed{1", None),
        ("choice", "Not A, I think: (C).", "C"),
        ("choice", "A's apple", None),
        ("regex:Answer: (.*)", "Answer: 1\nAnswer: 2 x\n", "2 x"),
        ("regex:[0-9]+", "12 and 13", "13"),
        ("regex:(a)|b", "b", None),
    ],
)
def test_other_places_of_an_answer(rule: str, text: str, answer: str | None) -> None:
    assert answer_rule(rule).extract(text) == answer

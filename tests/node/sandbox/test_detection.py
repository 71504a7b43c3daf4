"""Which evaluated text counts as arithmetic; the hook itself is tested in `tests/hostile`."""

from __future__ import annotations

import pytest

from node.sandbox.detection import forbidden_name


@pytest.mark.parametrize(
    "text",
    [
        "(1 + 2) * 3 / 4",
        "Integer(3) * Symbol('x')**Integer(2) + sin(x)",
        "max(1, 2) + abs(-3)",
        "['a', 'b'] + [c for c in 'de']",
        "[[1, 0], [0, 1]]",
        "e.g + 5",
        "open",
    ],
)
def test_what_honest_answers_evaluate_to_passes(text: str) -> None:
    assert forbidden_name(compile(text, "<string>", "eval")) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("open('/etc/passwd')", "open"),
        ("__import__('os')", "__import__"),
        ("().__class__", "__class__"),
        ("[x for x in [1] if x.__class__]", "__class__"),
        ("lambda: (lambda: getattr)", "getattr"),
        ("f'{x.__globals__}'", "__globals__"),
        ("'{0}'.format(x)", "format"),
        ("x.gi_frame.f_back", "gi_frame"),
    ],
)
def test_what_reaches_the_interpreter_is_named(text: str, name: str) -> None:
    assert forbidden_name(compile(text, "<string>", "eval")) == name


def test_the_scorers_own_variables_are_out_of_bounds() -> None:
    code = compile("entry['answer']", "<string>", "eval")
    assert forbidden_name(code) is None
    assert forbidden_name(code, {"self", "entry"}) == "entry"
    assert forbidden_name(compile("entry", "<string>", "eval"), {"entry"}) == "entry"

"""The reserved key `prompt` of a task's config, which a stranger's charter may hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from node.environment.framing import Framing, framing
from protocol.errors import ConfigError
from protocol.messages import EnvironmentSpec


def of(**said: Any) -> Framing:
    return framing(EnvironmentSpec("t", json.dumps({"prompt": said})))


def test_what_is_said_before_the_question() -> None:
    whole = of(system="Be brief.", examples=[["1 + 1 =", "2"]], template={"enable_thinking": False})
    assert whole.messages("2 + 2 =") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1 ="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 2 ="},
    ]
    assert whole.template == {"enable_thinking": False}
    assert framing(EnvironmentSpec("t")).messages("q") == [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"sistem": "x"}, "prompt is a table of system, examples and template"),
        ({"system": 7}, "system must be text, not 7"),
        ({"examples": [["q"]]}, "examples is a list of up to 16 pairs"),
        ({"examples": [["q", "a"]] * 17}, "examples is a list of up to 16 pairs"),
        ({"template": [1]}, "template is a table of up to 8"),
        ({"template": {"__class__": "x"}}, "__class__ = 'x' is no plain value"),
        ({"template": {"tools": [1]}}, r"tools = \[1\] is no plain value"),
    ],
)
def test_what_is_no_framing(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        of(**said)

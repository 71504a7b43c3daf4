"""What stands around a question: system prompt, examples, arguments of the policy's chat template.

The reserved key `prompt` of an environment's config, in the charter, so that every member frames a question
alike; the environment never sees it. The policy's own template makes text of it (`node/rollout/policy.py`).

    [environments.config.prompt]
    system = "Answer with a number."
    examples = [["1 + 1 =", "2"]]
    template = { enable_thinking = false }
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from protocol.errors import ConfigError
from protocol.messages import EnvironmentSpec

__all__ = ["FRAMING_KEY", "Framing", "framing"]

FRAMING_KEY = "prompt"
"""Reserved in the config of every environment."""
MAX_EXAMPLES = 16
MAX_ARGUMENTS = 8
_ARGUMENT = re.compile(r"[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True)
class Framing:
    """As it stands in the charter."""

    system: str = ""
    """"" for none."""
    examples: tuple[tuple[str, str], ...] = ()
    """Questions with their answers, before the real one."""
    template: Mapping[str, bool | int | str] = field(default_factory=dict)
    """Variables that the chat template sees."""

    def messages(self, question: str) -> list[dict[str, str]]:
        """The conversation up to where the answer begins."""
        said = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in self.examples:
            said.append({"role": "user", "content": asked})
            said.append({"role": "assistant", "content": answered})
        return [*said, {"role": "user", "content": question}]


def framing(spec: EnvironmentSpec) -> Framing:
    """That of one task. Raises ConfigError with the key."""
    return _parsed(json.loads(spec.config).get(FRAMING_KEY, {}), f"{spec.name}: {FRAMING_KEY}")


def _parsed(said: Any, where: str) -> Framing:
    if not isinstance(said, Mapping) or not said.keys() <= {"system", "examples", "template"}:
        raise ConfigError(f"{where} is a table of system, examples and template, not {said!r:.120}")
    system, examples, template = said.get("system", ""), said.get("examples", ()), said.get("template", {})
    if not isinstance(system, str):
        raise ConfigError(f"{where}.system must be text, not {system!r:.60}")
    pairs = isinstance(examples, list | tuple) and all(
        isinstance(each, list | tuple) and len(each) == 2 and all(isinstance(text, str) for text in each)
        for each in examples
    )
    if not pairs or len(examples) > MAX_EXAMPLES:
        raise ConfigError(
            f"{where}.examples is a list of up to {MAX_EXAMPLES} pairs of question and answer, not "
            f"{examples!r:.60}"
        )
    if not isinstance(template, Mapping) or len(template) > MAX_ARGUMENTS:
        raise ConfigError(
            f"{where}.template is a table of up to {MAX_ARGUMENTS} values, not {template!r:.60}"
        )
    for name, value in template.items():
        if not _ARGUMENT.fullmatch(name) or not isinstance(value, bool | int | str):
            raise ConfigError(f"{where}.template.{name} = {value!r:.60} is no plain value of a template")
    return Framing(system, tuple((asked, answered) for asked, answered in examples), dict(template))

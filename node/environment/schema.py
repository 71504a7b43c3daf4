"""What the configuration of a reasoning-gym task may be: types, bounds and words, read from a table.

A charter is as hostile as any other message, and its configurations end in code of a third party, some of
which evaluates text or opens files. So only what the table `reasoning_gym.json` knows reaches it: numbers
within bounds, words out of a list. The table was made from the task's own classes and then measured
(`tests/node/environment/make_schema.py`). Imports nothing of reasoning-gym. Not for environments of other
packages, which check their own.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from protocol.errors import ConfigError

__all__ = ["checked_config", "known_tasks", "nearest"]

COMPOSITE = "composite"
MAX_PARTS = 16
"""Tasks in one composite task."""
SET_BY_US = frozenset({"seed", "size"})


@functools.cache
def _schemas() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    text = resources.files("node.environment").joinpath("reasoning_gym.json").read_text("utf-8")
    tasks: dict[str, dict[str, dict[str, Any]]] = json.loads(text)
    return tasks


def known_tasks() -> Sequence[str]:
    """The tasks that may be in a charter, in order."""
    return sorted((*_schemas(), COMPOSITE))


def nearest(name: str, valid: Sequence[str]) -> str:
    """What may have been meant, for the end of an error."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.0)
    return f"the nearest valid name is {close[0]!r}" if close else "there are none"


def checked_config(task: str, config: Mapping[str, object]) -> dict[str, Any]:
    """`config`, if every key of it is known and its value allowed. Raises ConfigError that names both, and
    for an unknown task."""
    if task == COMPOSITE:
        return _checked_parts(config)
    if task not in _schemas():
        raise ConfigError(f"unknown reasoning-gym task {task!r}; {nearest(task, known_tasks())}")
    schema = _schemas()[task]
    for key, value in config.items():
        where = f"reasoning_gym/{task}: {key}"
        if key in SET_BY_US:
            raise ConfigError(f"{where} is set by the prompt derivation, not by config")
        if key not in schema:
            raise ConfigError(f"{where} may not be set; {nearest(key, sorted(schema))}")
        problem = _problem(schema[key], value)
        if problem:
            raise ConfigError(f"{where} = {_shown(value)} is not allowed: {problem}")
    return dict(config)


def _checked_parts(config: Mapping[str, object]) -> dict[str, Any]:
    where = f"reasoning_gym/{COMPOSITE}"
    parts = config.get("datasets")
    if set(config) != {"datasets"} or not isinstance(parts, Sequence) or not 0 < len(parts) <= MAX_PARTS:
        raise ConfigError(f"{where} has one key, 'datasets', a list of 1 to {MAX_PARTS} tasks")
    checked = []
    for part in parts:
        if not isinstance(part, Mapping) or not {"name", "weight", "config"}.issuperset(part):
            raise ConfigError(f"{where}: {_shown(part)} is not a task with 'name', 'weight' and 'config'")
        name, weight, inner = part.get("name"), part.get("weight", 1.0), part.get("config", {})
        if not isinstance(name, str) or name == COMPOSITE or not isinstance(inner, Mapping):
            raise ConfigError(f"{where}: {_shown(part)} is not a task of reasoning-gym with its config")
        if problem := _problem({"from": 0.0, "to": 1000.0}, weight):
            raise ConfigError(f"{where}: weight = {_shown(weight)} is not allowed: {problem}")
        checked.append({"name": name, "weight": float(weight), "config": checked_config(name, inner)})
    return {"datasets": checked}


def _problem(rule: Mapping[str, Any], value: object) -> str:
    """Why a value breaks the rule, "" if it does not."""
    if "to" in rule:
        low, high = rule["from"], rule["to"]
        kinds = (int,) if isinstance(low, int) else (int, float)
        number = isinstance(value, kinds) and not isinstance(value, bool)
        if number and math.isfinite(value) and low <= value <= high:  # type: ignore[arg-type]
            return ""
        return f"it must be a {'whole number' if kinds == (int,) else 'number'} from {low} to {high}"
    if "some_of" in rule:
        words = rule["some_of"]
        listed = isinstance(value, list | tuple) and 0 < len(value) <= len(words)
        if listed and all(isinstance(each, str) and each in words for each in value):  # type: ignore[attr-defined]
            return ""
        return f"it must be a list out of {', '.join(words)}"
    if "one_of" in rule:
        return "" if isinstance(value, str) and value in rule["one_of"] else f"it is one of {rule['one_of']}"
    if "weights" in rule:
        share = {"from": 0.0, "to": 1.0}
        listed = isinstance(value, list | tuple) and len(value) == rule["weights"]
        if listed and not any(_problem(share, each) for each in value):  # type: ignore[attr-defined]
            return ""
        return f"it must be a list of {rule['weights']} numbers from 0 to 1"
    return "" if isinstance(value, bool) else "it must be true or false"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"

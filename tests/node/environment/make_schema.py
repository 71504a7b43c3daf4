"""Writes `node/environment/reasoning_gym.json`: what the configuration of each reasoning-gym task may be.

    python -m tests.node.environment.make_schema

Made once for a version of reasoning-gym, from its configuration classes, then measured and read:

- whole numbers and others lie within bounds: those that count something up to twice the default (of the key,
  or of its `max_` twin), those that are values up to ten times; a task that does not make three questions in
  LIMIT_S with a key at its bound gets the default as that bound;
- words, and lists of words, are chosen from those in the default, which leaves no room for code or paths;
- whatever else there is (paths, fonts, dates, options of boards) may not be set.

The node reads the result without importing reasoning-gym (`node/environment/schema.py`).
"""

from __future__ import annotations

import dataclasses
import enum
import json
import multiprocessing
import sys
import typing
from pathlib import Path
from typing import Any

import node.environment
from node.environment.tasks import reasoning_gym_tasks

FILE = Path(node.environment.__file__).parent / "reasoning_gym.json"
LIMIT_S = 4.0
SET_BY_US = {"seed", "size"}
NEVER = {
    *("data_file", "static_font", "static_word", "delimiter"),
    *("train", "precision", "max_retries", "max_attempts", "max_iterations"),
}
"""Paths, fonts and free text; what only changes how long a task may search."""
VALUES = (
    *("value", "coord", "target", "base", "year", "divisor", "dice_size", "offset", "range", "real", "imag"),
    *("bound", "constant", "angle", "delta", "difference"),
)
"""In names of what is a value, not a number of things."""
WHOLE_VALUES = {"min_n", "max_n", "min_num", "max_num"}
CALENDAR = (
    *("weekday_offset", "weekday_of_date", "weekday_of_date_from_first_day", "recurring_event_day"),
    *("count_days", "count_business_days", "is_leap_year"),
)


def schema_of(config: type) -> dict[str, Any]:
    """By key, for the fields of one configuration class."""
    fields = {field.name: field for field in dataclasses.fields(config) if field.name not in SET_BY_US}
    hints = typing.get_type_hints(config)
    made: dict[str, Any] = {}
    for name, field in fields.items():
        default = _default(field)
        if name in NEVER:
            continue
        longest = fields.get(f"max_{name[4:]}") if name.startswith("min_") else None
        twin = _default(longest) if longest is not None else default
        if name == "tasks":
            made[name] = {"some_of": list(CALENDAR)}
        elif hints[name] is bool:
            made[name] = {"is": "bool"}
        elif isinstance(default, enum.Enum):
            made[name] = {"one_of": [each.value for each in type(default)]}
        elif typing.get_origin(hints[name]) is typing.Literal:
            made[name] = {"one_of": list(typing.get_args(hints[name]))}
        elif isinstance(default, (int, float)) or hints[name] == int | None:
            made[name] = _numbers(name, default or 1, twin or 1, whole=hints[name] is not float)
        elif isinstance(default, (list, tuple, str)) and default and _strings(default):
            words = [each.value if isinstance(each, enum.Enum) else each for each in default]
            made[name] = {"some_of": list(dict.fromkeys(words))}
        elif isinstance(default, list) and default and all(isinstance(each, float) for each in default):
            made[name] = {"weights": len(default)}
    return made


def _default(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _strings(values: Any) -> bool:
    return all(isinstance(each.value if isinstance(each, enum.Enum) else each, str) for each in values)


def _numbers(name: str, default: float, twin: float, *, whole: bool) -> dict[str, Any]:
    most = max(abs(default), abs(twin))
    if not whole and 0 <= default <= 1 and twin <= 1:
        return {"from": 0.0, "to": 1.0}
    value = name in WHOLE_VALUES or any(part in name for part in VALUES)
    high = max(10 * most, 100) if value else max(2 * most, 2)
    low = -high if value and min(default, twin) < 0 else -1 if default < 0 else 0
    return {"from": int(low), "to": int(high)} if whole else {"from": float(low), "to": float(high)}


def _opens(task: str, config: dict[str, Any]) -> None:
    from reasoning_gym.factory import create_dataset

    for seed in (1, 2, 3):
        try:
            create_dataset(task, seed=seed, size=1, **config)[0]
        except Exception:  # refused: cheap
            return


def takes_long(task: str, config: dict[str, Any]) -> bool:
    """Whether three questions take more than LIMIT_S, in a process that is then ended."""
    process = multiprocessing.get_context("fork").Process(target=_opens, args=(task, config))
    process.start()
    process.join(LIMIT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        return True
    return False


def make() -> dict[str, dict[str, Any]]:
    """Of all tasks."""
    made: dict[str, dict[str, Any]] = {}
    for task, (_, config) in sorted(reasoning_gym_tasks().items()):
        if task == "composite":
            continue  # its parts are checked one by one
        schema = made[task] = schema_of(config)
        defaults = {field.name: _default(field) for field in dataclasses.fields(config)}
        for key, rule in schema.items():
            if "to" not in rule:
                continue
            twin = f"max_{key[4:]}" if key.startswith("min_") else ""
            at_bound = {key: rule["to"]} | ({twin: schema[twin]["to"]} if twin in schema else {})
            if takes_long(task, at_bound):
                known = defaults.get(twin) if twin in schema else defaults[key]
                sys.stderr.write(f"{task}.{key} takes too long at {rule['to']}: {known}\n")
                rule["to"] = known if known is not None else 1
        every = {key: rule["to"] for key, rule in schema.items() if "to" in rule}
        if takes_long(task, every):
            raise RuntimeError(f"{task} takes too long with all keys at their bounds")
    return made


if __name__ == "__main__":
    lines = [f"  {json.dumps(task)}: {json.dumps(keys)}" for task, keys in make().items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

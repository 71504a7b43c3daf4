"""A task of somebody's own, opened: the code of a file, or rows alone (`protocol/tasks.py`).

    rows: a file, a list, or `row(rng)` --> a row --> `prompt(row)` --> question
    completion --> the answer in it --> `reward(answer, row)` --> a number, or some by name and their weights

Runs in the sandbox's worker only: opening executes the file. What a row's question is, and whether it is held
out, is derived from seed and text as for any task, so equal questions never stand on both sides. `reward` is
asked only for what ended by itself; `score(completion, row)`, where the file has it, for everything.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from node.environment.compare import Compare, require_installed
from node.environment.records import Completion, Prompt, Score, item_seed
from node.environment.rows import MAX_ROWS, QUESTION, SOLUTION, Rows
from node.environment.schema import nearest
from protocol.errors import ConfigError
from protocol.tasks import unpack

__all__ = ["OwnTask"]

KEYS = {"question": QUESTION, "solution": SOLUTION, "compare": str(Compare.TEXT)}
"""Keys of the charter's config, and what stands where they are left out: the columns of question and answer,
and how answers are compared. The last two are for rows without code."""
EXACT = 1.0 - 1e-6
_NAMES = (
    "answer",
    "evaluates_answers",
    "prompt",
    "reward",
    "reward_range",
    "row",
    "rows",
    "score",
    "weights",
)
_MAX_PARTS = 16


class OwnTask:
    """See the module's docstring. Raises ConfigError for a file that is no task."""

    reproducible = True
    """Said by whoever wrote it; `swarm env check` tries."""

    def __init__(self, name: str, blob: bytes, config: Mapping[str, object]) -> None:
        bundle = unpack(blob)
        self.name = name
        self._config = _checked(name, config, has_code=bool(bundle.code))
        self._said = _executed(name, bundle.code) if bundle.code else {}
        self._rows = self._open_rows(bundle.rows)
        self._make: Callable[[random.Random], Mapping[str, Any]] | None = self._callable("row")
        self._ask: Callable[[Mapping[str, Any]], str] | None = self._callable("prompt")
        self._reward = self._callable("reward")
        self._score = self._callable("score")
        self._compare = Compare(self._config["compare"])
        self._low, self._high = self._range()
        self._weights = self._parts()
        self.answer: str | None = self._said.get("answer")
        """Where the answer stands, as the file says; the charter's word comes first."""
        if not bundle.code:
            require_installed(self._compare)
            self.evaluates_answers = self._compare.evaluates_answers
        else:
            self.evaluates_answers = bool(self._said.get("evaluates_answers", True))
            if (self._reward is None) == (self._score is None):
                raise ConfigError(f"{name} must define reward(answer, row), or score(completion, row)")
        if (self._rows is None) == (self._make is None):
            raise ConfigError(
                f'{name} needs rows: rows = "questions.jsonl", a list of dictionaries, or def row(rng)'
            )
        self._try_columns()

    def prompt(self, seed: int, index: int) -> Prompt:
        """See `Environment.prompt`."""
        drawn = item_seed(seed, index)
        if self._rows is not None:
            row = self._rows[drawn % len(self._rows)]  # as in `rows.solution_of`
        elif self._make is not None:
            row = self._make(random.Random(drawn))
            if not isinstance(row, Mapping):
                raise TypeError(f"row(rng) returned a {type(row).__name__} instead of a dictionary")
        text = self._ask(row) if self._ask is not None else str(row[self._config["question"]])
        return Prompt(environment=self.name, text=text, seed=seed, index=index, entry=dict(row))

    def score(self, prompt: Prompt, completion: Completion) -> Score:
        """See `Environment.score`. Raises what the file raises, and ValueError for a reward out of its
        range; a fault, as `guard.py` says."""
        finished = float(completion.finished)
        if self._score is not None:
            paid: Any = self._score(completion, prompt.entry)
        elif not completion.finished:
            paid = self._low if self._low > 0 else 0.0
        elif self._reward is not None:
            paid = self._reward(completion.text.strip(), prompt.entry)
        else:
            solution = str(prompt.entry[self._config["solution"]])
            paid = float(self._compare.equal(completion.text.strip(), solution))
        parts = {str(name): self._number(value) for name, value in self._by_name(paid).items()}
        reward = sum(value * self._weight(name) for name, value in parts.items())
        named = tuple(sorted(parts.items())) if isinstance(paid, Mapping) else ()
        exact = float(reward >= EXACT)
        return Score(
            reward=reward, components=(("score", reward), ("exact", exact), ("finished", finished), *named)
        )

    def _by_name(self, paid: Any) -> Mapping[Any, Any]:
        if not isinstance(paid, Mapping):
            return {"": paid}
        if len(paid) > _MAX_PARTS - 3:
            raise ValueError(f"{len(paid)} named rewards, more than {_MAX_PARTS - 3}")
        return paid

    def _number(self, value: Any) -> float:
        number = float(value)
        if not math.isfinite(number) or not self._low <= number <= self._high:
            raise ValueError(f"a reward of {number!r} is outside {self._low:g} to {self._high:g}")
        return number

    def _weight(self, name: str) -> float:
        return self._weights.get(name, 1.0) if name else 1.0

    def _callable(self, name: str) -> Callable[..., Any] | None:
        value = self._said.get(name)
        if value is not None and not callable(value):
            raise ConfigError(f"{self.name}: {name} must be a function, not {value!r:.60}")
        return value

    def _open_rows(self, lines: bytes) -> Rows | Sequence[Mapping[str, Any]] | None:
        if lines:
            return Rows(lines)
        listed = self._said.get("rows")
        if listed is None:
            return None
        if not isinstance(listed, list | tuple) or not all(isinstance(row, Mapping) for row in listed):
            raise ConfigError(f"{self.name}: rows must be the name of a file, or a list of dictionaries")
        if not 0 < len(listed) <= MAX_ROWS:
            raise ConfigError(f"{self.name}: a task has 1 to {MAX_ROWS} rows, this one {len(listed)}")
        return listed

    def _range(self) -> tuple[float, float]:
        said = self._said.get("reward_range", (0.0, 1.0))
        try:
            low, high = (float(each) for each in said)
        except (TypeError, ValueError):
            low = high = math.nan
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError(
                f"{self.name}: reward_range must be two numbers, low and high, not {said!r:.60}"
            )
        return low, high

    def _parts(self) -> dict[str, float]:
        said = self._said.get("weights", {})
        if not isinstance(said, Mapping) or not all(
            isinstance(value, (int, float)) and math.isfinite(value) for value in said.values()
        ):
            raise ConfigError(
                f"{self.name}: weights must be numbers by the names of rewards, not {said!r:.60}"
            )
        return {str(name): float(value) for name, value in said.items()}

    def _try_columns(self) -> None:
        """Every row has the columns that are asked for."""
        if self._rows is None or self._ask is not None:
            return
        wanted = [self._config["question"], *([] if self._said else [self._config["solution"]])]
        for number in range(len(self._rows)):
            row = self._rows[number]
            for column in wanted:
                if column not in row:
                    near = nearest(column, sorted(row))
                    raise ConfigError(f"{self.name}: row {number + 1} has no column {column!r}; {near}")


def _checked(name: str, config: Mapping[str, object], *, has_code: bool) -> dict[str, str]:
    allowed = ["question"] if has_code else list(KEYS)
    for key, value in config.items():
        if key not in allowed:
            raise ConfigError(f"{name}: {key} may not be set; {nearest(key, allowed)}")
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{name}: {key} must be text, not {value!r:.60}")
    checked = {key: str(config.get(key, default)) for key, default in KEYS.items()}
    if checked["compare"] not in list(Compare):
        known = ", ".join(repr(str(each)) for each in Compare)
        raise ConfigError(f"{name}: compare = {checked['compare']!r} is unknown; it is one of {known}")
    return checked


def _executed(name: str, code: str) -> dict[str, Any]:
    """What the file defines, by name."""
    namespace: dict[str, Any] = {"__name__": name, "__builtins__": __builtins__}
    try:
        exec(compile(code, f"{name}.py", "exec"), namespace)  # noqa: S102 - behind walls, that is the point
    except Exception as error:  # whatever somebody's file raises
        raise ConfigError(f"{name} cannot be opened: {type(error).__name__}: {error}") from error
    return {key: namespace[key] for key in _NAMES if key in namespace}

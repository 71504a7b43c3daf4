"""An installed environment of the package verifiers as a task: its dataset, its parser, its rubric.

    a row --> the messages of its prompt, as one text --> question
    completion --> an assistant's message --> each reward function --> numbers by name, added by the weights

For environments of one turn. What has several turns or tools, asks a model to judge, compares the answers of
a group, or needs threads or an event loop is refused when it is opened. Runs in the sandbox's worker only:
opening imports the environment. The reward functions are called here, not by the rubric, which turns what
they raise into a zero: it is a fault (`guard.py`). Scoring has no event loop, since a fork in the sandbox may
have no sockets, and a loop wants a pair of them.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any

from node.environment.installed import verifiers_module
from node.environment.records import Completion, Prompt, Score, item_seed
from node.environment.rows import MAX_ROWS
from protocol.errors import ConfigError

__all__ = ["VerifiersTask"]

_EXACT = 1.0 - 1e-6
_MAX_FUNCTIONS = 13
_OURS = ("score", "exact", "finished")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.\-]+")


class VerifiersTask:
    """See the module's docstring. Raises ConfigError for what cannot be opened, or is not of one turn."""

    evaluates_answers = True
    reproducible = True
    """Said by whoever wrote it."""

    def __init__(self, name: str, config: Mapping[str, object]) -> None:
        self.name = name
        opened = self._opened(config)
        self._setup_state = opened.setup_state
        self._chat = opened.message_type == "chat"
        self._rewards = list(self._functions(opened.rubric))
        if not 0 < len(self._rewards) <= _MAX_FUNCTIONS:
            raise self._refused(f"has {len(self._rewards)} reward functions, not 1 to {_MAX_FUNCTIONS}")
        self._rows = self._rows_of(opened)
        try:
            self.score(self.prompt(0, 0), Completion("", True))
        except _WaitsError:
            raise self._refused("scores with what waits: a network, a thread, a timer") from None
        except Exception:  # noqa: S110 - of a third party's code on a senseless answer: a fault, told when scoring
            pass

    def prompt(self, seed: int, index: int) -> Prompt:
        """See `Environment.prompt`. What stands before the user's message is put in front of it."""
        row = self._rows[item_seed(seed, index) % len(self._rows)]
        return Prompt(
            environment=self.name, text=self._text(row["prompt"]), seed=seed, index=index, entry=row
        )

    def score(self, prompt: Prompt, completion: Completion) -> Score:
        """See `Environment.score`. A completion that was cut is scored like any other, as verifiers does it.
        Raises what a reward function raises."""
        state = self._state(prompt.entry, completion)
        parts: dict[str, float] = {}
        reward = 0.0
        for name, weight, function, objects in self._rewards:
            value = float(_done(_called(function, state, objects)))
            parts[name] = parts.get(name, 0.0) + value
            reward += weight * value
        own = (reward, float(reward >= _EXACT), float(completion.finished))
        return Score(
            reward=reward,
            components=(*zip(_OURS, own, strict=True), *((key, parts[key]) for key in sorted(parts))),
        )

    def _opened(self, config: Mapping[str, object]) -> Any:
        for key, value in config.items():
            if not isinstance(value, str | int | float | bool):
                raise ConfigError(
                    f"{self.name}: {key} must be text, a number, true or false, not {value!r:.60}"
                )
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            import verifiers

            opened = importlib.import_module(verifiers_module(self.name)).load_environment(**config)
        except Exception as error:  # whatever somebody's package raises
            if _is_of_openai(error):
                raise self._refused("asks a model over the network") from error
            raise ConfigError(f"{self.name} cannot be opened: {type(error).__name__}: {error}") from error
        finally:  # an environment takes them for itself
            for number, handler in handlers.items():
                signal.signal(number, handler)
        one_turn = verifiers.SingleTurnEnv
        if not isinstance(opened, one_turn) or any(
            getattr(type(opened), method) is not getattr(one_turn, method)
            for method in ("rollout", "env_response")
        ):
            raise self._refused(f"is a {type(opened).__name__}, which has more than one turn, or tools")
        if opened.oai_tools:
            raise self._refused("gives the model tools")
        return opened

    def _functions(self, rubric: Any) -> Iterator[tuple[str, float, Callable[..., Any], Mapping[str, Any]]]:
        """Name, weight, function, and objects that it may ask for, of all rubrics in this one."""
        from verifiers import JudgeRubric, Rubric, RubricGroup

        if isinstance(rubric, RubricGroup):
            for each in rubric.rubrics:
                yield from self._functions(each)
            return
        held = [*vars(rubric).values(), *rubric.class_objects.values()]
        for function in rubric.funcs:
            held += _seen_by(function)
        if isinstance(rubric, JudgeRubric) or any(map(_is_of_openai, held)):
            raise self._refused("asks a model over the network to judge")
        if any(isinstance(each, Executor) for each in held):
            raise self._refused(f"scores in threads ({type(rubric).__name__})")
        if type(rubric).score_rollout is not Rubric.score_rollout:
            raise self._refused(f"scores in a way of its own ({type(rubric).__name__})")
        for function, weight in zip(rubric.funcs, rubric.weights, strict=True):
            name = getattr(function, "__name__", type(function).__name__)
            if rubric._is_group_func(function):
                raise self._refused(f"compares the answers of a group ({name})")
            name = _NOT_IN_NAMES.sub("-", name).strip("-_.")[:60] or "reward"
            yield name + "_" * (name in _OURS), float(weight), function, rubric.class_objects

    def _rows_of(self, opened: Any) -> list[dict[str, Any]]:
        try:
            dataset = opened.get_dataset()
            if not 0 < len(dataset) <= MAX_ROWS:
                raise ConfigError(f"{self.name} has {len(dataset)} rows, not 1 to {MAX_ROWS}")
            rows: list[dict[str, Any]] = dataset.to_list()
        except ConfigError:
            raise
        except Exception as error:  # whatever builds a dataset, which may be on a server
            said = f"{type(error).__name__}: {str(error)[:300]}"
            raise ConfigError(
                f"{self.name} has no dataset here: {said}; there is no network in the sandbox, so the "
                "package must bring it"
            ) from error
        for row in rows:
            self._text(row.get("prompt"))
            if _info(row).get("oai_tools"):
                raise self._refused("gives the model tools")
        return rows

    def _text(self, messages: Any) -> str:
        """A prompt's messages as one text."""
        if not self._chat and isinstance(messages, str):
            return messages
        if not isinstance(messages, list) or not messages or messages[-1].get("role") != "user":
            raise self._refused(f"has a prompt that does not end with a user's message: {messages!r:.60}")
        for each in messages:
            if each["role"] not in {"system", "user", "assistant"} or not isinstance(
                each.get("content"), str
            ):
                raise self._refused(f"has a message in its prompts that is not text: {each!r:.60}")
        return "\n\n".join(each["content"] for each in messages)

    def _state(self, row: Mapping[str, Any], completion: Completion) -> Any:
        """What reward functions see of a rollout."""
        from verifiers.types import State

        given = copy.deepcopy(dict(row)) | {"info": copy.deepcopy(_info(row))}
        given.setdefault("task", self.name)
        said = [{"role": "assistant", "content": completion.text}] if self._chat else completion.text
        cut = not completion.finished
        turn = {"prompt": given["prompt"], "completion": said, "response": None, "tokens": None}
        turn |= {"reward": None, "advantage": None, "is_truncated": cut, "trajectory_id": "", "extras": {}}
        state = State(input=given)
        state.update(
            completion=said,
            trajectory=[turn],
            is_completed=True,
            is_truncated=cut,
            oai_tools=None,
            error=None,
        )
        return _done(self._setup_state(state))

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.name} {why}; only environments of one turn that score by themselves run here"
        )


class _WaitsError(RuntimeError):
    """A coroutine waited for something."""


def _called(function: Callable[..., Any], state: Any, objects: Mapping[str, Any]) -> Any:
    """The function with those of the usual arguments that it takes."""
    given = {key: state[key] for key in ("prompt", "completion", "task", "info")}
    given |= {"answer": state.get("answer", ""), "state": state, **objects}
    taken = inspect.signature(function).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        given = {key: value for key, value in given.items() if key in taken}
    return function(**given)


def _done(value: Any) -> Any:
    """The result of a coroutine that waits for nothing but its own; other values as they are."""
    if not inspect.iscoroutine(value):
        return value
    try:
        while value.send(None) is None:  # as asyncio.sleep(0) does
            pass
    except StopIteration as result:
        return result.value
    except RuntimeError as error:
        if "no running event loop" in str(error):
            raise _WaitsError from error
        raise
    finally:
        value.close()
    raise _WaitsError


def _info(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row's `info`, which may be written as JSON."""
    info = row.get("info") or {}
    parsed: Mapping[str, Any] = json.loads(info) if isinstance(info, str) else info
    return parsed


def _seen_by(function: Callable[..., Any]) -> list[Any]:
    """Values that a function names: of its module, of what encloses it, of its object."""
    held = (
        list(vars(owner).values())
        if hasattr(owner := getattr(function, "__self__", None), "__dict__")
        else []
    )
    plain = getattr(function, "__func__", function)
    if inspect.isfunction(plain):
        named = inspect.getclosurevars(plain)
        held += [*named.nonlocals.values(), *named.globals.values()]
    return held


def _is_of_openai(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "openai"

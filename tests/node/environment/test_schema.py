"""The charter is an adversary: every task with hostile values for every key."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import subprocess
import sys

import pytest

from node.environment.schema import checked_config, known_tasks
from node.environment.tasks import open_environment, reasoning_gym_tasks
from protocol.errors import ConfigError
from tests.node.environment.make_schema import FILE, SET_BY_US

TASKS = [task for task in known_tasks() if task != "composite"]
TABLE = json.loads(FILE.read_text())
CODE = "__import__('os').system('touch /tmp/ran')"
HOSTILE: list[object] = [
    *(CODE, "/etc/passwd", "../../identity.key", "/dev/zero", "", "x" * 10**6),
    *([CODE], ["/etc/passwd"], ["x"] * 10**5, [], [[]], {}, {"a": 1}, None),
    *(10**9, -(10**9), 2**63, 1e300, math.nan, math.inf, -math.inf, "10", b"1", object()),
]


def test_the_table_knows_every_task_and_no_more() -> None:
    assert list(known_tasks()) == sorted(reasoning_gym_tasks())


@pytest.mark.parametrize("task", TASKS)
def test_hostile_values_are_refused_with_their_key(task: str) -> None:
    fields = {field.name for field in dataclasses.fields(reasoning_gym_tasks()[task][1])}
    assert TABLE[task].keys() <= fields
    for key in fields - SET_BY_US:
        rule = TABLE[task].get(key, {})
        for value in HOSTILE:
            if isinstance(value, int) and rule.get("from", 1) <= value <= rule.get("to", 0):
                continue  # `max_n` of a task that counts bits may be a billion
            with pytest.raises(ConfigError) as refused:
                checked_config(task, {key: value})
            assert f"reasoning_gym/{task}: {key}" in str(refused.value)
            assert len(str(refused.value)) < 1000
    for key in ("seed", "size", "__class__", "validate"):
        with pytest.raises(ConfigError, match=key):
            checked_config(task, {key: 1})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("task", TASKS)
def test_what_is_allowed_at_its_bounds_opens_or_is_refused(task: str) -> None:
    """The bounds were measured when the table was made; a combination that a task refuses is a sentence."""
    for end in ("from", "to"):
        config = {key: rule[end] for key, rule in TABLE[task].items() if end in rule}
        with contextlib.suppress(ConfigError):
            assert open_environment(f"reasoning_gym/{task}", config).prompt(0, 0).text


@pytest.mark.parametrize(
    ("task", "config", "says"),
    [
        ("simple_integration", {"symbols": [CODE]}, "it must be a list out of x, X"),
        ("spell_backward", {"data_file": "/etc/passwd"}, "data_file may not be set"),
        ("number_sorting", {"max_numbers": 10**8}, "it must be a whole number from 0 to 20"),
        ("chain_sum", {"max_digits": 10**9}, "it must be a whole number from 0 to 8"),
        ("tower_of_hanoi", {"max_disks": 60}, "it must be a whole number from 0 to 14"),
        ("chain_sum", {"min_term": 2}, "the nearest valid name is 'min_terms'"),
        ("chain_sum", {"allow_negation": 1}, "it must be true or false"),
        ("chain_sum", {"min_terms": True}, "it must be a whole number"),
        ("word_sorting", {"transformation": "backwards"}, "it is one of"),
        ("syllogism", {"invalid_ratio": 2}, "it must be a number from 0.0 to 1.0"),
    ],
)
def test_what_was_tried(task: str, config: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        checked_config(task, config)
    assert says in str(refused.value)


PART = {"name": "chain_sum", "weight": 1.0, "config": {"min_terms": 2}}


@pytest.mark.parametrize(
    "datasets",
    [
        [],
        [PART] * 17,
        "chain_sum",
        [PART | {"name": "composite", "config": {"datasets": [PART]}}],
        [PART | {"name": "chain_sums"}],
        [PART | {"weight": math.inf}],
        [PART | {"config": {"max_digits": 10**9}}],
        [PART | {"path": "/etc/passwd"}],
        [7],
    ],
)
def test_parts_of_a_composite_task_are_checked_like_tasks(datasets: object) -> None:
    assert checked_config("composite", {"datasets": [PART]}) == {"datasets": [PART]}
    with pytest.raises(ConfigError):
        checked_config("composite", {"datasets": datasets})


def test_checking_imports_nothing_foreign() -> None:

    code = (
        "import sys; from node.environment.schema import checked_config; "
        "checked_config('chain_sum', {'max_digits': 3}); "
        "sys.exit('reasoning_gym' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""The text of new rules: what is written is what is read, whatever stands in it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.open.draft import environment_of, model_rows, rules_text, tokenizer_rows
from node.open.propose import Sample, TaskSample, propose
from node.rollout.policy import Policy
from node.state.paths import bundled
from protocol.charter import found, parse_toml
from protocol.errors import ConfigError
from protocol.identity import Identity


def policy(folder: Path, tokenizer: str = "a", words: int = 100, ends: tuple[int, ...] = (2,)) -> Policy:
    facts: dict[str, Any] = {
        "path": folder,
        "tokenizer_digest": tokenizer * 64,
        "base_model": "b" * 64,
        "vocab_size": words,
        "end_token_ids": ends,
    }
    return cast("Policy", SimpleNamespace(**facts))


def rows(*environments: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    wren = policy(bundled("models/wren"))
    return {
        "environments": list(environments) or [{"name": "reasoning_gym/chain_sum"}],
        "tokenizers": tokenizer_rows([wren]),
        "models": model_rows([wren]),
    }


def test_a_task_is_a_name_and_perhaps_a_config() -> None:
    assert environment_of("reasoning_gym/chain_sum") == {"name": "reasoning_gym/chain_sum"}
    text = 'reasoning_gym/chain_sum:{"max_terms": 2, "answer": "last_number"}'
    assert environment_of(text) == {
        "name": "reasoning_gym/chain_sum",
        "config": {"max_terms": 2, "answer": "last_number"},
    }


def test_a_task_in_a_file_is_named_from_where_the_rules_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "riddle.py").write_text("rows = []")
    monkeypatch.chdir(tmp_path)
    assert environment_of("./riddle.py") == {"file": "riddle.py"}
    row = environment_of('riddle.py:{"answer": "whole"}', Path("rules"))
    assert row == {"file": "../riddle.py", "config": {"answer": "whole"}}
    with pytest.raises(ConfigError, match="there is no task at other"):
        environment_of("./other.jsonl")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("reasoning_gym/chain_sm", "the nearest valid name is 'chain_sum'"),
        ("chain_sum", "unknown environment 'chain_sum'; .*'reasoning_gym/chain_sum'"),
        ("reasoning_gym/chain_sum:{max_terms}", "what stands behind the colon is not valid JSON"),
        ("reasoning_gym/chain_sum:[1]", r"must be a JSON object, and '\[1\]' is none"),
        ('reasoning_gym/chain_sum:{"max_terms":1e9}', "max_terms = 1000000000.0 is not allowed"),
        ('reasoning_gym/chain_sum:{"max_terms":null}', "max_terms = None is not allowed"),
    ],
)
def test_a_task_that_may_not_be_is_one_sentence(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        environment_of(text)


def test_models_that_share_a_tokenizer_share_its_row() -> None:
    first, second = policy(Path("/m/ada"), words=90, ends=(2, 7)), policy(Path("/m/my model!"), ends=(0, 2))
    assert tokenizer_rows([first, second, policy(Path("/m/eve"), tokenizer="c")]) == [
        {"name": "ada", "digest": "a" * 64, "vocab_size": 100, "end_token_ids": [0, 2, 7]},
        {"name": "eve", "digest": "c" * 64, "vocab_size": 100, "end_token_ids": [2]},
    ]
    assert [row["name"] for row in model_rows([first, second])] == ["ada", "my-model"]


def test_the_text_founds_a_swarm_and_says_what_was_measured() -> None:
    figures = Sample("wren", (TaskSample("reasoning_gym/chain_sum", 80, (3,) * 60, 10, 2, 0.21),), 99, 500.0)
    text = rules_text("sums", propose([figures]), rows(), [figures], "swarm run -c 'a\nname = 3'")
    charter = found(Identity.generate(), text, 0)
    assert (charter.name, charter.group_size, charter.max_new_tokens) == ("sums", 16, 4)
    assert charter.models[0].source == "bundled with this program: configs/models/wren"
    assert "#     swarm run -c 'a name = 3'\n" in text
    assert "reasoning_gym/chain_sum  wren   3 to 3  60/80  2/10   0.21\n" in text
    assert "2 of 10 questions are mixed with 8 answers" in text


def test_hostile_configs_are_written_as_they_are_or_not_at_all() -> None:
    config = {
        'a "key" = 1\n[rules]': 'x"\n[rules]\nmax_policy_lag = 1\n\x00\x7f\\😀',
        "nested": {"list": [1, -2.5, 1e300, True, {"a": []}], "": {}},
    }
    text = rules_text("odd", propose([]), rows({"name": "odd", "config": config}))
    assert parse_toml(text)["rules"]["max_policy_lag"] == 64
    with pytest.raises(ConfigError, match="TOML cannot say None"):
        rules_text("odd", propose([]), rows({"name": "odd", "config": {"a": None}}))


def test_unlike_models_may_differ_more() -> None:
    wren, rook = policy(bundled("models/wren")), policy(bundled("models/rook"), tokenizer="c")
    both = {**rows(), "models": model_rows([wren, rook]), "tokenizers": tokenizer_rows([wren, rook])}
    gaps = [
        parse_toml(rules_text("x", propose([]), each))["rules"]["max_logprob_gap"] for each in (rows(), both)
    ]
    assert gaps == [4.0, 10.0]

"""What founding or joining would say, found before."""

from __future__ import annotations

import msgspec
import pytest

from node.config import NodeConfig
from node.open.examine import examine
from node.state.keys import create_key
from node.state.paths import Home
from protocol.charter import found
from protocol.messages import Charter, EnvironmentSpec
from tests.node.open.conftest import OURS, rules, trusted


@pytest.fixture(autouse=True)
def without_walls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.open.examine.open_host", trusted)
    monkeypatch.setattr("node.open.examine.require_fit", lambda host: None)


def charter(*environments: EnvironmentSpec, head: str = "") -> Charter:
    """The demo's, with these tasks, and tokenizers that no model here speaks."""
    made = found(OURS, f"{head}\n{rules()}", 0)
    strange = msgspec.structs.replace(made.tokenizers[0], digest="e" * 64)
    return msgspec.structs.replace(made, environments=environments, tokenizers=(strange,))


def findings(config: NodeConfig, of: Charter, *, founding: bool = True) -> list[tuple[bool, str]]:
    return [(each.refused, each.text) for each in examine(config, of, founding=founding)]


def test_nothing_is_refused_where_only_the_model_is_missing(config: NodeConfig) -> None:
    ((refused, text),) = findings(config, charter(EnvironmentSpec("reasoning_gym/chain_sum")))
    assert not refused
    assert text.startswith("no model here speaks a tokenizer of the charter (wren); get one with")


def test_tasks_that_are_not_here_end_it_and_other_versions_are_told(config: NodeConfig) -> None:
    other = EnvironmentSpec("reasoning_gym/chain_sum", pin="reasoning-gym==99")
    told, refused = findings(config, charter(other, EnvironmentSpec("theirs")))
    assert (told[0], refused[0]) == (False, True)
    assert "here and reasoning-gym==99 in the charter" in told[1]
    assert "unknown environment 'theirs'" in refused[1]


@pytest.mark.slow
def test_a_worthless_task_is_refused_to_who_founds_and_not_to_who_joins(config: NodeConfig) -> None:
    worthless = charter(EnvironmentSpec("reasoning_gym/game_of_life_halting"))
    first, *_ = findings(config, worthless)
    assert first[0]
    assert "game_of_life_halting pays any text" in first[1]
    assert [refused for refused, _ in findings(config, worthless, founding=False)] == [False]


def test_a_closed_swarm_asks_for_a_key_and_then_for_its_token(config: NodeConfig) -> None:
    closed = charter(EnvironmentSpec("reasoning_gym/chain_sum"), head="closed = true")
    ((refused, text),) = findings(config, closed, founding=False)
    assert (refused, "this home has no key yet" in text) == (True, True)
    theirs = create_key(Home(config.home).key)
    ((refused, text),) = findings(config, closed, founding=False)
    assert (refused, f"{theirs.peer_id} has no valid token" in text) == (True, True)


@pytest.mark.slow
def test_a_model_without_room_for_a_question_is_told(config: NodeConfig) -> None:
    long = found(OURS, rules(**{"max_new_tokens = 9": "max_new_tokens = 511"}), 0)
    told = findings(config, long, founding=False)
    assert {refused for refused, _ in told} == {False}
    assert any(text.startswith("wren has 512 positions, and a question of") for _, text in told)

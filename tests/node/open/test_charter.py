"""Which charter a node runs with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from node.clock import SystemClock
from node.config import NodeConfig
from node.open.charter import (
    inspect_charter,
    installed_pins,
    open_membership,
    read_or_found_charter,
    worthless_tasks,
)
from node.state.paths import Home, bundled
from protocol.annex import issue_token, sign_annex
from protocol.charter import charter_bytes, found, swarm_id
from protocol.codec import encode
from protocol.errors import CharterError, ConfigError
from protocol.identity import Identity
from protocol.messages import Annex
from tests.node.open.conftest import OURS, rules, trusted

THEIRS = Identity.from_seed(b"t" * 32)


def test_without_any_a_swarm_is_founded_once(config: NodeConfig) -> None:
    first = read_or_found_charter(config, OURS, 1000)
    assert (first.name, first.founder, first.created_at) == ("demo", OURS.peer_id, 1000)
    assert read_or_found_charter(config, OURS, 2000) == first


def test_a_founder_that_starts_again_stays_in_its_swarm(config: NodeConfig, tmp_path: Path) -> None:
    own = tmp_path / "rules.toml"
    own.write_text(rules(group_size="group_size"))
    config = config.model_copy(update={"charter": str(own)})
    first = read_or_found_charter(config, OURS, 1000)
    assert swarm_id(read_or_found_charter(config, OURS, 2000)) == swarm_id(first)
    own.write_text(rules(**{'name = "demo"': 'name = "other"'}))
    changed = read_or_found_charter(config, OURS, 3000)
    assert (changed.name, changed.created_at) == ("other", 3000)
    assert read_or_found_charter(config, THEIRS, 4000).founder == THEIRS.peer_id


def test_a_given_charter_wins_over_the_one_at_home(config: NodeConfig, tmp_path: Path) -> None:
    read_or_found_charter(config, OURS, 1000)
    given = tmp_path / "given.bin"
    given.write_bytes(charter_bytes(found(THEIRS, rules(), 500)))
    config = config.model_copy(update={"charter": str(given)})
    assert read_or_found_charter(config, OURS, 2000).founder == THEIRS.peer_id
    path, charter = inspect_charter(config)
    assert (path, charter.founder) == (given, THEIRS.peer_id)


def test_a_damaged_charter_at_home_is_not_replaced(config: NodeConfig) -> None:
    kept = Home(config.home).charter
    kept.write_bytes(b"damaged")
    with pytest.raises(CharterError, match=f"{kept}: these bytes are no charter"):
        read_or_found_charter(config, OURS, 1000)
    assert kept.read_bytes() == b"damaged"


def test_looking_founds_nothing(config: NodeConfig) -> None:
    path, charter = inspect_charter(config)
    assert (path, charter.name) == (bundled("demo-charter.toml"), "demo")
    assert not Home(config.home).charter.exists()


def test_the_founder_pins_what_it_has(config: NodeConfig, tmp_path: Path) -> None:
    charter = read_or_found_charter(config, OURS, 1000)
    assert {spec.name: spec.pin for spec in charter.environments} == installed_pins(charter)
    assert all(spec.pin.startswith("reasoning-gym==") for spec in charter.environments)
    own = tmp_path / "rules.toml"
    own.write_text(
        rules(**{'name = "reasoning_gym/chain_sum"': 'name = "reasoning_gym/chain_sum"\npin = "x==1"'})
    )
    pinned = read_or_found_charter(config.model_copy(update={"charter": str(own)}), OURS, 1000)
    assert pinned.environments[2].pin == "x==1"


def test_a_founder_stays_in_its_swarm_when_a_task_is_updated(
    config: NodeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = read_or_found_charter(config.model_copy(update={"charter": "demo-charter.toml"}), OURS, 1000)
    monkeypatch.setattr("node.open.charter.pin", lambda name: "reasoning-gym==99")
    again = read_or_found_charter(config.model_copy(update={"charter": "demo-charter.toml"}), OURS, 2000)
    assert again == first
    assert set(installed_pins(first).values()) == {"reasoning-gym==99"}


def test_a_closed_swarm_asks_for_a_token_and_remembers_its_annex(config: NodeConfig) -> None:
    home, clock = Home(config.home), SystemClock()
    charter = found(THEIRS, f"closed = true\n{rules()}", 500)
    with pytest.raises(CharterError, match=f"is closed and {OURS.peer_id} has no valid token for it"):
        open_membership(home, OURS, charter, clock)
    now_ms = clock.now_ms()
    token = issue_token(THEIRS, charter, OURS.peer_id, now_ms=now_ms, expires_at=now_ms + 60_000)
    home.token.write_bytes(encode(token))
    membership = open_membership(home, OURS, charter, clock)
    assert membership.token == token
    annex = sign_annex(THEIRS, charter, Annex(swarm_id(charter), 1, THEIRS.peer_id, now_ms))
    assert membership.renew(annex)
    assert open_membership(home, OURS, charter, clock).annex == annex
    assert open_membership(home, THEIRS, found(THEIRS, rules(), 500), clock).annex is None  # another swarm
    home.token.write_bytes(b"damaged")
    with pytest.raises(CharterError, match="cannot be read"):
        open_membership(home, OURS, charter, clock)


def rules_of(task: str) -> str:
    """The demo's rules with this task alone."""
    head, _, rest = rules().partition("[[environments]]")
    tokenizers = rest[rest.index("[[tokenizers]]") :]
    return f'{head}[[environments]]\nname = "reasoning_gym/{task}"\n\n{tokenizers}'


def test_a_task_that_pays_any_text_founds_no_swarm(config: NodeConfig, tmp_path: Path) -> None:
    own = tmp_path / "rules.toml"
    own.write_text(rules_of("game_of_life_halting"))
    config = config.model_copy(update={"charter": str(own)})
    with pytest.raises(CharterError, match=r"game_of_life_halting pays any text \(1.00 of 1 for senseless"):
        read_or_found_charter(config, OURS, 1000)
    assert not Home(config.home).charter.exists()


def test_a_task_that_a_constant_answers_is_warned_of_once(config: NodeConfig, tmp_path: Path) -> None:
    own, warned = tmp_path / "rules.toml", list[str]()
    own.write_text(rules_of("coin_flip"))
    config = config.model_copy(update={"charter": str(own)})
    read_or_found_charter(config, OURS, 1000, warned.append)
    read_or_found_charter(config, OURS, 2000, warned.append)  # known: not probed again
    assert len(warned) == 1
    assert "coin_flip pays 0.92 of 1 for answering '0' always" in warned[0]


def test_the_demos_tasks_pay_for_answers_only(config: NodeConfig) -> None:
    charter = found(OURS, rules(), 0)
    with trusted(config, charter) as host:
        assert list(worthless_tasks(host, charter)) == []


def rules_with(file: str) -> str:
    head, _, rest = rules().partition("[[environments]]")
    return f'{head}[[environments]]\nfile = "{file}"\n\n{rest[rest.index("[[tokenizers]]") :]}'


def written(folder: Path, rows: int) -> None:
    lines = (json.dumps({"question": f"{each} + 1 =", "answer": str(each + 1)}) for each in range(rows))
    (folder / "sums.jsonl").write_text("\n".join(lines))


def test_a_task_in_a_file_is_pinned_and_another_one_is_another_swarm(
    config: NodeConfig, tmp_path: Path
) -> None:
    own = tmp_path / "rules.toml"
    own.write_text(rules_with("sums.jsonl"))
    config = config.model_copy(update={"charter": str(own)})
    written(tmp_path, 60)
    first = read_or_found_charter(config, OURS, 1000)
    (spec,) = first.environments
    assert spec.name == "rows/sums"
    assert installed_pins(first) == {"rows/sums": spec.pin}
    assert Home(config.home).task(spec.pin.removeprefix("sha256:")).is_file()
    assert swarm_id(read_or_found_charter(config, OURS, 2000)) == swarm_id(first)
    written(tmp_path, 61)
    assert swarm_id(read_or_found_charter(config, OURS, 3000)) != swarm_id(first)


def test_a_task_without_held_out_questions_founds_no_swarm(config: NodeConfig, tmp_path: Path) -> None:
    own = tmp_path / "rules.toml"
    own.write_text(rules_with("sums.jsonl"))
    written(tmp_path, 1)
    with pytest.raises(CharterError, match=r"rows/sums has no held-out question among 1 different ones"):
        read_or_found_charter(config.model_copy(update={"charter": str(own)}), OURS, 1000)


def test_a_file_that_is_not_there_is_named(config: NodeConfig, tmp_path: Path) -> None:
    own = tmp_path / "rules.toml"
    own.write_text(rules_with("gone.py"))
    with pytest.raises(ConfigError, match=r"there is no task at .*gone\.py"):
        read_or_found_charter(config.model_copy(update={"charter": str(own)}), OURS, 1000)

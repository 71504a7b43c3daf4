"""`swarm charter`: what is refused before anything is measured, what is shown, and a draft that trains."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from node.state.paths import bundled, default_home
from protocol.charter import charter_bytes, found, swarm_id
from protocol.identity import Identity
from tests.swarm_cli.conftest import Swarm

FOUNDER = Identity.from_seed(b"f" * 32)
SUMS = 'reasoning_gym/chain_sum:{"min_terms":2,"max_terms":2,"min_digits":1,"max_digits":1}'
WORDS = 'reasoning_gym/spell_backward:{"min_word_len":3,"max_word_len":5}'


def signed(folder: Path, created_at: int = 0) -> tuple[Path, str]:
    """A charter's file, and the id of its swarm."""
    charter = found(FOUNDER, bundled("demo-charter.toml").read_text(encoding="utf-8"), created_at)
    file = folder / "charter.bin"
    file.write_bytes(charter_bytes(charter))
    return file, swarm_id(charter)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--model", "wren", "--env", "reasoning_gym/chain_sm"), "the nearest valid name is 'chain_sum'"),
        (("--model", "no-such", "--env", SUMS), "'no-such' is no folder here"),
        (("--model", "wren", "--env", SUMS, "--out", "mine.toml"), "mine.toml exists and is not overwritten"),
        (("--model", "wren", "--env", SUMS, "--out", "mine"), "--out mine must end in .toml"),
        (("--model", "wren", "--env", SUMS, "--out", "no/mine.toml"), "there is no folder no for --out"),
    ],
)
def test_what_cannot_be_drafted_is_refused_at_once(
    swarm: Swarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("mine")
    ended = swarm("charter", "new", *options)
    assert (ended.code, ended.out) == (2, "")
    assert says in ended.err
    assert [(file.name, file.read_text()) for file in tmp_path.glob("*.toml")] == [("mine.toml", "mine")]


def test_a_signed_charter_is_shown(swarm: Swarm, tmp_path: Path) -> None:
    file, name = signed(tmp_path, created_at=1_796_083_200_000)  # 2026-12-01
    lines = swarm("charter", "show", file).out.splitlines()
    assert f"id         {name}" in lines
    assert f"founder    {FOUNDER.peer_id}, 2026-12-01 00:00 UTC" in lines
    assert "signature  valid" in lines
    assert any(line.startswith('task       reasoning_gym/chain_sum {"max_digits":1,') for line in lines)
    facts = json.loads(swarm("charter", "show", file, "--json").out)
    assert (facts["id"], facts["signature"], facts["group_size"]) == (name, "valid", 8)
    assert facts["environments"][2]["config"]["max_terms"] == 2


def test_a_signature_that_does_not_hold_is_shown_as_that_and_refused(swarm: Swarm, tmp_path: Path) -> None:
    file, _ = signed(tmp_path, created_at=2**53)  # a year that no calendar has
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    ended = swarm("charter", "show", file)
    assert ended.code == 2
    assert "signature  invalid" in ended.out
    assert "is not by its founder" in ended.err
    ended = swarm("charter", "check", file)
    assert ended.code == 2
    assert ended.out.startswith(f"REFUSED {file}: the signature of charter 'demo' is not by its founder")


def test_rules_are_shown_without_a_founder_and_the_home_has_a_charter_or_not(
    swarm: Swarm, tmp_path: Path
) -> None:
    facts = json.loads(swarm("charter", "show", "demo-charter.toml", "--json").out)
    assert (facts["id"], facts["founder"], facts["signature"]) == (None, None, "none")
    ended = swarm("charter", "show")
    assert (ended.code, ended.out) == (2, "")
    assert "there is no charter in" in ended.err
    default_home().mkdir()
    _, name = signed(default_home())
    assert name in swarm("charter", "show").out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name = ", "the charter is not valid TOML"),
        (
            'name = "x"\ngroup_sizes = 8\n',
            "unknown key 'group_sizes' in the charter: did you mean 'group_size'",
        ),
    ],
)
def test_rules_that_found_nothing_are_refused(swarm: Swarm, tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(text)
    ended = swarm("charter", "check", file, "--json")
    verdict = json.loads(ended.out)
    assert (ended.code, verdict["refused"], len(verdict["findings"])) == (2, True, 1)
    assert says in verdict["findings"][0]["text"]


@pytest.mark.slow
def test_a_draft_is_founded_and_trains(
    swarm: Swarm, start_swarm: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Measured behind the walls, checked, founded and trained on, with nothing but the file."""
    file, home = tmp_path / "two.toml", tmp_path / "home"
    drafted = swarm(
        *("charter", "new", "--model", "wren", "--env", SUMS, "--env", WORDS),
        *("--out", file, "--home", home, "--json"),
    )
    facts = json.loads(drafted.out)
    assert (facts["name"], facts["file"]) == ("wren-chain_sum", str(file))
    assert (
        6 <= facts["choices"]["max_new_tokens"]["value"] <= 11
    )  # no answer of this policy takes more than 9
    assert [task["answers"] for task in facts["samples"][0]["tasks"]] == [80, 80]
    assert "questions are mixed with 8 answers" in file.read_text()
    checked = swarm("charter", "check", file)
    assert (checked.code, checked.out) == (0, f"ok      swarm wren-chain_sum may be founded ({file})\n")
    lone = (
        "network.transport=none",
        "policy.device=cpu",
        "train.local_groups=2",
        "evaluate.prompts_per_task=2",
    )
    settings = [option for setting in lone for option in ("--set", setting)]
    node = start_swarm("run", "--home", home, "--steps", "3", *settings, "--json")  # founds what was drafted
    out, said = node.communicate(timeout=100)
    assert node.returncode == 0, said
    assert f"founding the swarm of {file}" in said
    events = json.loads(out)
    assert (events["NodeStarted"]["swarm"], Path(events["NodeStarted"]["model"]).name) == (
        "wren-chain_sum",
        "wren",
    )
    assert events["StepDone"]["policy_version"] == 3
    assert sorted(events["Evaluated"]["sampled_tasks"]) == [
        "reasoning_gym/chain_sum",
        "reasoning_gym/spell_backward",
    ]
    joined = swarm("charter", "check", home / "charter.bin")
    assert (joined.code, joined.out.startswith("ok      swarm wren-chain_sum may be joined")) == (0, True)

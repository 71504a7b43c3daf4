"""Before a stranger's charter has anything run here, it is checked, shown and agreed to."""

from __future__ import annotations

import sys

import msgspec
import pytest
import typer

from protocol.charter import swarm_id
from protocol.errors import ConfigError
from protocol.messages import Charter, EnvironmentSpec
from swarm_cli.commands.consent import agree
from tests.protocol.samples import CHARTER

SUMS = EnvironmentSpec("reasoning_gym/chain_sum", '{"max_digits":2,"answer":"last_number"}')


def charter(*environments: EnvironmentSpec) -> Charter:
    return msgspec.structs.replace(CHARTER, environments=environments or (SUMS,))


def test_what_would_run_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = charter()
    agree(shown, trusted=(), yes=True)
    said = capsys.readouterr().err
    assert f"({swarm_id(shown)[:12]})" in said
    assert shown.founder in said
    assert 'task reasoning_gym/chain_sum {"max_digits":2,"answer":"last_number"}' in said


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (EnvironmentSpec("reasoning_gym/chain_sum", '{"max_digits":1000000000}'), "chain_sum: max_digits"),
        (EnvironmentSpec("reasoning_gym/spell_backward", '{"data_file":"/etc/passwd"}'), "data_file may not"),
        (EnvironmentSpec("reasoning_gym/no_such_task", "{}"), "unknown reasoning-gym task"),
        (EnvironmentSpec("reasoning_gym/chain_sum", "[1]"), "is no JSON object"),
        (EnvironmentSpec("theirs", "{}"), "If you trust it: --trust-environment theirs"),
    ],
)
def test_what_may_not_run_is_refused_also_unasked(spec: EnvironmentSpec, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        agree(charter(SUMS, spec), trusted=("other",), yes=True)
    assert says in str(refused.value)


def test_another_packages_task_runs_once_it_is_trusted_by_name() -> None:
    agree(charter(EnvironmentSpec("theirs", "{}")), trusted=("theirs",), yes=True)


@pytest.mark.parametrize(
    ("terminal", "answer", "says"), [(False, True, "--yes"), (True, False, "not joined")]
)
def test_a_person_is_asked(monkeypatch: pytest.MonkeyPatch, terminal: bool, answer: bool, says: str) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda *given, **settings: answer)
    with pytest.raises(ConfigError, match=says):
        agree(charter(), trusted=(), yes=False)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda *given, **settings: True)
    agree(charter(), trusted=(), yes=False)

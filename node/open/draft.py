"""The charter of a new swarm as a file that people read and edit: TOML with a reason behind each number.

    --env texts, policies, figures --> rules_text --> a `.toml` that `swarm run -c` founds a swarm with

The rows of its tables go in as plain values; what comes out is read again and held against them. Not for
founding (`node/open/charter.py`), nor for what the numbers should be
(`node/open/propose.py`).
"""

from __future__ import annotations

import json
import os.path
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from node.environment.answers import ANSWER_KEY
from node.environment.installed import REASONING_GYM, VERIFIERS, pin, registered, unknown
from node.environment.pack import is_task_path
from node.environment.schema import checked_config
from node.events import inert
from node.known_models import KNOWN_MODELS
from node.open.propose import Choice, Sample, percentile
from node.rollout.policy import Policy
from node.state.paths import bundled
from protocol.errors import ConfigError

__all__ = ["environment_of", "model_name", "model_rows", "rules_text", "tokenizer_rows"]

Row = Mapping[str, Any]
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+", re.ASCII)
_GAP, _UNLIKE_GAP = 4.0, 10.0
_COLUMN = 27
"""Where comments begin."""


def environment_of(text: str, folder: Path = Path()) -> dict[str, Any]:
    """The row of `[[environments]]` that `--env` stands for in rules that lie in `folder`: a task's name, or
    the path of a task in a file; behind a colon its config as a JSON object. Raises ConfigError for an
    unknown task, and for a config that it may not have."""
    name, _, given = text.partition(":")
    try:
        config = json.loads(given) if given else {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--env {name}: what stands behind the colon is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--env {name}: the config must be a JSON object, and {given[:80]!r} is none")
    row: dict[str, Any] = {"name": name}
    if is_task_path(name):
        path = Path(name).expanduser()
        if not path.exists():
            raise ConfigError(f"there is no task at {path}; swarm env new NAME writes one")
        row = {"file": os.path.relpath(path, folder)}
    elif name.startswith(REASONING_GYM):
        settings = {key: value for key, value in config.items() if key != ANSWER_KEY}
        checked_config(name.removeprefix(REASONING_GYM), settings)
    elif name.startswith(VERIFIERS):
        pin(name)  # it is here
    elif name not in (own := registered()):
        raise unknown(name, sorted(own))
    return {**row, "config": config} if config else row


def model_name(folder: Path) -> str:
    """The folder's name, as names in a charter may be."""
    return _NOT_IN_NAMES.sub("-", folder.name).strip("-._")[:64] or "model"


def tokenizer_rows(policies: Sequence[Policy]) -> list[dict[str, Any]]:
    """The rows of `[[tokenizers]]` for these policies, one for each tokenizer."""
    rows: dict[str, dict[str, Any]] = {}
    for policy in policies:
        known = rows.get(policy.tokenizer_digest, {"vocab_size": 0, "end_token_ids": []})
        rows[policy.tokenizer_digest] = {
            "name": known.get("name", model_name(policy.path)),
            "digest": policy.tokenizer_digest,
            "vocab_size": max(known["vocab_size"], policy.vocab_size),
            "end_token_ids": sorted({*known["end_token_ids"], *policy.end_token_ids}),
        }
    return list(rows.values())


def model_rows(policies: Sequence[Policy]) -> list[dict[str, Any]]:
    """The rows of `[[models]]` for these policies."""
    return [
        {"name": model_name(policy.path), "digest": policy.base_model, "source": _source(policy.path)}
        for policy in policies
    ]


def rules_text(
    name: str,
    choices: Mapping[str, Choice],
    rows: Mapping[str, Sequence[Row]],
    samples: Sequence[Sample] = (),
    run: str = "",
) -> str:
    """The TOML of a charter: `choices` with their reasons, `rows` by table, in comments `samples`
    and `run`, the command that founds it. Raises ConfigError for what TOML cannot say (null)."""
    gap, why = _GAP, "nats per token; all begin with the same weights"
    if len(rows["models"]) > 1:
        gap, why = _UNLIKE_GAP, "nats per token; unlike models differ in what they find likely"
    lines = [
        f"# The rules of swarm {name}, which all its members share. Whoever founds it signs them, with the",
        "# key of that home; their hash is the swarm's id, so a change makes another swarm. To found it:",
        f"#     {_comment(run)}",
        *_measured(samples),
        "",
        f"name = {_value(name)}",
        *(_line(key, choice.value, choice.why) for key, choice in choices.items()),
        _line("temperature", 1.0, "everybody samples alike, so that log-probabilities can be compared"),
        _line("universe_size", 4096, "prompts that there are; they come back in later windows"),
        _line("receipt_windows", 6, "an author can be asked for any of its groups until then"),
        "",
        "[rules]",
        _line("max_logprob_gap", gap, why),
        _line("max_age_windows", 5, "older groups are stale"),
        _line("max_policy_lag", 64, "and so are those of so many versions ago"),
    ]
    for table, listed in rows.items():
        for row in listed:
            lines += ["", f"[[{table}]]", *(f"{key} = {_value(value)}" for key, value in row.items())]
    text = "\n".join([*lines, ""])
    _require_same(text, rows)
    return text


def _require_same(text: str, rows: Mapping[str, Sequence[Row]]) -> None:
    """Raise ConfigError unless `text` says `rows` to who reads it."""
    try:
        read = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"TOML cannot say these rules: {error}") from None
    for table, listed in rows.items():
        if read[table] != list(listed):
            raise ConfigError(f"TOML cannot say these {table}: {listed}")


def _measured(samples: Sequence[Sample]) -> list[str]:
    if not samples:
        return ["#", "# Nothing was measured for it: the numbers are those of a swarm of laptops."]
    head = ("task", "model", "tokens", "ended", "mixed", "reward")
    table = [head]
    for sample in samples:
        for task in sample.tasks:
            span = "-"
            if task.lengths:
                span = f"{percentile(task.lengths, 0.05)} to {percentile(task.lengths, 0.95)}"
            ended, mixed = f"{len(task.lengths)}/{task.answers}", f"{task.mixed}/{task.groups}"
            named = (task.environment, _comment(sample.model))
            table.append((*named, span, ended, mixed, f"{task.reward:.2f}"))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return [
        "#",
        "# Measured before: tokens of the answers that ended by themselves (5th to 95th percentile), how",
        "# many did, in how many groups the rewards differed, and the mean reward.",
        *(f"#     {line}" for line in lines),
    ]


def _line(key: str, value: object, why: str) -> str:
    return f"{f'{key} = {_value(value)}':{_COLUMN}} # {_comment(why)}"


def _comment(text: str) -> str:
    """Text that stays in its comment."""
    return " ".join(inert(text, 400).split())


def _value(value: object) -> str:
    """`value` as TOML, tables inline. Raises ConfigError for null."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case dict():
            pairs = ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items())
            return f"{{ {pairs} }}" if pairs else "{}"
    raise ConfigError(f"TOML cannot say {value!r}; leave that key out")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _value(key)


def _source(folder: Path) -> str:
    """Where others find it, for people."""
    if folder.parent == bundled("models"):
        return f"bundled with this program: configs/models/{folder.name}"
    if folder.name in KNOWN_MODELS:
        return f"swarm model get {folder.name}"
    return f"the founder's folder {_comment(folder.name)[:100]}; the digest tells whether yours is the same"

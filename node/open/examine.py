"""What founding a swarm with a charter, or joining it, would say on this machine, before anybody does.

Everything that can be found without a network: that the tasks are here, in the version that the charter pins,
open behind the walls, and do not pay for nothing; that some model here speaks its tokenizers and has room
for its questions; that a closed swarm has a token for us. Whether a stranger's tasks may run here at all is
asked before (`swarm_cli/commands/consent.py`). Blocking; opens the charter's tasks, and tokenizers.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from node.clock import SystemClock
from node.config import NodeConfig
from node.environment.host import TaskHost
from node.environment.installed import pin
from node.open.charter import open_membership, worthless_tasks
from node.open.policy import open_host, open_policy, require_fit
from node.state.keys import load_key
from node.state.paths import Home, bundled
from node.state.tasks import missing_blobs
from protocol.errors import CharterError, ConfigError, ModelError, SwarmError
from protocol.messages import Charter
from protocol.tasks import is_bundled

__all__ = ["Finding", "examine"]

QUESTIONS = 10
"""Of each task, held against the positions of a model."""


@dataclass(frozen=True)
class Finding:
    """One sentence; `refused`: for it no swarm is founded, or joined."""

    refused: bool
    text: str


def examine(config: NodeConfig, charter: Charter, *, founding: bool) -> Iterator[Finding]:
    """The findings about `charter`, nothing where all is well; ends with what keeps the rest from being
    tried."""
    pins = list(_pins(charter))
    yield from pins
    if any(finding.refused for finding in pins):
        return
    try:
        for name in missing_blobs(Home(config.home), charter.environments):
            yield Finding(
                False, f"the file of the task {name} is not here, so nothing was tried; swarm join fetches it"
            )
            return
        if charter.closed and not founding:
            _require_token(Home(config.home), charter)
        with open_host(config, charter) as host:
            require_fit(host)
            if founding:
                for refused, text in worthless_tasks(host, charter):
                    yield Finding(refused, text)
            yield from _models(config, charter, host)
    except SwarmError as error:
        yield Finding(True, str(error))


def _pins(charter: Charter) -> Iterator[Finding]:
    for spec in charter.environments:
        if is_bundled(spec.name):
            continue  # is the charter's own, or not here
        try:
            here = pin(spec.name)
        except SwarmError as error:
            yield Finding(True, str(error))
            continue
        if spec.pin and spec.pin != here:
            yield Finding(
                False,
                f"{spec.name} is {here} here and {spec.pin} in the charter: members with other code of a "
                "task do not judge each other's answers; install what the charter names",
            )


def _require_token(home: Home, charter: Charter) -> None:
    """Raise CharterError, or KeyFileError, unless this home's key is a member of this closed swarm."""
    if not home.key.exists():
        raise CharterError(
            f"swarm {charter.name} is closed and this home has no key yet; make one with swarm key new, and "
            "ask the founder for a token for it"
        )
    open_membership(home, load_key(home.key), charter, SystemClock())


def _models(config: NodeConfig, charter: Charter, host: TaskHost) -> Iterator[Finding]:
    wanted = {spec.digest for spec in charter.tokenizers}
    speaking = [folder for folder in _folders(config) if _tokenizer_digest(folder) in wanted]
    if not speaking:
        names = ", ".join(spec.name for spec in charter.tokenizers)
        yield Finding(
            False,
            f"no model here speaks a tokenizer of the charter ({names}); get one with swarm model get, or "
            "set policy.path to a folder",
        )
        return
    asked = {spec.name: host.questions(spec.name, range(QUESTIONS)) for spec in charter.environments}
    for folder in speaking:
        mine = config.model_copy(update={"policy": config.policy.model_copy(update={"path": str(folder)})})
        try:
            policy = open_policy(mine, charter)
            for task, questions in asked.items():
                lengths = [len(policy.encode_prompt(text)) for text in questions if isinstance(text, str)]
                tokens = max(lengths, default=0) + charter.max_new_tokens
                if tokens > policy.max_positions:
                    yield Finding(
                        False,
                        f"{folder.name} has {policy.max_positions} positions, and a question of {task} with "
                        f"an answer may take {tokens}: it leaves such questions out; lower max_new_tokens, "
                        "set the task smaller, or take another model",
                    )
        except ModelError as error:
            yield Finding(False, str(error))


def _folders(config: NodeConfig) -> list[Path]:
    """Models that a node here finds by name, and the configured one."""
    parents = (bundled("models"), Home(config.home).models)
    folders = {folder.resolve() for parent in parents if parent.is_dir() for folder in parent.iterdir()}
    with contextlib.suppress(ConfigError):
        folders.add(config.policy.folder(config.home).resolve())
    return sorted(folders)


def _tokenizer_digest(folder: Path) -> str:
    """As in `Policy.tokenizer_digest`, "" for what is no model's folder."""
    file = folder / "tokenizer.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""

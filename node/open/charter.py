"""The charter a node runs with: read from a file, or of a swarm that this node founds.

A path in the configuration wins; then comes the charter kept at home, then the demo's rules. A file that ends
in `.toml` holds rules to found a swarm with, any other one a signed charter. In rules, `file = "riddle.py"`
in a table of `[[environments]]` is a task in a file beside them: it is packed into the home, and pinned.
`open_membership` adds what this node is in that swarm: its token, the newest annex it knew, and what it has
installed. Not for fetching a charter from another node (`node/peers/presence.py`).
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from node.clock import Clock
from node.config import NodeConfig
from node.environment.host import TaskHost
from node.environment.installed import pin
from node.environment.pack import pack
from node.environment.probe import PAID, probe
from node.membership import Membership
from node.open.policy import open_host
from node.state.paths import Home, bundled, read_text
from node.state.stores import write_atomically
from node.state.tasks import keep_blob
from protocol.annex import MAX_ANNEX_BYTES
from protocol.charter import charter_bytes, decode_charter, found, parse_toml, swarm_id
from protocol.codec import decode, encode
from protocol.errors import CharterError, ConfigError, RemoteProtocolError
from protocol.identity import Identity
from protocol.messages import Annex, Charter, MemberToken, Record
from protocol.prompts import is_held_out
from protocol.tasks import is_bundled

__all__ = [
    "inspect_charter",
    "installed_pins",
    "open_membership",
    "packed_rules",
    "read_or_found_charter",
    "worthless_tasks",
]

R = TypeVar("R", bound=Record)
_SPLIT_SEEDS = 512
"""Questions by which a task's split is judged; one in ten is held out."""


def read_or_found_charter(
    config: NodeConfig, identity: Identity, now_ms: int, warn: Callable[[str], None] = lambda text: None
) -> Charter:
    """The charter of this node's swarm. From rules, `identity` founds the swarm and the charter is written to
    the home; a founder that starts again with the same rules stays in its swarm. Raises CharterError, also
    where a task of a new swarm pays any text, and SandboxError where one cannot be opened; `warn` hears of
    one that a constant answers."""
    home = Home(config.home)
    path = _charter_path(config, home)
    with _named(path):
        if path.suffix == ".toml":
            charter = _founded(config, identity, _rules(path, home), now_ms, warn)
        else:
            charter = decode_charter(path.read_bytes())
    return charter


def open_membership(home: Home, identity: Identity, charter: Charter, clock: Clock) -> Membership:
    """This node in the swarm of `charter`, with token and annex from the home, where a newer annex is kept.
    Raises CharterError when the swarm is closed to `identity`, ConfigError for an environment that is not
    here."""
    token, annex = _read(home.token, MemberToken), _read(home.annex, Annex)
    membership = Membership(
        identity,
        charter,
        clock,
        pins=installed_pins(charter),
        token=token,
        keep=lambda renewed: write_atomically(home.annex, encode(renewed)),
    )
    if annex is not None:
        with contextlib.suppress(RemoteProtocolError):  # of another swarm, which this home was in before
            membership.renew(annex)
    if not membership.admit(identity.peer_id, token):
        raise CharterError(
            f"swarm {charter.name} is closed and {identity.peer_id} has no valid token for it; ask its "
            f"founder for one and put it to {home.token}"
        )
    return membership


def installed_pins(charter: Charter) -> dict[str, str]:
    """What this machine has of the charter's environments, by name. A task in a file is the charter's own or
    none (`state/tasks.py`). Raises ConfigError."""
    return {spec.name: spec.pin if is_bundled(spec.name) else pin(spec.name) for spec in charter.environments}


def worthless_tasks(host: TaskHost, charter: Charter) -> Iterator[tuple[bool, str]]:
    """Of each task that pays for nothing, or has no questions for one of its uses: whether it may not be in a
    new swarm, and a sentence with the figures. Blocking."""
    for spec in charter.environments:
        if is_bundled(spec.name) and (text := _one_sided(host, spec.name)):
            yield True, f"the task {spec.name} {text}; give it more rows"
            continue
        paid = probe(host, spec.name)
        if paid.pays_anything:
            text = f"pays any text ({paid.senseless:.2f} of 1 for senseless ones on its own questions), so "
            yield (
                True,
                f"the task {spec.name} {text}nothing is learnt from it; leave it out, or set it otherwise",
            )
        elif paid.constant >= PAID:
            text = f"pays {paid.constant:.2f} of 1 for answering {paid.best!r} always"
            yield False, f"the task {spec.name} {text}; policies will learn that first"


def _one_sided(host: TaskHost, task: str) -> str:
    """What is wrong with the split of a task whose rows somebody wrote, "" for nothing."""
    questions = {text for text in host.questions(task, range(_SPLIT_SEEDS)) if isinstance(text, str)}
    held_out = sum(map(is_held_out, questions))
    if 0 < held_out < len(questions) or not questions:
        return ""
    kind = "only held-out questions" if held_out else "no held-out question"
    return f"has {kind} among {len(questions)} different ones, and a swarm needs both"


def _read(path: Path, record_type: type[R]) -> R | None:
    """A kept record, None where there is none. Raises CharterError for one that cannot be read."""
    try:
        return decode(path.read_bytes(), record_type, max_bytes=MAX_ANNEX_BYTES)
    except FileNotFoundError:
        return None
    except (OSError, RemoteProtocolError) as error:
        raise CharterError(f"{path} cannot be read: {error}; remove it or put it right") from None


def inspect_charter(config: NodeConfig) -> tuple[Path, Charter]:
    """Where the charter of a run would come from, and that charter; one that would be founded gets a founder
    who does not exist. Writes nothing but packed tasks. Raises CharterError."""
    path = _charter_path(config, Home(config.home))
    with _named(path):
        if path.suffix == ".toml":
            return path, found(Identity.generate(), _rules(path, Home(config.home)), 0)
        return path, decode_charter(path.read_bytes())


def _rules(path: Path, home: Home) -> Mapping[str, Any]:
    return packed_rules(read_text(path), path.parent, home)


def packed_rules(text: str, folder: Path, home: Home) -> Mapping[str, Any]:
    """Rules as plain values, with the tasks in files beside them, in `folder`, packed into the home. Raises
    CharterError, ConfigError, OSError."""
    try:
        rules = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        parse_toml(text)  # says where
        raise
    rows = rules.get("environments")
    if isinstance(rows, list):
        rules["environments"] = [_packed(row, folder, home) for row in rows]
    return rules


def _packed(row: Any, folder: Path, home: Home) -> Any:
    """A row of `[[environments]]`, with `file` turned into name and pin."""
    if not isinstance(row, dict) or "file" not in row:
        return row
    file = row.pop("file")
    if not isinstance(file, str) or not file:
        raise CharterError(f"`file` in [[environments]] must be a path, not {file!r}")
    name, blob = pack(folder / Path(file).expanduser())
    return {"name": name, **row, "pin": f"sha256:{keep_blob(home, blob)}"}


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of reading a charter, with the path in them."""
    try:
        yield
    except CharterError as error:
        raise CharterError(f"{path}: {error}") from None
    except OSError as error:
        raise CharterError(f"cannot read or keep the charter {path}: {error.strerror}") from None


def _charter_path(config: NodeConfig, home: Home) -> Path:
    if not config.charter:
        return home.charter if home.charter.exists() else bundled("demo-charter.toml")
    path = Path(config.charter).expanduser()
    if path.exists():
        return path
    try:
        return bundled(config.charter)
    except ConfigError:
        raise CharterError(f"there is no charter at {config.charter!r}, here or in configs/") from None


def _founded(
    config: NodeConfig,
    identity: Identity,
    rules: Mapping[str, Any],
    now_ms: int,
    warn: Callable[[str], None],
) -> Charter:
    """The swarm that `identity` founds with `rules`: the one that is kept if it is this one, so that a
    founder that starts again stays in its swarm."""
    kept = Home(config.home).charter
    if kept.is_file():
        with contextlib.suppress(CharterError):
            known = decode_charter(kept.read_bytes())
            pins = {spec.name: spec.pin for spec in known.environments}  # as installed when it was founded
            if swarm_id(found(identity, rules, known.created_at, pins)) == swarm_id(known):
                return known
    draft = found(identity, rules, now_ms)
    with open_host(config, draft) as host:
        for refused, text in worthless_tasks(host, draft):
            if refused:
                raise CharterError(text)
            warn(text)
    charter = found(identity, rules, now_ms, installed_pins(draft))
    write_atomically(kept, charter_bytes(charter))
    return charter

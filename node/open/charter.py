"""The charter a node runs with: read from a file, or of a swarm that this node founds.

A path in the configuration wins; then comes the charter kept at home, then the demo's rules. A file that ends
in `.toml` holds rules to found a swarm with, any other one a signed charter. Not for fetching a charter from
another node (`node/peers/presence.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from node.config import NodeConfig
from node.state.paths import Home, bundled
from node.state.stores import write_atomically
from protocol.charter import charter_bytes, decode_charter, found, is_member, swarm_id
from protocol.errors import CharterError, ConfigError
from protocol.identity import Identity
from protocol.messages import Charter

__all__ = ["inspect_charter", "read_or_found_charter", "require_member"]


def read_or_found_charter(config: NodeConfig, identity: Identity, now_ms: int) -> Charter:
    """The charter of this node's swarm. From rules, `identity` founds the swarm and the charter is written to
    the home; a founder that starts again with the same rules stays in its swarm. Raises CharterError, also
    when the swarm is closed to `identity`."""
    home = Home(config.home)
    path = _charter_path(config, home)
    with _named(path):
        if path.suffix == ".toml":
            charter = _founded(identity, path.read_text(encoding="utf-8"), home.charter, now_ms)
        else:
            charter = decode_charter(path.read_bytes())
    require_member(charter, identity)
    return charter


def require_member(charter: Charter, identity: Identity) -> None:
    """Raise CharterError when the swarm is closed and `identity` is no member."""
    if not is_member(charter, identity.peer_id):
        raise CharterError(
            f"swarm {charter.name} is closed and {identity.peer_id} is not a member; ask its founder"
        )


def inspect_charter(config: NodeConfig) -> tuple[Path, Charter]:
    """Where the charter of a run would come from, and that charter; one that would be founded gets a founder
    who does not exist. Writes nothing. Raises CharterError."""
    path = _charter_path(config, Home(config.home))
    with _named(path):
        if path.suffix == ".toml":
            return path, found(Identity.generate(), path.read_text(encoding="utf-8"), 0)
        return path, decode_charter(path.read_bytes())


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of reading a charter, with the path in them."""
    try:
        yield
    except CharterError as error:
        raise CharterError(f"{path}: {error}") from None
    except OSError as error:
        raise CharterError(f"cannot read or keep the charter {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CharterError(f"{path} is no TOML text; a signed charter must not end in .toml") from None


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


def _founded(identity: Identity, rules: str, kept: Path, now_ms: int) -> Charter:
    """The swarm that `identity` founds with `rules`: the one in `kept` if it is this one, so that a founder
    that starts again stays in its swarm."""
    if kept.is_file():
        with contextlib.suppress(CharterError):
            known = decode_charter(kept.read_bytes())
            if swarm_id(found(identity, rules, known.created_at)) == swarm_id(known):
                return known
    charter = found(identity, rules, now_ms)
    write_atomically(kept, charter_bytes(charter))
    return charter

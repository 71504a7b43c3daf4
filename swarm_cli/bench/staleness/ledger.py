"""Runs as jobs, and the finished ones, one line each, so that a lab that was stopped goes on where it was.

A line is JSON: the exact settings, what job they belong to, the result, and which code made it. A run is
looked up by job and settings; other seeds, lags or presets are other runs. A line that is not whole (the
machine was switched off) counts as not there. The code is no part of the key: a comment would cost two hours.
Instead every line carries the digest of the sources that decide a run's numbers, and the report says how many
runs were made by others than the present ones.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

__all__ = ["Job", "Ledger", "source_digest"]

_SOURCES = ("node/train", "node/weight", "swarm_cli/bench/staleness")

Settings = TypeVar("Settings", bound=msgspec.Struct)
Result = TypeVar("Result", bound=msgspec.Struct)


@dataclass(frozen=True)
class Job(Generic[Settings, Result]):
    """A kind of run: settings and result are records that JSON holds. `run` is a function of a module, so
    that other processes find it."""

    name: str
    run: Callable[[Settings], Result]
    settings: type[Settings]
    result: type[Result]


class _Line(msgspec.Struct, frozen=True):
    job: str
    settings: msgspec.Raw
    result: msgspec.Raw
    code: str


class Ledger(Generic[Settings, Result]):
    """The runs of one job in a file, which others may share."""

    def __init__(self, path: Path, job: Job[Settings, Result]) -> None:
        self._path = path
        self._job = job
        self._results: dict[bytes, tuple[Result, str]] = {}
        for data in path.read_bytes().splitlines() if path.is_file() else ():
            self._remember(data)

    def get(self, settings: Settings) -> Result | None:
        """The result of a run with exactly these settings."""
        found = self._results.get(_key(settings))
        return None if found is None else found[0]

    def made_by_other_code(self, settings: Settings) -> bool:
        """Whether that run's sources differ from the present ones."""
        found = self._results.get(_key(settings))
        return found is not None and found[1] != source_digest()

    def add(self, settings: Settings, result: Result) -> None:
        """Keep a finished run, on disk when this returns."""
        line = _Line(
            self._job.name,
            msgspec.Raw(_key(settings)),
            msgspec.Raw(msgspec.json.encode(result)),
            source_digest(),
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        whole = not self._path.is_file() or self._path.read_bytes()[-1:] in (b"", b"\n")
        with self._path.open("ab") as file:
            file.write((b"" if whole else b"\n") + msgspec.json.encode(line) + b"\n")
        self._results[_key(settings)] = result, line.code

    def _remember(self, data: bytes) -> None:
        try:
            line = msgspec.json.decode(data, type=_Line)
            if line.job == self._job.name:
                result = msgspec.json.decode(line.result, type=self._job.result)
                settings: Any = msgspec.json.decode(line.settings)
                self._results[_sorted(settings)] = result, line.code
        except msgspec.DecodeError:
            return


def _key(settings: msgspec.Struct) -> bytes:
    return _sorted(msgspec.to_builtins(settings))


def _sorted(settings: Any) -> bytes:
    return msgspec.json.encode(settings, order="deterministic")


@functools.cache
def source_digest() -> str:
    """SHA-256 over the sources that decide what a run gives, 16 digits."""
    root = Path(__file__).resolve().parents[3]
    state = hashlib.sha256()
    for folder in _SOURCES:
        for file in sorted((root / folder).rglob("*.py")):
            state.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return state.hexdigest()[:16]

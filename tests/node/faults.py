"""A disk that refuses: every opening, writing, syncing, renaming and removing under a folder goes through
here, and is counted by its site: what is done, to which kind of file. Each site's first visits fail, one
error after the other, and all of them while `full_of` is set.

Python's own functions are replaced, and the one of safetensors that writes beside them. A site's name has no
numbers and hashes: `fsync state/.window.*.tmp` is one."""

from __future__ import annotations

import builtins
import errno
import io
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

__all__ = ["ERRORS", "FaultyDisk"]

ERRORS = (errno.ENOSPC, errno.EROFS, errno.EMFILE, errno.EACCES)
BY_PATH = ("open", "replace", "rename", "link", "mkdir", "unlink")
BY_DESCRIPTOR = ("fsync", "ftruncate", "pwrite", "fchmod")


class _File:
    """An open file whose `write` and `truncate` ask first."""

    def __init__(self, disk: FaultyDisk, file: Any, path: str) -> None:
        self._disk, self._file, self._path = disk, file, path

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._file, name)
        if name not in ("write", "truncate"):
            return value

        def asks(*arguments: Any) -> Any:
            self._disk.ask(name, self._path)
            return value(*arguments)

        return asks

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)


class FaultyDisk:
    """`seen`: how often each site was reached; `refused`: how often it failed."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, first: int = 1) -> None:
        """`first`: so many visits of each site fail."""
        self.root = os.path.realpath(root)
        self.seen: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.full_of = 0
        """The error with which everything fails now; 0 for none."""
        self.first = first
        self._errors: dict[str, int] = {}
        opened = builtins.open

        def open_(file: Any, *arguments: Any, **named: Any) -> Any:
            if isinstance(file, int):
                path = os.readlink(f"/proc/self/fd/{file}")
            else:
                path = os.fspath(file)
                self.ask("open", path)
            made = opened(file, *arguments, **named)
            return _File(self, made, path) if self._site_of("", path) else made

        patch.setattr(builtins, "open", open_)
        patch.setattr(io, "open", open_)
        for name in BY_PATH:
            patch.setattr(os, name, self._asking(name, getattr(os, name), os.fspath))
        for name in BY_DESCRIPTOR:
            patch.setattr(os, name, self._asking(name, getattr(os, name), _path_of))
        serialize = safetensors.torch.serialize_file

        def save(tensors: Any, file: Any, *rest: Any, **named: Any) -> None:
            try:
                self.ask("save", os.fspath(file))
            except OSError as error:
                raise safetensors.SafetensorError(f"I/O error: {error}") from None
            serialize(tensors, file, *rest, **named)

        patch.setattr(safetensors.torch, "serialize_file", save)

    def ask(self, what: str, path: str) -> None:
        """Count; raises OSError where it is to fail."""
        site = self._site_of(what, path)
        if not site:
            return
        self.seen[site] += 1
        error = self._errors.setdefault(site, ERRORS[len(self._errors) % len(ERRORS)])
        if self.full_of or self.refused[site] < self.first:
            self.refused[site] += 1
            raise OSError(self.full_of or error, os.strerror(self.full_of or error), path)

    def _asking(
        self, name: str, function: Callable[..., Any], path_of: Callable[[Any], str]
    ) -> Callable[..., Any]:
        def asks(target: Any, *arguments: Any, **named: Any) -> Any:
            self.ask(name, path_of(target))
            return function(target, *arguments, **named)

        return asks

    def _site_of(self, what: str, path: str) -> str:
        if not path.startswith(self.root):
            return ""
        kind = re.sub(r"[0-9a-f]{8,}", "*", path[len(self.root) + 1 :])
        return f"{what} {re.sub('[0-9]+', '#', kind)}"


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")

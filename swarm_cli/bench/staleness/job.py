"""A kind of run: what makes it, from settings to a result, both as records that JSON holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

__all__ = ["Job"]

Settings = TypeVar("Settings", bound=msgspec.Struct)
Result = TypeVar("Result", bound=msgspec.Struct)


@dataclass(frozen=True)
class Job(Generic[Settings, Result]):
    """`run` is a function of a module, so that other processes find it."""

    name: str
    run: Callable[[Settings], Result]
    settings: type[Settings]
    result: type[Result]

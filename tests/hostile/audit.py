"""A test plug-in that fails whatever test lets an unpickler look up a name.

Enabled by `pytest_plugins = ["tests.hostile.audit"]` in `tests/conftest.py`. Every unpickler of CPython, in C
or Python, raises the audit event `pickle.find_class` before it imports anything, so code execution through a
pickle cannot pass unseen, whichever library holds the unpickler. A test that unpickles its own bytes on
purpose asks for the fixture `unpickling_allowed`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

__all__ = ["install", "no_unpickling", "seen", "unpickling_allowed"]

seen: list[str] = []
"""Names that unpicklers looked up since it was last cleared."""
_installed = False


def _hook(event: str, args: tuple[object, ...]) -> None:
    if event == "pickle.find_class":
        seen.append(".".join(map(str, args)))


def install() -> None:
    """Once per process: an audit hook cannot be removed."""
    global _installed
    if not _installed:
        sys.addaudithook(_hook)
        _installed = True


@pytest.fixture
def unpickling_allowed() -> Iterator[list[str]]:
    """The names that this test unpickles; they do not fail it."""
    install()
    seen.clear()
    yield seen
    seen.clear()


@pytest.fixture(autouse=True)
def no_unpickling() -> Iterator[None]:
    """Fail the test when anything in it looked up a name for an unpickler."""
    install()
    seen.clear()
    yield
    looked_up = list(seen)
    seen.clear()
    if looked_up:
        pytest.fail(f"an unpickler looked up {', '.join(looked_up)}: no peer's bytes may reach one")

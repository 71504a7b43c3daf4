"""ARCHITECTURE.md against the code: what it names exists, and its flows go the way that they show.

A step of a flow is `N. `path` `Name`, `Class.method`: text → `Record`. The names are in that file. Each
record is used in that file and in the next one of the flow. Neighbours are connected: one imports
the other, or the files that the flow says it is wired in import both.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
MOST_FILES = {
    "From a rollout to the loss": 20,
    "From a step to a follower": 12,
    "From `swarm join` to a running node": 8,
}
STEP = re.compile(
    r"^\d+\. `(?P<path>[^`]+)`(?P<names>(?:,? `[^`]+`)*): (?P<text>.*?)(?: → (?P<handed>`[^→]+`))?$"
)


@dataclass(frozen=True)
class Step:
    """One line of a flow."""

    path: str
    names: tuple[str, ...]
    handed: tuple[str, ...]


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def steps(title: str) -> list[Step]:
    found = []
    for line in section(title).splitlines():
        if re.match(r"^\d+\.", line):
            match = STEP.match(line)
            assert match is not None, f"not a step: {line}"
            names = re.findall(r"`([^`]+)`", match["names"])
            found.append(
                Step(match["path"], tuple(names), tuple(re.findall(r"`([^`]+)`", match["handed"] or "")))
            )
    return found


def wiring(title: str) -> list[str]:
    line = next(line for line in section(title).splitlines() if line.startswith("Wired in "))
    return re.findall(r"`([^`]+\.py)`", line)


@functools.cache
def parsed(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@functools.cache
def defined(path: str) -> frozenset[str]:
    """Classes, functions and methods of a file, the latter as `Class.method`; constants and types, too."""
    found: set[str] = set()
    for node in parsed(path).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(f"{node.name}.{inner.name}")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return frozenset(found)


@functools.cache
def used(path: str) -> frozenset[str]:
    """Every name in a file's code."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                found.add(name)
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ImportFrom(names=names):
                found |= {alias.name for alias in names}
    return frozenset(found)


@functools.cache
def imported(path: str) -> frozenset[str]:
    """Files of ours that a file imports; from a package also what this one offers."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        dotted = []
        if isinstance(node, ast.ImportFrom) and node.module:
            dotted = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        for name in dotted:
            place = name.replace(".", "/")
            if (ROOT / f"{place}.py").is_file():
                found.add(f"{place}.py")
            elif (ROOT / place / "__init__.py").is_file() and f"{place}/__init__.py" != path:
                found |= imported(f"{place}/__init__.py")
    return frozenset(found)


def test_every_file_and_name_exists() -> None:
    for path in re.findall(r"`((?:node|protocol|swarm_cli|tests|configs|docs)/[^`]*)`", PAGE):
        assert (ROOT / path).exists(), path
    for title in MOST_FILES:
        for step in steps(title):
            missing = set(step.names) - defined(step.path)
            assert not missing, f"{step.path} has no {missing}"


@pytest.mark.parametrize("title", MOST_FILES)
def test_a_flow_is_short(title: str) -> None:
    """Every file once, and no more of them than a newcomer can follow: also those that a step names beside
    its own."""
    paths = [step.path for step in steps(title)]
    assert len(paths) == len(set(paths))
    lines = [line for line in section(title).splitlines() if re.match(r"^\d+\.", line)]
    named = set(re.findall(r"`([^`]+\.py)`", "\n".join(lines)))
    assert 3 < len(named) <= MOST_FILES[title]


@pytest.mark.parametrize("title", MOST_FILES)
def test_a_step_hands_its_record_to_the_next(title: str) -> None:
    flow = steps(title)
    for step, after in pairwise(flow):
        assert step.handed, f"{step.path} hands nothing on"
        for record in step.handed:
            assert record in used(step.path), f"{step.path} does not know {record}"
            assert record in used(after.path), f"{after.path} does not know {record}"


@pytest.mark.parametrize("title", MOST_FILES)
def test_neighbours_are_connected(title: str) -> None:
    flow = steps(title)
    wired = frozenset[str]().union(*(imported(path) for path in wiring(title)))
    for step, after in pairwise(flow):
        direct = after.path in imported(step.path) or step.path in imported(after.path)
        assert direct or {step.path, after.path} <= wired, (
            f"{step.path} and {after.path} know nothing of each other"
        )

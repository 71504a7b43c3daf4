"""No package of ours can run code from data (checklist item 6): a search through the sources, and the audit
hook. Nor can anything expand (item 4), because nothing is compressed.

What the search bans: unpicklers of every name, `torch.load`, `yaml.load`, `allow_pickle`, `eval` and `exec`,
and every decompressor.
"""

from __future__ import annotations

import ast
import os
import pickle
from pathlib import Path

import pytest

from tests.hostile import audit

ROOT = Path(__file__).parents[2]

UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
DECOMPRESSORS = {"zstandard", "zstd", "gzip", "lzma", "bz2", "brotli", "lz4", "snappy"}
"""`zlib` is not among them: its checksums are allowed."""
ONLY_COMPRESS = {Path("swarm_cli/bench/_codec_yardsticks.py")}
"""A bench may measure what zstandard makes of bytes, and never opens what it made."""
RUNS_TASKS = Path("node/environment/own_task.py")
"""Executes a task's file, once, in the sandbox's worker: an import contract keeps it out of the node, and the
walls stand before (`tests/node/sandbox/`)."""
BANNED_MODULES = UNPICKLERS | DECOMPRESSORS
BANNED_BUILTINS = {"eval", "exec"}
BANNED_MEMBERS = {
    *(("torch", "load"), ("yaml", "load"), ("builtins", "eval"), ("builtins", "exec")),
    *(("zlib", "decompress"), ("zlib", "decompressobj")),
}


def violations(source: str) -> list[str]:
    """Banned names in a module. A method `.eval()` such as `model.eval()` is no call of the builtin."""
    found: list[str] = []

    def add(node: ast.AST, what: str) -> None:
        found.append(f"line {getattr(node, 'lineno', '?')}: {what}")

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] in BANNED_MODULES:
                    add(node, f"import {name.name}")
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")[0]
            if module in BANNED_MODULES:
                add(node, f"from {module}")
            for name in node.names:
                if (module, name.name) in BANNED_MEMBERS or name.name in BANNED_MODULES:
                    add(node, f"from {module} import {name.name}")
        elif isinstance(node, ast.Name) and node.id in BANNED_BUILTINS | BANNED_MODULES:
            add(node, node.id)
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else None
            if (owner, node.attr) in BANNED_MEMBERS or node.attr in BANNED_MODULES:
                add(node, f"{owner}.{node.attr}")
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            add(node.value, "allow_pickle")
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            module = str(node.args[0].value).split(".")[0]
            if called in {"__import__", "import_module"} and module in BANNED_MODULES:
                add(node, f"{called}({module})")
    return found


SOURCES = sorted(
    path for package in ("node", "protocol", "swarm_cli") for path in (ROOT / package).rglob("*.py")
)


def test_6_no_module_can_run_code_from_data() -> None:
    offenders = []
    for path in SOURCES:
        name, source = path.relative_to(ROOT), path.read_text(encoding="utf-8")
        if name in ONLY_COMPRESS:
            assert "decompress" not in source.lower()
            source = source.replace("zstandard", "compressor")
        if name == RUNS_TASKS:
            assert source.count("exec(") == 1
            source = source.replace("exec(", "run_behind_walls(")
        offenders += [f"{name}: {each}" for each in violations(source)]
    assert len(SOURCES) > 100
    assert offenders == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, marshal as m",
        "from pickle import loads",
        "import torch.load; import dill.source",
        "from multiprocessing.reduction import pickle",
        "torch.load(path)",
        "load = torch.load",
        "from torch import load",
        "yaml.load(text)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "eval(text)",
        "run = exec",
        "builtins.eval(text)",
        "__import__('pickle')",
        "importlib.import_module('cloudpickle.cloudpickle')",
        "joblib.load(path)",
        "shelve.open(path)",
        "torch.serialization.pickle.loads(x)",
        "import zstandard",
        "from gzip import decompress",
        "lzma.decompress(x)",
        "import bz2 as b",
        "zlib.decompress(x)",
        "zlib.decompressobj()",
        "from zlib import decompress",
    ],
)
def test_6_the_search_finds(source: str) -> None:
    assert violations(source)


@pytest.mark.parametrize(
    "source",
    ["model.eval()", "safetensors.torch.load(data)", "self.load(x)", "yaml.safe_load(x)", "zlib.crc32(x)"],
)
def test_6_the_search_lets_pass(source: str) -> None:
    assert violations(source) == []


class Tracer:
    """Runs `os.getcwd` when unpickled by a reader that looks names up."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return os.getcwd, ()


def test_6_audit_hook_sees_an_unpickler() -> None:
    seen = audit.seen
    audit.install()
    seen.clear()
    pickle.loads(pickle.dumps(Tracer()))
    assert any("getcwd" in name for name in seen)
    seen.clear()

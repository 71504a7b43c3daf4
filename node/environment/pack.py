"""From what a person wrote to what travels: a Python file with its rows, or rows alone, packed into one blob.

    riddle.py [+ the rows it names] --> file/riddle, TaskBundle
    questions.jsonl                 --> rows/questions, TaskBundle

On the founder's machine, in the node's process: so nothing here runs the code, and which file the rows are in
is read from its syntax.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from node.environment.rows import read_rows
from protocol.codec import encode
from protocol.errors import ConfigError
from protocol.tasks import FILE, MAX_CODE_CHARS, ROWS, TaskBundle

__all__ = ["is_task_path", "pack"]

_TABLES = (".jsonl", ".ndjson", ".csv", ".parquet", ".arrow")
_OTHERS = re.compile(r"[^A-Za-z0-9_.\-]+")
_NAME_CHARS = 48


def is_task_path(text: str) -> bool:
    """Whether a person who writes this means a file or folder, and no task's name."""
    return text.endswith((".py", *_TABLES)) or text.startswith((".", "/", "~"))


def pack(path: Path) -> tuple[str, bytes]:
    """Name and blob of the task in `path`: Python, or a file or folder of rows (`rows.py`). Raises
    ConfigError."""
    if not path.exists():
        raise ConfigError(f"there is no task at {path}; `swarm env new NAME` writes one")
    code, rows = "", b""
    if path.suffix == ".py":
        code = _code(path)
        named = _named_rows(path, code)
        rows = read_rows(path.parent / named) if named else b""
    else:
        rows = read_rows(path)
    name = _OTHERS.sub("-", path.resolve().stem).strip("-._")[:_NAME_CHARS] or "task"
    return (FILE if code else ROWS) + name, encode(TaskBundle(code, rows))


def _code(path: Path) -> str:
    try:
        code = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from None
    if not 0 < len(code) <= MAX_CODE_CHARS:
        raise ConfigError(f"{path} has {len(code)} characters; a task has 1 to {MAX_CODE_CHARS}")
    return code


def _named_rows(path: Path, code: str) -> str:
    """The file that `rows = "..."` names, "" for none."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path} is not valid Python: {error}") from None
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "rows" for target in node.targets
        ):
            value = node.value
            return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
    return ""

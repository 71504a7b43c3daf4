"""Questions in a file: JSONL, CSV, Parquet or a dataset folder on disk, as lines of JSON objects.

The founder's machine reads whatever format it is and writes the one that travels: one JSON object a line,
keys sorted, so that equal tables give equal bytes. Members and the sandbox read lines only. Which columns are
question and answer stands in the charter (`own_task.py`).
"""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from node.environment.records import item_seed
from protocol.errors import ConfigError
from protocol.tasks import MAX_ROWS_BYTES, unpack

__all__ = ["MAX_ROWS", "QUESTION", "SOLUTION", "Rows", "read_rows", "solution_of"]

MAX_ROWS = 1_000_000
MAX_ROW_BYTES = 64 * 1024
QUESTION, SOLUTION = "question", "answer"
"""Columns of a row where the charter names no others."""


class Rows:
    """Lines of JSON objects, each parsed when it is asked for."""

    def __init__(self, lines: bytes) -> None:
        """Raises ConfigError for what has no row, or too many."""
        self._lines = lines
        self._starts = array("Q")
        start = 0
        while start < len(lines):
            self._starts.append(start)
            end = lines.find(b"\n", start)
            start = len(lines) if end < 0 else end + 1
        if not 0 < len(self._starts) <= MAX_ROWS:
            raise ConfigError(f"a task has 1 to {MAX_ROWS} rows, this one {len(self._starts)}")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> dict[str, Any]:
        start = self._starts[number]
        end = self._starts[number + 1] if number + 1 < len(self._starts) else len(self._lines)
        row: dict[str, Any] = json.loads(self._lines[start:end])
        return row


def solution_of(blob: bytes, config: Mapping[str, object], seed: int) -> str | None:
    """The answer that stands in the row of a seed of a packed task; None where there is none, or code makes
    the rows. Runs nothing."""
    lines = unpack(blob).rows
    if not lines:
        return None
    rows = Rows(lines)
    solution = rows[item_seed(seed, 0) % len(rows)].get(str(config.get("solution", SOLUTION)))
    return None if solution is None else str(solution)


def read_rows(path: Path) -> bytes:
    """The rows of a file, or of a folder that `datasets` wrote, as lines. Raises ConfigError."""
    lines: list[bytes] = []
    size = 0
    try:
        for number, row in enumerate(_rows(path), 1):
            line = _line(path, number, row)
            size += len(line)
            if number > MAX_ROWS or size > MAX_ROWS_BYTES:
                raise ConfigError(
                    f"{path} has more than {MAX_ROWS} rows or {MAX_ROWS_BYTES >> 20} MiB of them; take fewer"
                )
            lines.append(line)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    if not lines:
        raise ConfigError(f"{path} has no rows")
    return b"".join(lines)


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.is_dir():
        files = sorted(path.rglob("*.arrow")) or sorted(path.rglob("*.parquet"))
        if not files:
            raise ConfigError(f"{path} holds no dataset: neither .arrow nor .parquet files are in it")
        for file in files:
            yield from _table(file)
        return
    match path.suffix:
        case ".jsonl" | ".ndjson":
            yield from _jsonl(path)
        case ".csv":
            yield from _csv(path)
        case ".parquet" | ".arrow":
            yield from _table(path)
        case _:
            raise ConfigError(f"{path} is none of .py, .jsonl, .csv, .parquet and a folder of a dataset")


def _jsonl(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{path}, line {number} is no JSON object: {line[:60]!r}")
            yield row


def _csv(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, row in enumerate(csv.DictReader(file, strict=True), 2):
                if None in row or None in row.values():
                    raise ConfigError(f"{path}, row {number} has another number of cells than the header")
                yield row
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no CSV file in UTF-8: {error}") from None


def _table(path: Path) -> Iterable[Mapping[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{path} needs pyarrow; pip install pyarrow, or save it as .jsonl") from None
    try:
        if path.suffix == ".parquet":
            for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
                yield from batch.to_pylist()
            return
        with pyarrow.memory_map(str(path)) as source:
            for batch in pyarrow.ipc.open_stream(source):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{path} is no table that pyarrow reads: {error}") from None


def _line(path: Path, number: int, row: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        line = text.encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, row {number} holds what JSON cannot say: {error}") from None
    if len(line) > MAX_ROW_BYTES:
        raise ConfigError(f"{path}, row {number} has {len(line)} bytes, more than {MAX_ROW_BYTES}")
    return line

"""Neighbours in a row that go together: the node's into one request, the worker's into one fork."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["chunks"]

T = TypeVar("T")


def chunks(
    items: Iterable[T], size: Callable[[T], int], most: int, fit: Callable[[T, T], bool] = lambda _, __: True
) -> Iterator[list[T]]:
    """`items` in order, in lists of up to `most` by `size`; one that is larger is alone. Each of a list but
    the first must `fit(first, each)`."""
    chunk: list[T] = []
    total = 0
    for each in items:
        if chunk and (total + size(each) > most or not fit(chunk[0], each)):
            yield chunk
            chunk, total = [], 0
        chunk.append(each)
        total += size(each)
    if chunk:
        yield chunk

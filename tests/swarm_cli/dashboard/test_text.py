"""How numbers and texts are written."""

from __future__ import annotations

import math

import pytest
from rich.cells import cell_len

from swarm_cli.dashboard.text import cut, cut_head, decimal, duration, quantity, short_id, signed, since


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.04, "0.0s"),
        (9.94, "9.9s"),
        (9.96, "10s"),
        (59.4, "59s"),
        (125, "2m 05s"),
        (3600, "1h 00m"),
        (90_000, "1d 01h"),
        (-3, "0.0s"),
        (math.nan, "–"),
    ],
)
def test_duration(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0k"),
        (123_456, "123k"),
        (1_213_056, "1.2M"),
        (2.5e12, "2.5T"),
        (math.inf, "–"),
    ],
)
def test_quantity(value: float, shown: str) -> None:
    assert quantity(value) == shown


def test_decimals() -> None:
    assert decimal(0.126) == "0.13"
    assert decimal(math.nan) == "–"
    assert signed(0.5) == "+0.50"
    assert signed(-0.5) == "-0.50"


def test_time_within_a_run() -> None:
    assert since(3_725_000, 0) == "1:02:05"
    assert since(0, 10) == "0:00:00"


def test_short_id_is_the_tail() -> None:
    assert short_id("12D3KooWabcdef") == "…abcdef"
    assert short_id("") == "–"


@pytest.mark.parametrize(
    "text", ["", "short", "a much longer text than that", "漢字漢字漢字漢字漢字", "a\nb\tc" * 5, "é" * 40]
)
@pytest.mark.parametrize("cells", [1, 2, 7, 12])
@pytest.mark.parametrize("function", [cut, cut_head])
def test_cut_never_is_wider_than_asked_and_stays_on_one_line(text: str, cells: int, function: object) -> None:
    shown = function(text, cells)  # type: ignore[operator]
    assert cell_len(shown) <= cells
    assert "\n" not in shown
    assert "\t" not in shown


def test_cut_says_that_something_is_missing() -> None:
    assert cut("abcdef", 4) == "abc…"
    assert cut("abcd", 4) == "abcd"
    assert cut_head("abcdef", 4) == "…def"
    assert cut_head("two\nlines", 20) == "two⏎lines"

"""The event stream: peers' text made inert, every event as one JSON line and back."""

from __future__ import annotations

import enum
import json
import math
import types
import typing
import unicodedata
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node import events
from node.events import EventBus, Notice, NoticeLevel, decode_event, encode_event, inert

BAD_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


# --- inert -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, 日本語, é, 🦜", "plain text, 日本語, é, 🦜"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[2Jgone", "\ufffd[2Jgone"),
        ("\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\", "\ufffd]8;;http://evil\ufffd\\click\ufffd]8;;\ufffd\\"),
        ("\x9b31mred", "\ufffd31mred"),  # the one-character control sequence introducer
        ("nul\x00 bell\x07 return\r", "nul\ufffd bell\ufffd return\ufffd"),
        ("backspace\x08 delete\x7f", "backspace\ufffd delete\ufffd"),
        ("\u202egnp.exe\u202c", "\ufffdgnp.exe\ufffd"),
        ("\u2066a\u2069\u200e\u200f\u061c", "\ufffda\ufffd\ufffd\ufffd\ufffd"),
        ("zero\u200bwidth\ufeff", "zero\ufffdwidth\ufffd"),
        ("line\u2028paragraph\u2029", "line\ufffdparagraph\ufffd"),
        ("tag\U000e0041", "tag\ufffd"),
        ("private\ue000", "private\ufffd"),
        ("half \ud800 pair", "half \ufffd pair"),
    ],
)  # fmt: skip
def test_control_and_bidirectional_characters_are_replaced(text: str, shown: str) -> None:
    assert inert(text) == shown


def test_long_text_is_cut_to_the_length_with_an_ellipsis() -> None:
    assert inert("a" * 10, 10) == "a" * 10
    assert inert("a" * 11, 10) == "a" * 9 + "…"
    assert len(inert("b" * 1_000_000)) == events.MAX_SHOWN_CHARS


@given(st.text(st.characters(), max_size=200), st.integers(1, 50))
def test_inert_text_is_bounded_harmless_and_stays_so(text: str, max_chars: int) -> None:
    shown = inert(text, max_chars)
    assert len(shown) <= max_chars
    assert all(c in "\n\t" or unicodedata.category(c) not in BAD_CATEGORIES for c in shown)
    assert inert(shown, max_chars) == shown
    shown.encode()  # no surrogates: JSON can carry it


# --- every event there and back ----------------------------------------------------------------------------


def value_of(kind: Any) -> Any:
    """A value of a field's type, different from its neutral one."""
    if kind is str:
        return "text with ⟨brackets⟩\n"
    if kind is bool:
        return True
    if kind is int:
        return 2**53
    if kind is float:
        return 0.1
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return list(kind)[-1]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return filled(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return (value_of(arguments[0]),) * 2
    if origin is types.UnionType:
        return value_of(arguments[0])  # the other one is None
    if origin is dict:
        return {value_of(arguments[0]): value_of(arguments[1])}
    raise TypeError(f"no value for {kind}")


def filled(kind: type[msgspec.Struct]) -> Any:
    hints = typing.get_type_hints(kind)
    return kind(**{name: value_of(hints[name]) for name in kind.__struct_fields__})


EVENT_TYPES = typing.get_args(events.AnyEvent)


@pytest.mark.parametrize("kind", EVENT_TYPES, ids=lambda kind: kind.__name__)
def test_every_event_round_trips_as_one_line(kind: type[events.Event]) -> None:
    event = filled(kind)
    line = encode_event(event)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode_event(line) == event
    assert json.loads(line)["type"] == kind.__name__


def test_the_decoder_knows_every_event() -> None:
    assert isinstance(events.AnyEvent, types.UnionType)
    assert set(EVENT_TYPES) == set(events.Event.__subclasses__())
    assert {kind.__name__ for kind in EVENT_TYPES} <= set(events.__all__)


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"[]", b"\xff", b'{"type":"Notice"}', b'{"type":"Nobody","at":1}']
)
def test_other_lines_are_refused(line: bytes) -> None:
    with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
        decode_event(line)


def test_events_are_immutable_and_numbers_finite_by_convention() -> None:
    notice = Notice(at=1, level=NoticeLevel.INFO, text="x")
    with pytest.raises(AttributeError):
        notice.text = "y"  # type: ignore[misc]
    # JSON has no NaN: it would come out as null, which no reader accepts. Stages must not emit it.
    event = msgspec.structs.replace(filled(events.NodeStopped), wall_s=math.nan)
    with pytest.raises(msgspec.ValidationError):
        decode_event(encode_event(event))


# --- the bus -----------------------------------------------------------------------------------------------


def test_every_sink_gets_every_event_in_order_of_subscription() -> None:
    bus, seen = EventBus(), []
    bus.subscribe(lambda event: seen.append(("first", event.at)))
    bus.emit(Notice(at=1, level=NoticeLevel.INFO, text=""))
    bus.subscribe(lambda event: seen.append(("second", event.at)))
    bus.emit(Notice(at=2, level=NoticeLevel.INFO, text=""))
    assert seen == [("first", 1), ("first", 2), ("second", 2)]

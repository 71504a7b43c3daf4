"""The parts of `docs/protocol.md` that follow from the code; `python -m tests.protocol.page` writes them
anew.

Between `<!-- begin NAME -->` and `<!-- end NAME -->` stand: limits, the records field by field, the names on
the network, and the worked example. Fields, order and bounds come from the records themselves, their meaning
from the text under each field.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from msgspec import inspect as types

from protocol import constants, merge_messages, messages, prompts, tasks, topics
from protocol.charter import charter_bytes
from protocol.codec import encode, framed
from protocol.envelope import Envelope
from protocol.frames import encode_frame
from protocol.identity import public_key
from protocol.messages import Record
from protocol.preamble import PREAMBLE
from protocol.receipts import prove
from tests.protocol.samples import (
    ANNOUNCEMENT,
    CHARTER,
    GROUP,
    IDENTITY,
    LINEAGE,
    NOW_MS,
    PEER_RECORD,
    PROMPT,
    SWARM_ID,
    TOPIC,
    envelope_bytes,
)

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
HEX_COLUMNS = 96


def written() -> str:
    """The page with its generated parts as they follow from the code now."""
    text = PAGE.read_text(encoding="utf-8")
    for name, part in PARTS.items():
        block = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        made = part()
        text, count = block.subn(lambda found, made=made: f"{found[1]}{made}\n{found[2]}", text)
        if count != 1:
            raise ValueError(f"{PAGE} has {count} blocks {name}")
    return text


# --- limits and names ---------------------------------------------------------------------------------------


def limits() -> str:
    """A row for every shared number, with the first sentence of its text."""
    rows = ["| name | value | what it bounds |", "|---|---|---|"]
    for name, note in _notes(inspect.getsource(constants)).items():
        value = ", ".join(
            f"{getattr(constants, each)!r}" for each in name.split(", ") if hasattr(constants, each)
        )
        rows.append(f"| `{name}` | {value} | {_cell(note.partition(' Changing breaks')[0])} |")
    return "\n".join(rows)


def names() -> str:
    """A row for every stream."""
    notes = _notes(inspect.getsource(topics))
    rows = ["| stream | what it carries |", "|---|---|"]
    rows += [
        f"| `{getattr(topics, name)}` | {_cell(notes[name])} |"
        for name in sorted(topics.__all__)
        if name.endswith("_PROTOCOL")
    ]
    return "\n".join(rows)


# --- records ------------------------------------------------------------------------------------------------


def records() -> str:
    """A table for every record, in the order of the source."""
    classes = [
        getattr(module, node.name)
        for module in (messages, merge_messages, tasks)
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ClassDef)
    ]
    kept = [each for each in classes if issubclass(each, Record) and each is not Record]
    return "\n\n".join(_record(each) for each in [*kept, Envelope])


def _record(record: type[Record]) -> str:
    notes = _notes(textwrap.dedent(inspect.getsource(record)))
    info = types.type_info(record)
    assert isinstance(info, types.StructType)
    rows = [f"### {record.__name__}", "", _plain(inspect.getdoc(record) or ""), ""]
    rows += ["| field | type | meaning |", "|---|---|---|"]
    if info.tag is not None:
        rows.append(f"| `{info.tag_field}` | `{info.tag}` | tells the kinds of segments apart |")
    for field in info.fields:
        rows.append(f"| `{field.name}` | {_type(field.type)} | {_cell(notes.get(field.name, ''))} |")
    return "\n".join(rows)


_ALIASES = {"^12D3Koo": "peer id", "^[0-9a-f]": "digest", "^[A-Za-z0-9][A-Za-z0-9_": "name", "^([A": "pin"}


def _type(found: types.Type) -> str:
    match found:
        case types.Metadata(type=inner):
            return _type(inner)
        case types.StrType(pattern=str(pattern)):
            return next(alias for start, alias in _ALIASES.items() if pattern.startswith(start))
        case types.StrType(min_length=least, max_length=most):
            return f"text of {least or 0} to {_number(most)} characters"
        case types.BytesType(min_length=least, max_length=most):
            return f"{_number(most)} bytes" if least == most else f"bytes, {least or 0} to {_number(most)}"
        case types.IntType(ge=least, le=most, lt=below):
            return f"integer, {least} to {_number(most if most is not None else int(below or 0) - 1)}"
        case types.FloatType(gt=above, ge=least, le=most):
            bounds = (("above", above), ("from", least), ("up to", most))
            return " ".join(["float", *(f"{word} {bound:g}" for word, bound in bounds if bound is not None)])
        case types.BoolType():
            return "boolean"
        case types.EnumType(cls=cls):
            return " or ".join(f'"{each.value}"' for each in cls)
        case types.StructType(cls=cls):
            return f"[{cls.__name__}](#{cls.__name__.lower()})"
        case types.VarTupleType(item_type=item, min_length=least, max_length=most):
            return f"array, {least or 0} to {_number(most)} of: {_type(item)}"
        case types.UnionType(types=options):
            return " or ".join(map(_type, options))
        case types.NoneType():
            return "nil"
    raise TypeError(f"no words for {found}")


def _number(value: int | None) -> str:
    if value is None:
        return "any"
    for power in range(20, 64):
        if value in (2**power, 2**power - 1):
            return f"2^{power}" + " - 1" * (value != 2**power)
    return str(value)


def _notes(source: str) -> dict[str, str]:
    """The text under each assignment of a module or class, by the names assigned."""
    body = ast.parse(source).body
    body = body[0].body if len(body) == 1 and isinstance(body[0], ast.ClassDef) else body
    notes: dict[str, str] = {}
    for node, below in itertools.pairwise(body):
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            parts = itertools.chain.from_iterable(ast.walk(target) for target in targets if target)
            if named := [each.id for each in parts if isinstance(each, ast.Name)]:
                notes[", ".join(named)] = str(below.value.value)
    return notes


def _plain(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


# --- the worked example -------------------------------------------------------------------------------------


def example() -> str:
    """One announcement from key to envelope, and one proof, in hex."""
    envelope = envelope_bytes(payload=encode(ANNOUNCEMENT))
    numbers = (number.to_bytes(8, "big") for number in (5, NOW_MS, NOW_MS + 60_000))
    texts = (text.encode() for text in (SWARM_ID, TOPIC, IDENTITY.peer_id))
    signed = framed("envelope", *texts, *numbers, encode(ANNOUNCEMENT))
    leaves = [hashlib.sha256(framed("rollout", encode(each))).digest() for each in GROUP.rollouts]
    root = hashlib.sha256(framed("node", *leaves)).digest()
    steps: list[tuple[str, str | bytes]] = [
        ("The author's Ed25519 seed", bytes(range(32))),
        ("Its public key", public_key(IDENTITY.peer_id)),
        ("Its peer id", IDENTITY.peer_id),
        ("The charter of the swarm", charter_bytes(CHARTER)),
        ("The swarm id: SHA-256 of the charter with an empty signature", SWARM_ID),
        (
            f"Pool of window {PROMPT.window}, first five indexes",
            str(prompts.pool(SWARM_ID, CHARTER, PROMPT.window)[:5]),
        ),
        (
            "The author's first five slots in it",
            str(prompts.slots(SWARM_ID, CHARTER, PROMPT.window, IDENTITY.peer_id)[:5]),
        ),
        ("Seed of index 1234, attempt 0", str(prompts.item_seed(SWARM_ID, 1234, 0))),
        ("First frame of a handshake", encode_frame(PREAMBLE)),
        ("Second frame: Hello", encode_frame(encode(messages.Hello(SWARM_ID, PEER_RECORD)))),
        ("A lineage", encode(LINEAGE)),
        ("A prompt reference", encode(PROMPT)),
        ("The first of two rollouts", encode(GROUP.rollouts[0])),
        ("Leaf of the first rollout", leaves[0]),
        ("Leaf of the second rollout, which is the path of the first", prove(GROUP.rollouts, 0)),
        ("Root over both", root),
        ("Slot digest: `completions` of the announcement", ANNOUNCEMENT.completions),
        ("The announcement", encode(ANNOUNCEMENT)),
        ('What is signed: `framed("envelope", ...)`', signed),
        ("The envelope, sequence 5, living for 60 s", envelope),
    ]
    return "\n\n".join(f"{at}. {what}:\n\n{_shown(value)}" for at, (what, value) in enumerate(steps, 1))


def _shown(value: str | bytes) -> str:
    lines: Iterator[str] = iter([value])
    if isinstance(value, bytes):
        text = value.hex()
        lines = (text[at : at + HEX_COLUMNS] for at in range(0, len(text), HEX_COLUMNS))
    return "\n".join(["```text", *lines, "```"])


PARTS = {"limits": limits, "names": names, "records": records, "example": example}

if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")

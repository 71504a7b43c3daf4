"""The rules of a swarm: written as TOML by its founder, signed, and then the same bytes for everybody.

    TOML text --parse_toml--> plain values --found(identity)--> Charter --charter_bytes--> invite, disk, peers
    bytes --decode_charter--> Charter whose types, consistency and signature hold

`swarm_id` is the SHA-256 of the canonical bytes without the signature, so it names the rules and their
founder. Not for tunable settings of one node (`node/config.py`) and not for trust between members.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from protocol.codec import decode, digest, encode, framed, shown
from protocol.constants import (
    MAX_BLOB_BYTES,
    MAX_FRAME_BYTES,
    MAX_RECEIPT_BYTES,
    MAX_TTL_MS,
    PROTOCOL_VERSION,
)
from protocol.errors import CharterError, LocalProtocolError, RemoteProtocolError
from protocol.identity import Identity, public_key, verify
from protocol.messages import (
    Charter,
    Digest,
    EnvironmentSpec,
    ModelSpec,
    Name,
    RecipeSpec,
    Record,
    Sampling,
    TokenizerSpec,
    VerificationRules,
)

__all__ = [
    "MAX_CHARTER_BYTES",
    "canonical_json",
    "charter_bytes",
    "decode_charter",
    "found",
    "parse_toml",
    "sampling",
    "swarm_id",
    "verify_charter",
]

MAX_CHARTER_BYTES = MAX_FRAME_BYTES
"""A charter travels in one frame."""

_MADE_BY_FOUNDING = frozenset({"protocol_version", "founder", "created_at", "signature"})
_TABLES: dict[str, type[Record]] = {
    "environments": EnvironmentSpec,
    "tokenizers": TokenizerSpec,
    "models": ModelSpec,
    "recipes": RecipeSpec,
}
_MAX_CONFIG_DEPTH = 16
_ARRAY_BYTES_PER_TOKEN = 12
"""Token id, log-probability and version, four bytes each."""
_TEXT_BYTES_PER_TOKEN = 16
"""Room for the texts of a group: about four times what tokenizers give on average."""


def parse_toml(text: str) -> dict[str, Any]:
    """Charter fields from TOML: the tables `[[environments]]` (name, weight, pin, config table),
    `[[tokenizers]]`, `[[models]]`, `[[recipes]]` and `[rules]`, and top-level values. Config tables become
    canonical JSON. Raises `CharterError` with the place or the key."""
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise CharterError(f"the charter is not valid TOML: {error}") from None
    return _checked_keys(values)


def found(
    identity: Identity, rules: str | Mapping[str, Any], created_at: int, pins: Mapping[str, str] | None = None
) -> Charter:
    """A new signed charter. `rules` is TOML text or the mapping it stands for; `created_at` in ms. `pins` by
    environment's name stand where the rules name none."""
    values = parse_toml(rules) if isinstance(rules, str) else _checked_keys(rules)
    if pins and "environments" in values:
        values["environments"] = [
            {"pin": pins.get(str(row.get("name")), ""), **row} for row in values["environments"]
        ]
    values |= {
        "protocol_version": PROTOCOL_VERSION,
        "founder": identity.peer_id,
        "created_at": created_at,
        "signature": b"",
    }
    try:
        unsigned = msgspec.convert(values, Charter, strict=True)
    except msgspec.ValidationError as error:
        raise CharterError(f"the charter is not valid: {error}") from None
    _check_consistency(unsigned)
    for issuer in unsigned.issuers:  # a typing mistake; to a reader, who cannot exist merely signs nothing
        try:
            public_key(issuer)
        except RemoteProtocolError as error:
            raise CharterError(f"the charter names an issuer that cannot exist: {error}") from None
    charter = msgspec.structs.replace(unsigned, signature=identity.sign(_signed_bytes(unsigned)))
    if len(data := charter_bytes(charter)) > MAX_CHARTER_BYTES:
        raise CharterError(
            f"the charter has {len(data)} bytes, above the cap of {MAX_CHARTER_BYTES}; list less in it"
        )
    return charter


def charter_bytes(charter: Charter) -> bytes:
    """Canonical bytes, signature included: what travels and what lies on disk."""
    return encode(charter)


def swarm_id(charter: Charter) -> Digest:
    """Name of the swarm: SHA-256 of the canonical bytes with an empty signature."""
    return digest(_unsigned_bytes(charter))


def decode_charter(data: bytes) -> Charter:
    """The charter in `data`, which may come from a stranger. Raises `CharterError` unless types, consistency,
    protocol version and the founder's signature all hold."""
    try:
        charter = decode(data, Charter, max_bytes=MAX_CHARTER_BYTES)
    except RemoteProtocolError as error:
        _check_version(*_version_in(data))  # another version has other fields: say so instead
        raise CharterError(f"these bytes are no charter: {error}; ask for a new invite") from None
    verify_charter(charter)
    return charter


def verify_charter(charter: Charter) -> None:
    """Raise `CharterError` unless the charter is consistent, of this protocol version and signed by its
    founder."""
    _check_version(charter.name, charter.protocol_version)
    try:  # the signature first: consistency takes longer, and is owed to nobody who has not signed
        signed = _signed_bytes(charter)
    except LocalProtocolError as error:
        raise CharterError(f"the charter is not valid: {error}") from None
    if not verify(charter.founder, signed, charter.signature):
        raise CharterError(
            f"the signature of charter {charter.name!r} is not by its founder {charter.founder}"
        )
    _check_consistency(charter)


def sampling(charter: Charter) -> Sampling:
    """How every member samples."""
    return Sampling(charter.max_new_tokens, charter.temperature, charter.top_p)


def canonical_json(value: object) -> str:
    """The one JSON text of a value: sorted keys, no spaces, no escapes but the necessary. Raises
    `CharterError` for what JSON cannot say (dates, NaN)."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise CharterError(f"an environment config must hold plain TOML values only: {error}") from None
    return text


class _AnyCharter(msgspec.Struct):
    """What charters of all versions have."""

    name: Name
    protocol_version: int


def _version_in(data: bytes) -> tuple[str, int]:
    """Name and version of a charter that may be of another version; this version where it is none at all."""
    try:
        peeked = msgspec.msgpack.decode(data, type=_AnyCharter)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return "", PROTOCOL_VERSION
    return peeked.name, peeked.protocol_version


def _check_version(name: str, version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise CharterError(
            f"swarm {name!r} speaks protocol version {version}, this program {PROTOCOL_VERSION}: "
            + ("update this program" if version > PROTOCOL_VERSION else "ask its founder to found it again")
        )


def _unsigned_bytes(charter: Charter) -> bytes:
    return encode(msgspec.structs.replace(charter, signature=b""))


def _signed_bytes(charter: Charter) -> bytes:
    return framed("charter", _unsigned_bytes(charter))


def _checked_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with config tables as JSON text. Unknown keys name the nearest valid one."""
    allowed = set(Charter.__struct_fields__) - _MADE_BY_FOUNDING
    _refuse_unknown(values, allowed, "the charter")
    checked = dict(values)
    for table, record in _TABLES.items():
        rows = checked.get(table, ())
        if not isinstance(rows, list | tuple) or not all(isinstance(row, Mapping) for row in rows):
            raise CharterError(f"{table!r} in the charter must be written as [[{table}]] tables")
        for row in rows:
            _refuse_unknown(row, record.__struct_fields__, f"[[{table}]]")
    if "environments" in checked:
        checked["environments"] = [_with_json_config(row) for row in checked["environments"]]
    if isinstance(checked.get("rules"), Mapping):
        _refuse_unknown(checked["rules"], VerificationRules.__struct_fields__, "[rules]")
    return checked


def _with_json_config(row: Mapping[str, Any]) -> dict[str, Any]:
    config = row.get("config", {})
    if not isinstance(config, Mapping):
        raise CharterError(f"the config of environment {row.get('name')!r} must be a table of settings")
    return {**row, "config": canonical_json(dict(config))}


def _refuse_unknown(values: Mapping[str, Any], allowed: Collection[str], where: str) -> None:
    for key in values:
        if key in allowed:
            continue
        if key in _MADE_BY_FOUNDING:
            raise CharterError(f"{key!r} in {where} is set when the swarm is founded; remove it")
        near = difflib.get_close_matches(str(key), sorted(allowed), n=1, cutoff=0.0)
        raise CharterError(f"unknown key {key!r} in {where}: did you mean {near[0]!r}?")


def _check_consistency(charter: Charter) -> None:
    """What types cannot say: sizes that fit each other, unique names, canonical configs."""
    if charter.pool_size > charter.universe_size:
        raise CharterError(
            f"pool_size {charter.pool_size} is above universe_size {charter.universe_size}: a window selects "
            "its pool from the universe; raise universe_size or lower pool_size"
        )
    if charter.slots_per_window > charter.pool_size:
        raise CharterError(
            f"slots_per_window {charter.slots_per_window} is above pool_size {charter.pool_size}: a node's "
            "slots are taken from the pool; raise pool_size or lower slots_per_window"
        )
    ttl_ms = (charter.rules.max_age_windows + 1) * charter.window_ms
    if ttl_ms > MAX_TTL_MS:
        raise CharterError(
            f"max_age_windows {charter.rules.max_age_windows} and window_ms {charter.window_ms} let an "
            f"announcement live for {ttl_ms} ms, and no envelope may live longer than {MAX_TTL_MS}; lower "
            "one of them"
        )
    body_bytes = (
        charter.group_size * charter.max_new_tokens * (_ARRAY_BYTES_PER_TOKEN + _TEXT_BYTES_PER_TOKEN)
    )
    if body_bytes > MAX_BLOB_BYTES:
        raise CharterError(
            f"group_size {charter.group_size} and max_new_tokens {charter.max_new_tokens} make groups of up "
            f"to {body_bytes} bytes, and no body may have more than {MAX_BLOB_BYTES}; lower one of them"
        )
    if charter.receipt_windows < charter.rules.max_age_windows:
        raise CharterError(
            f"receipt_windows {charter.receipt_windows} is below max_age_windows "
            f"{charter.rules.max_age_windows}: groups would be gone while they may still be used; raise it"
        )
    receipt_bytes = body_bytes * charter.slots_per_window * charter.receipt_windows
    if receipt_bytes > MAX_RECEIPT_BYTES:
        raise CharterError(
            f"slots_per_window {charter.slots_per_window} and receipt_windows {charter.receipt_windows} let "
            f"a member keep {receipt_bytes} bytes of groups, and nobody keeps more than {MAX_RECEIPT_BYTES}; "
            "lower one of them"
        )
    _refuse_repeated([spec.name for spec in charter.environments], "environment name")
    _refuse_repeated([spec.name for spec in charter.tokenizers], "tokenizer name")
    _refuse_repeated([spec.digest for spec in charter.tokenizers], "tokenizer digest")
    _refuse_repeated([spec.name for spec in charter.models], "model name")
    _refuse_repeated(charter.issuers, "issuer")
    _refuse_unsorted([recipe.max_params for recipe in charter.recipes], "max_params of the recipes")
    for tokenizer in charter.tokenizers:
        _refuse_unsorted(tokenizer.end_token_ids, f"end_token_ids of tokenizer {tokenizer.name!r}")
        if tokenizer.end_token_ids[-1] >= tokenizer.vocab_size:
            raise CharterError(
                f"end_token_ids {tokenizer.end_token_ids[-1]} of tokenizer {tokenizer.name!r} is not below "
                f"its vocab_size {tokenizer.vocab_size}"
            )
    for environment in charter.environments:
        if not _is_canonical_object(environment.config):
            raise CharterError(
                f"the config of environment {environment.name!r} is not canonical JSON of an object: "
                f"{shown(environment.config)}"
            )


def _refuse_repeated(values: Collection[str], what: str) -> None:
    for value, count in Counter(values).items():
        if count > 1:
            raise CharterError(f"the {what} {value!r} stands in the charter twice")


def _refuse_unsorted(values: Sequence[int], what: str) -> None:
    if list(values) != sorted(set(values)):
        raise CharterError(f"the {what} must ascend, and {list(values)} do not")


def _is_canonical_object(text: str) -> bool:
    """Whether `text` is a JSON object in its canonical form. Depth is checked before the recursive parser
    runs."""
    depth = deepest = 0
    in_string = escaped = False
    for character in text:
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_string = True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    if deepest > _MAX_CONFIG_DEPTH:
        return False
    try:
        value = json.loads(text)
        return isinstance(value, dict) and canonical_json(value) == text
    except (ValueError, RecursionError, CharterError):
        return False

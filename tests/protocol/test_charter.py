"""Charters: TOML in, canonical signed bytes out, clear refusals."""

from __future__ import annotations

import hashlib
import json
import tomllib

import msgspec
import pytest

from protocol import charter as charters
from protocol import messages as m
from protocol.codec import encode, framed
from protocol.errors import CharterError
from protocol.identity import Identity, verify
from tests.protocol.samples import CHARTER, CHARTER_TOML, IDENTITY, ISSUER, MEMBER, NOW_MS, PINS, SWARM_ID

replace = msgspec.structs.replace


def signed(charter: m.Charter, identity: Identity = IDENTITY) -> m.Charter:
    """The charter with a right signature, whatever it says."""
    unsigned = replace(charter, signature=b"", founder=identity.peer_id)
    return replace(unsigned, signature=identity.sign(framed("charter", encode(unsigned))))


def test_toml_becomes_a_signed_charter() -> None:
    assert CHARTER.name == "letters"
    assert CHARTER.founder == IDENTITY.peer_id
    assert CHARTER.created_at == NOW_MS
    spell, chain = CHARTER.environments
    assert spell == m.EnvironmentSpec(
        "reasoning_gym/spell_backward",
        '{"max_word_len":5,"min_word_len":3}',
        weight=3,
        pin="sha256:" + 64 * "b",
    )
    assert chain == m.EnvironmentSpec("reasoning_gym/chain_sum", "{}", pin="reasoning-gym==0.1.25")
    assert CHARTER.models == (m.ModelSpec("sparrow", "a" * 64, "https://models.example/sparrow"),)
    assert CHARTER.recipes == (m.RecipeSpec(1_000_000, 3e-4, 5, "topr"),)
    assert CHARTER.tokenizers[0].end_token_ids == (1, 5)
    assert charters.sampling(CHARTER) == m.Sampling(12, temperature=0.9, top_p=1.0)
    assert CHARTER.rules.max_logprob_gap == 3.0
    assert CHARTER.rules.max_age_windows == 3
    charters.verify_charter(CHARTER)
    unsigned = encode(replace(CHARTER, signature=b""))
    assert SWARM_ID == hashlib.sha256(unsigned).hexdigest() == charters.swarm_id(CHARTER)
    assert verify(IDENTITY.peer_id, framed("charter", unsigned), CHARTER.signature)


def test_mapping_and_toml_found_the_same_swarm() -> None:
    values = tomllib.loads(CHARTER_TOML)
    before = json.dumps(values)
    assert charters.found(IDENTITY, values, NOW_MS, PINS) == CHARTER
    assert json.dumps(values) == before


def test_order_of_config_keys_does_not_matter_but_their_values_do() -> None:
    other = CHARTER_TOML.replace("min_word_len = 3, max_word_len = 5", "max_word_len = 5, min_word_len = 3")
    assert charters.swarm_id(charters.found(IDENTITY, other, NOW_MS, PINS)) == SWARM_ID
    other = CHARTER_TOML.replace("max_word_len = 5", "max_word_len = 6")
    assert charters.swarm_id(charters.found(IDENTITY, other, NOW_MS, PINS)) != SWARM_ID


def test_another_founder_or_time_is_another_swarm() -> None:
    assert charters.swarm_id(charters.found(MEMBER, CHARTER_TOML, NOW_MS)) != SWARM_ID
    assert charters.swarm_id(charters.found(IDENTITY, CHARTER_TOML, NOW_MS + 1, PINS)) != SWARM_ID


def test_bytes_survive() -> None:
    data = charters.charter_bytes(CHARTER)
    assert charters.decode_charter(data) == CHARTER
    assert charters.charter_bytes(charters.decode_charter(data)) == data


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("grup_size = 4", "unknown key 'grup_size' in the charter: did you mean 'group_size'"),
        ("founder = 'x'", "'founder' in the charter is set when the swarm is founded; remove it"),
        ("signature = 'x'", "'signature' in the charter is set when"),
        ("[[environments]]\nwait = 3", r"'wait' in \[\[environments\]\]: did you mean 'weight'"),
        ("[[tokenizers]]\nvocabulary = 3", r"unknown key 'vocabulary' in \[\[tokenizers\]\]"),
        ("[rules.more]\nx = 1", r"unknown key 'more' in \[rules\]"),
        ("[[environments]]\nname = 'z'\nconfig = 3", "config of environment 'z' must be a table"),
        ("[[environments]]\nname = 'z'\nconfig = { day = 2024-01-01 }", "plain TOML values only"),
        ("[[environments]]\nname = 'z'\nconfig = { x = nan }", "plain TOML values only"),
        ("[[environments]]\nname = 'reasoning_gym/chain_sum'", "chain_sum' stands in the charter twice"),
        ("[[environments]]\nname = 'has space'", "not valid: Expected `str` matching"),
        ("= 3", "not valid TOML"),
    ],
)  # fmt: skip
def test_mistake_in_the_toml_is_one_clear_sentence(line: str, sentence: str) -> None:
    text = f"{line}\n{CHARTER_TOML}" if not line.startswith("[") else f"{CHARTER_TOML}\n{line}\n"
    with pytest.raises(CharterError, match=sentence):
        charters.found(IDENTITY, text, NOW_MS)


def charters_minimum() -> dict[str, object]:
    return {
        "name": "n",
        "environments": [{"name": "e"}],
        "tokenizers": [{"name": "t", "digest": "c" * 64, "vocab_size": 8, "end_token_ids": [1]}],
    }


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"environments": []}, "length >= 1"),
        ({"environments": 3}, r"written as \[\[environments\]\] tables"),
        ({"environments": ["e"]}, r"written as \[\[environments\]\] tables"),
        ({"tokenizers": []}, "length >= 1"),
        ({"pool_size": 5000}, "pool_size 5000 is above universe_size 4096"),
        ({"slots_per_window": 129}, "slots_per_window 129 is above pool_size 128"),
        ({"window_ms": 900_001}, "live for 3600004 ms, and no envelope may live longer than 3600000"),
        ({"rules": {"max_age_windows": 360}}, "max_age_windows 360 and window_ms 10000 let an announcement"),
        (
            {"group_size": 64, "max_new_tokens": 16_384},
            "up to 29360128 bytes, and no body may have more than",
        ),
        ({"receipt_windows": 2}, "receipt_windows 2 is below max_age_windows 3"),
        (
            {"max_new_tokens": 16_384},
            "let a member keep 1879048192 bytes of groups, and nobody keeps",
        ),
        ({"group_size": 1}, ">= 2"),
        ({"group_size": "4"}, "Expected `int`, got `str`"),
        ({"max_skip_share": 1.5}, "<= 1"),
        ({"issuers": [ISSUER.peer_id] * 2}, "issuer .* twice"),
        ({"issuers": ["12D3KooW" + "1" * 44]}, "an issuer that cannot exist"),
        ({"rules": {"max_logprob_gap": 0}}, "> 0"),
        ({"rules": 3}, "Expected `object`"),
    ],
)
def test_rules_that_contradict_themselves_are_refused(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(CharterError, match=sentence):
        charters.found(IDENTITY, {**charters_minimum(), **change}, NOW_MS)


def test_largest_life_and_body_are_allowed() -> None:
    largest = {"window_ms": 900_000, "group_size": 64, "max_new_tokens": 9362}  # 4 * 900 s; 16,777,216 bytes
    largest |= {"slots_per_window": 16, "receipt_windows": 4}  # 1 GiB
    charters.verify_charter(charters.found(IDENTITY, {**charters_minimum(), **largest}, NOW_MS))


def test_search_for_a_repeated_name_takes_one_pass() -> None:
    looks = 0

    class Name(str):
        __slots__ = ()

        def __hash__(self) -> int:
            nonlocal looks
            looks += 1
            return super().__hash__()

        def __eq__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return super().__eq__(other)

    names = [Name(number) for number in range(1000)]
    charters._refuse_repeated(names, "member")
    with pytest.raises(CharterError, match="member '999' stands in the charter twice"):
        charters._refuse_repeated([*names, names[-1]], "member")
    assert looks < 10 * len(names)


def test_strangers_signature_is_checked_before_what_is_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        charters, "_check_consistency", lambda charter: pytest.fail("checked before the signature")
    )
    with pytest.raises(CharterError, match="signature of charter"):
        charters.verify_charter(replace(CHARTER, name="other"))


def test_tokenizers_must_be_distinct_and_end() -> None:
    def founded(*tokenizers: dict[str, object]) -> m.Charter:
        return charters.found(IDENTITY, {**charters_minimum(), "tokenizers": list(tokenizers)}, NOW_MS)

    one = {"name": "t", "digest": "c" * 64, "vocab_size": 8, "end_token_ids": [1]}
    with pytest.raises(CharterError, match="digest"):
        founded(one, {**one, "name": "u"})
    with pytest.raises(CharterError, match="tokenizer name"):
        founded(one, {**one, "digest": "d" * 64})
    with pytest.raises(CharterError, match="end_token_ids 8 of tokenizer 't' is not below its vocab_size 8"):
        founded({**one, "end_token_ids": [1, 8]})
    for ids in ([], [2, 1], [1, 1]):
        with pytest.raises(CharterError, match="end_token_ids"):
            founded({**one, "end_token_ids": ids})


@pytest.mark.parametrize(
    "config",
    [
        "",
        "[]",
        "3",
        "{ }",
        '{"b":1,"a":2}',
        '{"a":1,"a":1}',
        '{"a":1e999}',
        '{"a":NaN}',
        '{"a":"\\u0041"}',
        "{" + '"a":{' * 4 + "}" * 4,
        '{"a":' * 17 + "{}" + "}" * 17,
        '{"a":' + "[" * 8000 + "]" * 8 + "}",
        '{"a":' + "9" * 5000 + "}",
    ],
)
def test_config_that_is_no_canonical_object_is_refused(config: str) -> None:
    with pytest.raises(CharterError, match="not canonical JSON"):
        charters.verify_charter(signed(replace(CHARTER, environments=(m.EnvironmentSpec("e", config),))))


@pytest.mark.parametrize(
    "config",
    ["{}", '{"a":{"b":[1,2.5,true,null]},"c":"ü"}', '{"a":"[[[[[[[[[[[[[[[[[[[[\\"[[[[[["}', '{"a":"\\\\"}'],
)
def test_canonical_config_is_accepted(config: str) -> None:
    charters.verify_charter(signed(replace(CHARTER, environments=(m.EnvironmentSpec("e", config),))))


def test_version_is_told_apart() -> None:
    with pytest.raises(CharterError, match="speaks protocol version 3, this program 2: update this program"):
        charters.verify_charter(signed(replace(CHARTER, protocol_version=3)))
    first = msgspec.msgpack.encode({"name": "old", "protocol_version": 1, "founder": IDENTITY.peer_id})
    with pytest.raises(CharterError, match="'old' speaks protocol version 1, this program 2: ask"):
        charters.decode_charter(first)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"created_at": NOW_MS + 1},
        {"founder": MEMBER.peer_id},
        {"closed": False},
        {"signature": b""},
        {"signature": bytes(64)},
    ],
)
def test_changed_charter_is_refused(change: dict[str, object]) -> None:
    changed = replace(CHARTER, **change)
    with pytest.raises(CharterError, match="signature of charter"):
        charters.verify_charter(changed)
    with pytest.raises(CharterError, match="signature of charter"):
        charters.decode_charter(encode(changed))


def test_consistency_is_checked_also_when_signed() -> None:
    with pytest.raises(CharterError, match="pool_size"):
        charters.decode_charter(encode(signed(replace(CHARTER, pool_size=8000))))


def test_garbage_is_no_charter() -> None:
    for data in (b"", b"\x80", b"\xc0", b"x" * 100, charters.charter_bytes(CHARTER) + b"\x00"):
        with pytest.raises(CharterError, match="no charter"):
            charters.decode_charter(data)


def test_pins_of_the_founder_fill_what_the_rules_leave_out() -> None:
    rules = {
        **charters_minimum(),
        "environments": [{"name": "e"}, {"name": "f", "pin": "f==1"}, {"name": "g"}],
    }
    charter = charters.found(IDENTITY, rules, NOW_MS, {"e": "e==2", "f": "f==2"})
    assert [spec.pin for spec in charter.environments] == ["e==2", "f==1", ""]


@pytest.mark.parametrize("pin", ["e", "e==", "==1", "e==1\n", "sha256:" + "A" * 64, "e == 1"])
def test_what_pins_nothing_is_refused(pin: str) -> None:
    with pytest.raises(CharterError, match="pin"):
        charters.found(IDENTITY, {**charters_minimum(), "environments": [{"name": "e", "pin": pin}]}, NOW_MS)


def test_recipes_ascend() -> None:
    recipe = {"max_params": 5, "learning_rate": 1e-3, "warmup_steps": 0, "objective": "topr"}
    with pytest.raises(CharterError, match="max_params of the recipes must ascend"):
        charters.found(IDENTITY, {**charters_minimum(), "recipes": [recipe, recipe]}, NOW_MS)

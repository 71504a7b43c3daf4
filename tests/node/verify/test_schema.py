from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from node.share.heard import Candidate
from node.verify.schema import Schema
from protocol.codec import digest, encode
from protocol.constants import MAX_BLOB_BYTES
from protocol.errors import LimitError, RemoteProtocolError
from protocol.messages import Announcement, BlobRef, Rollout, RolloutGroup, Sampling
from protocol.rollouts import TEXT_BYTES_PER_TOKEN, max_body_bytes
from tests.node.verify.world import (
    EPOCH_MS,
    World,
    candidate,
    fingerprint,
    served,
)
from tests.rollouts import changed

replace = msgspec.structs.replace


def reason(world: World, item: Candidate) -> str:
    try:
        Schema(world.charter).open(item)
    except RemoteProtocolError as error:
        return error.reason
    return ""


def with_rollout(group: RolloutGroup, **changes: Any) -> RolloutGroup:
    return replace(group, rollouts=(changed(group.rollouts[0], **changes), *group.rollouts[1:]))


def floats(rollout: Rollout, **at: float) -> bytes:
    values = np.frombuffer(rollout.answer.logprobs, dtype="<f4").copy()
    values[0] = at["first"]
    return values.tobytes()


def test_an_honest_group_is_read_as_it_was_written(world, alice):
    group = world.group(alice, version=3)
    item = Schema(world.charter).open(candidate(group, arrived_at=7))
    assert (item.group, item.sender, item.arrived_at) == (group, alice, 7)
    for rollout, arrays in zip(group.rollouts, item.tokens, strict=True):
        assert arrays.token_ids_T.tobytes() == rollout.answer.token_ids
        assert arrays.logprobs_T.tobytes() == rollout.answer.logprobs
        assert set(arrays.versions_T.tolist()) == {3}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"body": b"\xc0"}, "size"),
        ({"announcement": {"policy_version": 9}}, "announcement_mismatch"),
        ({"announcement": {"commitment": b"other"}}, "announcement_mismatch"),
        ({"announcement": {"oldest_version": 1}}, "version_order"),
        ({"announcement": {"rewards": (1.0,) * 8}}, "announcement_mismatch"),
        ({"announcement": {"rewards": (1.0,) * 7}}, "group_size"),
        ({"announcement": {"rewards": (float("nan"),) * 8}}, "not_finite"),
        ({"announcement": {"completions": fingerprint("other")}}, "completions_digest"),
    ],
)
def test_body_and_announcement_must_agree(world, alice, changes, expected):
    honest = candidate(world.group(alice))
    announcement = replace(honest.heard.announcement, **changes.get("announcement", {}))
    item = served(alice, announcement, changes.get("body", honest.body), EPOCH_MS)
    assert reason(world, item) == expected


def test_the_digest_is_compared_before_anything_is_parsed(world, alice):
    honest = candidate(world.group(alice))
    other = b"\xc1" * len(honest.body)
    assert reason(world, served(alice, honest.heard.announcement, other, EPOCH_MS)) == "body_digest"


def test_garbage_under_the_right_digest_does_not_decode(world, alice):
    honest = candidate(world.group(alice)).heard.announcement
    for body in (b"\xc1", b"\x80", b"\x91" * 40, encode(honest)):
        lie = replace(honest, body=BlobRef(digest=digest(body), size=len(body)))
        assert reason(world, served(alice, lie, body, EPOCH_MS)) in {"decode", "depth"}


def test_nobody_speaks_for_another(world, alice, bob):
    group = world.group(alice)
    assert reason(world, candidate(group, sender=bob)) == "author"
    assert reason(world, candidate(replace(group, author=bob), sender=alice)) == "author"


def test_a_follower_speaks_for_itself_with_its_owners_policy(world, alice, bob):
    group = replace(world.group(alice), author=bob)
    assert reason(world, candidate(group)) == ""


def test_unknown_tokenizer(world, alice):
    group = world.group(alice)
    strange = replace(group, lineage=replace(group.lineage, tokenizer=fingerprint("strange")))
    assert reason(world, candidate(strange)) == "unknown_tokenizer"


def test_relations_that_types_cannot_express(world, alice):
    group = world.group(alice, version=4)
    first = group.rollouts[0]
    newer = np.full(len(first.answer.versions) // 4, 5, dtype="<u4").tobytes()
    cases = {
        "array_length": {"token_ids": first.answer.token_ids + b"\0"},
        "empty": {"token_ids": b"", "logprobs": b"", "versions": b""},
        "positive_logprob": {"logprobs": floats(first, first=0.01)},
        "not_finite": {"logprobs": floats(first, first=float("nan"))},
        "version_order": {"versions": newer},
        "text_too_long": {"text": "é" * (TEXT_BYTES_PER_TOKEN * len(first.answer.token_ids) // 8 + 1)},
        "too_long": dict.fromkeys(("token_ids", "logprobs", "versions"), b"\x00" * 4 * 6),
    }
    for expected, changes in cases.items():
        assert reason(world, candidate(with_rollout(group, **changes))) == expected
    for expected, changes in (
        ("array_length", {"logprobs": first.answer.logprobs + b"\0" * 4}),
        ("array_length", {"versions": first.answer.versions[4:]}),
        ("not_finite", {"logprobs": floats(first, first=-np.inf)}),
        ("", {"logprobs": floats(first, first=5e-7)}),
    ):
        assert reason(world, candidate(with_rollout(group, **changes))) == expected


def test_group_size_and_sampling_are_the_charters(world, alice):
    group = world.group(alice)
    assert reason(world, candidate(replace(group, rollouts=group.rollouts[:-1]))) == "group_size"
    for other in (
        Sampling(max_new_tokens=6),
        Sampling(max_new_tokens=4),
        Sampling(max_new_tokens=5, temperature=0.5),
        Sampling(max_new_tokens=5, temperature=1e-300),
        Sampling(max_new_tokens=5, top_p=0.9),
    ):
        assert reason(world, candidate(replace(group, sampling=other))) == "sampling"
    cooler = World(changes={"temperature": 0.5})
    assert reason(cooler, candidate(cooler.group(alice))) == ""


def test_a_huge_text_of_few_tokens_is_refused(world, alice):
    group = world.group(alice)
    assert reason(world, candidate(with_rollout(group, text="1" * 200_000))) == "text_too_long"


def test_no_larger_body_is_fetched_than_the_charters_groups_can_need(world, alice):
    """8 rollouts of 5 tokens: 8 (5 (12 + 128) + 256) + 4 KiB + a question of 256 Ki bytes."""
    assert max_body_bytes(world.charter) == 8 * (5 * 140 + 256) + 4096 + 256 * 1024 == 273_888
    schema = Schema(world.charter)
    announcement = candidate(world.group(alice)).heard.announcement
    schema.check_announcement(sized(announcement, 273_888))
    for size in (273_889, MAX_BLOB_BYTES):
        with pytest.raises(LimitError, match=f"a body of {size} bytes") as caught:
            schema.check_announcement(sized(announcement, size))
        assert caught.value.reason == "body_too_large"
    huge = World(group_size=64, max_new_tokens=32_768)
    assert max_body_bytes(huge.charter) == MAX_BLOB_BYTES


def sized(announcement: Announcement, size: int) -> Announcement:
    return replace(announcement, body=BlobRef(digest=announcement.body.digest, size=size))


def test_the_largest_group_the_charter_allows_fits(world, alice):
    text = "\N{PILE OF POO}" * (5 * 128 // 4)
    group = world.group(alice)
    full = np.zeros(5, dtype="<u4").tobytes()
    largest = tuple(
        changed(each, text=text, token_ids=full, logprobs=full, versions=full, seed=2**63 - 1)
        for each in group.rollouts
    )
    names = {"environment": "e" * 64, "engine": "e" * 64, "dtype": "d" * 64, "question": "q" * 256 * 1024}
    body = encode(replace(group, rollouts=largest, **names))
    assert 0.97 * max_body_bytes(world.charter) < len(body) <= max_body_bytes(world.charter)

"""Receipts: one root per answer of a slot, one path per rollout, nothing that passes for another."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from protocol.codec import encode, framed
from protocol.constants import MAX_GROUP_ROLLOUTS
from protocol.errors import DecodeError
from protocol.messages import FinishReason, Rollout, RolloutReply
from protocol.receipts import prove, proves, slot_digest
from protocol.rollouts import parse_tokens, single_turn, version_span
from tests.protocol.samples import ANNOUNCEMENT, CONVERSATION, GROUP, IDENTITY, LINEAGE, MEMBER, PROMPT

replace = msgspec.structs.replace
AUTHOR = IDENTITY.peer_id


def rollouts(count: int) -> tuple[Rollout, ...]:
    return tuple(replace(GROUP.rollouts[0], seed=seed) for seed in range(count))


def sha(purpose: str, *fields: bytes) -> bytes:
    return hashlib.sha256(framed(purpose, *fields)).digest()


def test_three_rollouts_by_hand() -> None:
    three = rollouts(3)
    one, two, last = (sha("rollout", encode(each)) for each in three)
    root = sha("node", sha("node", one, two), last)
    fields = (AUTHOR.encode(), encode(LINEAGE), encode(PROMPT), (3).to_bytes(8, "big"), root)
    assert slot_digest(AUTHOR, LINEAGE, PROMPT, three) == sha("slot", *fields).hex()
    assert prove(three, 1) == one + last
    assert prove(three, 2) == sha("node", one, two)
    assert prove(rollouts(1), 0) == b""


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 13, MAX_GROUP_ROLLOUTS])
def test_every_rollout_of_every_size_has_one_proof(count: int) -> None:
    group = rollouts(count)
    receipt = replace(
        ANNOUNCEMENT, completions=slot_digest(AUTHOR, LINEAGE, PROMPT, group), rewards=(1.0,) * count
    )
    for index, rollout in enumerate(group):
        path = prove(group, index)
        encode(RolloutReply(rollout, path))  # its length is within bounds
        assert proves(AUTHOR, receipt, index, rollout, path)
        assert not proves(AUTHOR, receipt, index, replace(rollout, reward=0.5), path)
        assert not proves(AUTHOR, receipt, index, rollout, path + bytes(32))
        assert not proves(AUTHOR, receipt, (index + 1) % count, rollout, path) or count == 1
        assert path == b"" or not proves(AUTHOR, receipt, index, rollout, path[:-1] + bytes([path[-1] ^ 1]))
    assert not proves(AUTHOR, receipt, count, group[0], prove(group, 0))
    assert not proves(AUTHOR, receipt, -1, group[-1], prove(group, count - 1))


def test_a_receipt_is_bound_to_author_lineage_and_prompt() -> None:
    path, rollout = prove(GROUP.rollouts, 0), GROUP.rollouts[0]
    assert proves(AUTHOR, ANNOUNCEMENT, 0, rollout, path)
    assert not proves(MEMBER.peer_id, ANNOUNCEMENT, 0, rollout, path)
    for other in (
        {"lineage": replace(LINEAGE, base_model="b" * 64)},
        {"prompt": replace(PROMPT, index=1235)},
        {"prompt": replace(PROMPT, slot=4)},
        {"prompt": replace(PROMPT, window=13)},
        {"rewards": (1.0, 0.0, 0.0)},
    ):
        assert not proves(AUTHOR, replace(ANNOUNCEMENT, **other), 0, rollout, path)


@pytest.mark.parametrize(
    "change",
    [{"text": "x"}, {"reward": 0.5}, {"seed": 1}, {"segments": CONVERSATION.segments}],
    ids=lambda change: next(iter(change)),
)
def test_a_receipt_sees_all_of_every_rollout(change: dict[str, object]) -> None:
    first, second = GROUP.rollouts
    before = slot_digest(AUTHOR, LINEAGE, PROMPT, (first, second))
    assert slot_digest(AUTHOR, LINEAGE, PROMPT, (first, replace(second, **change))) != before
    assert slot_digest(AUTHOR, LINEAGE, PROMPT, (second, first)) != before


# --- rollouts and their arrays ------------------------------------------------------------------------------


def test_arrays_are_views_on_the_bytes() -> None:
    rollout = GROUP.rollouts[0]
    arrays = parse_tokens(rollout)
    assert arrays.token_ids_T.tolist() == [12, 9, 44, 1]
    assert arrays.logprobs_T.tolist() == [-0.25, -0.5, -0.75, -1.0]
    assert arrays.versions_T.tolist() == [7] * 4
    assert not any(
        each.flags.writeable for each in (arrays.token_ids_T, arrays.logprobs_T, arrays.versions_T)
    )


def test_other_segments_than_one_of_the_policy_are_refused() -> None:
    policy, tool, _ = CONVERSATION.segments
    for segments in (CONVERSATION.segments, (tool,), (policy, policy), (tool, policy)):
        with pytest.raises(DecodeError) as refused:
            parse_tokens(replace(CONVERSATION, segments=segments))
        assert refused.value.reason == "segments"


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions", "reason"),
    [
        (b"", b"", b"", "empty"),
        (bytes(5), bytes(5), bytes(5), "array_length"),
        (bytes(4), bytes(8), bytes(4), "array_length"),
        (bytes(4), bytes(4), bytes(8), "array_length"),
    ],
)
def test_arrays_of_wrong_length(ids: bytes, logprobs: bytes, versions: bytes, reason: str) -> None:
    broken = single_turn(
        "", token_ids=ids, logprobs=logprobs, versions=versions, finish=FinishReason.STOP, seed=0
    )
    with pytest.raises(DecodeError) as refused:
        parse_tokens(broken)
    assert refused.value.reason == reason


def test_versions_of_a_group() -> None:
    def drawn(*versions: int) -> Rollout:
        data = b"".join(version.to_bytes(4, "little") for version in versions)
        zeros = bytes(len(data))
        return single_turn(
            "", token_ids=zeros, logprobs=zeros, versions=data, finish=FinishReason.STOP, seed=0
        )

    span = version_span([parse_tokens(drawn(2, 4)), parse_tokens(drawn(5, 3, 2**32 - 1))])
    assert (span.newest, span.oldest) == (2**32 - 1, 2)
    assert span.mean == (2 + 4 + 5 + 3 + 2**32 - 1) / 5

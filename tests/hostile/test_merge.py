"""Hostile partners and authors in a merge: what they answer, what they sign, how often they ask. Each is
refused by rule or deadline and counted with its reason, and the honest ones merge the same bytes."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np
import pytest

from node.clock import run_virtual
from node.transport.base import Stream
from node.weights.merge.contributions import sign_removal
from protocol.codec import decode, encode
from protocol.constants import MAX_CONTRIBUTIONS
from protocol.delta import encode as encode_delta
from protocol.delta import max_delta_bytes, read_header, weights_digest
from protocol.errors import TransportError
from protocol.identity import Identity
from protocol.links import MAX_SIGNED_LINK_BYTES, decode_link, sign_link
from protocol.merge_messages import MergeRemoval, MergeReply, MergeRequest, SignedRemoval
from protocol.messages import ChunkedBlob, Lineage, LinkKind, SignedLink, WeightsLink
from protocol.topics import MERGE_PROTOCOL
from tests.node.weights.lineage import SWARM, WINDOW_MS, identity_of, lineage_of
from tests.node.weights.merging import EVERY, RULE, SETTLE_S, Swarm, Trainer

pytestmark = pytest.mark.usefixtures("compiled_merge")


Handler = Callable[["Trio", Stream], Awaitable[None]]


class Trio(Swarm):
    """Trainers 0 and 1 are honest, trainer 2 does not merge and answers what a test tells it to."""

    def __init__(self, folder, count: int = 3, **options) -> None:
        super().__init__(folder, count, **({"idle": (2,)} | options))
        self.honest, self.hostile = [each for each in self.all if each.number != 2], self.all[2]

    def answer(self, handler: Handler) -> None:
        async def serve(stream: Stream) -> None:
            await handler(self, stream)

        self.hostile.transport.serve(MERGE_PROTOCOL, serve, deadline_s=1000.0)

    def blamed(self) -> dict[str, int]:
        """What the honest ones hold against the hostile one; nobody else must be blamed."""
        counted = sum((each.failures for each in self.honest), start=type(self.all[0].failures)())
        assert {peer_id for peer_id, _ in counted} <= {self.hostile.peer_id}
        return {reason: count for (_, reason), count in counted.items()}

    def require_merged(self, count: int, contributions: int = 2) -> None:
        """The honest ones made so many merges, of so many contributions, each in time and the same."""
        for each in self.honest:
            assert [len(merge.used) for merge in each.merges] == [contributions] * count, each.merger.status
            assert [at_s % EVERY < 3 * SETTLE_S for at_s in each.at_s] == [True] * count
        assert len({tuple(merge.digest for merge in each.merges) for each in self.honest}) == 1


def link_of(author: Identity, swarm: Trio, **fields: object) -> SignedLink:
    """Of a blob that nobody has."""
    link = WeightsLink(
        lineage=Lineage(author.peer_id, lineage_of(0).base_model, lineage_of(0).tokenizer),
        policy_version=3,
        kind=LinkKind.ANCHOR,
        base_version=3,
        base=swarm.digest,
        result="e" * 64,
        blob=ChunkedBlob("c" * 64, 3000, 16 * 1024),
        created_at=swarm.hostile.clock.now_ms(),
    )
    return sign_link(author, SWARM, msgspec.structs.replace(link, **fields))


async def reply(
    swarm: Trio,
    stream: Stream,
    signed: Sequence[SignedLink] = (),
    withdrawn: Sequence[SignedRemoval] = (),
    **fields: object,
) -> None:
    """`fields` of the answer that are not what they should be."""
    decode(await stream.receive(), MergeRequest, max_bytes=1024)
    answer = MergeReply(swarm.digest, RULE.digest(), "d" * 64, len(signed), len(withdrawn))
    await stream.send(encode(msgspec.structs.replace(answer, **fields)))
    for each in (*signed, *withdrawn):
        await stream.send(encode(each))


ONE = {"links": 1}
"""Says that one link follows."""


# --- answers ------------------------------------------------------------------------------------------------


async def garbage(swarm: Trio, stream: Stream) -> None:
    await stream.receive()
    await stream.send(b"\xff" * 32)


async def long_reply(swarm: Trio, stream: Stream) -> None:
    await stream.receive()
    await stream.send(bytes(1 << 20))


async def too_many(swarm: Trio, stream: Stream) -> None:
    await stream.receive()
    whole = encode(MergeReply(swarm.digest, RULE.digest(), "d" * 64, MAX_CONTRIBUTIONS, 0))
    await stream.send(whole.replace(b"links\x40", b"links\x41"))


async def too_many_removals(swarm: Trio, stream: Stream) -> None:
    await stream.receive()
    whole = encode(MergeReply(swarm.digest, RULE.digest(), "d" * 64, 0, MAX_CONTRIBUTIONS))
    await stream.send(whole.replace(b"removals\x40", b"removals\xcd\xff\xff"))


async def long_link(swarm: Trio, stream: Stream) -> None:
    await reply(swarm, stream, **ONE)
    await stream.send(bytes(MAX_SIGNED_LINK_BYTES + 1))


async def no_link(swarm: Trio, stream: Stream) -> None:
    await reply(swarm, stream, **ONE)
    await stream.send(encode(MergeReply(swarm.digest, RULE.digest(), "d" * 64, 0, 0)))


async def a_link_of_junk(swarm: Trio, stream: Stream) -> None:
    await reply(swarm, stream, [SignedLink(b"junk", bytes(64))])


async def a_removal_of_junk(swarm: Trio, stream: Stream) -> None:
    await reply(swarm, stream, [], [SignedRemoval(b"junk", bytes(64))])


async def unsigned(swarm: Trio, stream: Stream) -> None:
    await reply(swarm, stream, [SignedLink(link_of(identity_of(2), swarm).link, bytes(64))])


async def forged(swarm: Trio, stream: Stream) -> None:
    """In the name of an honest one, with its signature under something else."""
    own = swarm.honest[0].merger.exchange.set.links()[0]
    newer = msgspec.structs.replace(decode_link(own), created_at=decode_link(own).created_at + 1)
    await reply(swarm, stream, [SignedLink(encode(newer), own.signature)])


async def of_another_swarm(swarm: Trio, stream: Stream) -> None:
    link = decode_link(link_of(identity_of(2), swarm))
    await reply(swarm, stream, [sign_link(identity_of(2), "6" * 64, link)])


async def a_delta(swarm: Trio, stream: Stream) -> None:
    await reply(swarm, stream, [link_of(identity_of(2), swarm, kind=LinkKind.DELTA, base_version=2)])


async def on_another_base(swarm: Trio, stream: Stream) -> None:
    await reply(swarm, stream, [link_of(identity_of(2), swarm, base="d" * 64)])


async def on_another_model(swarm: Trio, stream: Stream) -> None:
    lineage = Lineage(identity_of(2).peer_id, "d" * 64, lineage_of(0).tokenizer)
    await reply(swarm, stream, [link_of(identity_of(2), swarm, lineage=lineage)])


async def from_the_future(swarm: Trio, stream: Stream) -> None:
    later = swarm.hostile.clock.now_ms() + 2 * WINDOW_MS
    await reply(swarm, stream, [link_of(identity_of(2), swarm, created_at=later)])


async def larger_than_any_delta(swarm: Trio, stream: Stream) -> None:
    size = max_delta_bytes(swarm.base.base) + 1
    await reply(swarm, stream, [link_of(identity_of(2), swarm, blob=ChunkedBlob("c" * 64, size, 16 * 1024))])


async def removing_anothers(swarm: Trio, stream: Stream) -> None:
    victim = swarm.honest[0]
    (tag,) = {each.tag for each in victim.merger.exchange.set.visible() if each.author == victim.peer_id}
    removal = MergeRemoval(victim.peer_id, swarm.digest, (tag,), 2**53)
    await reply(swarm, stream, [], [SignedRemoval(encode(removal), identity_of(2).sign(encode(removal)))])


async def with_another_rule(swarm: Trio, stream: Stream) -> None:
    await reply(swarm, stream, [link_of(identity_of(2), swarm)], rule="d" * 64)


async def with_another_base(swarm: Trio, stream: Stream) -> None:
    await reply(swarm, stream, [link_of(identity_of(2), swarm)], base="d" * 64)


async def a_byte_every_ten_seconds(swarm: Trio, stream: Stream) -> None:
    await reply(swarm, stream, **ONE)
    while True:
        await stream.channel.write(b"\0")
        await asyncio.sleep(10.0)


async def silent(swarm: Trio, stream: Stream) -> None:
    await asyncio.sleep(1000.0)


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (garbage, "decode"),
        (long_reply, "frame_size"),
        (too_many, "decode"),
        (too_many_removals, "decode"),
        (long_link, "frame_size"),
        (no_link, "decode"),
        (a_link_of_junk, "decode"),
        (a_removal_of_junk, "decode"),
        (unsigned, "link_signature"),
        (forged, "link_signature"),
        (of_another_swarm, "link_signature"),
        (a_delta, "merge_kind"),
        (on_another_base, "merge_base"),
        (on_another_model, "merge_base"),
        (from_the_future, "merge_future"),
        (larger_than_any_delta, "merge_size"),
        (removing_anothers, "merge_signature"),
        (with_another_rule, "merge_rule"),
        (with_another_base, "merge_base"),
        (a_byte_every_ten_seconds, None),
        (silent, None),
    ],
)
def test_answers_that_are_wrong_are_counted_and_the_others_merge(tmp_path, handler, reason):
    """Once a round, but for what may become right; who is only slow is not even waited for."""

    async def main() -> None:
        async with Trio(tmp_path) as swarm:
            for each in swarm.honest:
                each.late_s = 0.5
            swarm.answer(handler)
            await swarm.until_round(2.9)
            blamed = swarm.blamed()
            if reason is None:
                assert not blamed
            elif reason == "merge_future":
                assert 4 <= blamed.pop(reason) <= 2 * 2 * (SETTLE_S + 3)
                assert not blamed
            else:
                assert blamed == {reason: 4}
            swarm.require_merged(2)
            told = [text for each in swarm.honest for text in each.notices]
            assert len(told) == (2 if handler in (with_another_rule, with_another_base) else 0)

    run_virtual(main())


def test_a_partner_that_is_too_slow_ends_by_deadline_while_others_keep_the_round_open(tmp_path):
    """A contribution that takes twenty seconds keeps it open, so that the deadline of fifteen is reached."""

    async def main() -> None:
        async with Trio(tmp_path) as swarm:
            swarm.answer(a_byte_every_ten_seconds)
            swarm.honest[0].late_s = swarm.honest[1].late_s = 20.0
            await swarm.until_round(1.9)
            assert swarm.blamed() == {"deadline": 2}
            assert [len(each.merges) for each in swarm.honest] == [1, 1]

    run_virtual(main())


def test_what_was_dated_too_early_is_taken_once_its_time_has_come(tmp_path):
    async def main() -> None:
        async with Trio(tmp_path, idle=()) as swarm:
            swarm.hostile.date_ms = swarm.date(EVERY + 3)
            await swarm.until_round(1.9)
            assert swarm.blamed().keys() == {"merge_future"}
            swarm.require_merged(1, 3)

    run_virtual(main())


# --- what an author signs -----------------------------------------------------------------------------------


def other_weights(hostile: Trainer) -> dict[str, np.ndarray]:
    return {name: array ^ np.uint16(1) for name, array in hostile.base.items()}


def not_finite(hostile: Trainer) -> tuple[bytes, str]:
    new = other_weights(hostile)
    new["w"][3, 3] = 0x7F80
    return encode_delta(hostile.base, new), weights_digest(new)


def another_result(hostile: Trainer) -> tuple[bytes, str]:
    return encode_delta(hostile.base, other_weights(hostile), new_digest="e" * 64), "e" * 64


def another_delta(hostile: Trainer) -> tuple[bytes, str]:
    return encode_delta(hostile.base, other_weights(hostile)), "e" * 64


def other_shapes(hostile: Trainer) -> tuple[bytes, str]:
    old = {"w": np.zeros((640, 3), np.uint16)}
    new = {"w": old["w"] + np.uint16(7)}
    return encode_delta(old, new, base_digest=hostile.base_digest, new_digest="e" * 64), "e" * 64


def cut_short(hostile: Trainer) -> tuple[bytes, str]:
    data = encode_delta(hostile.base, other_weights(hostile))
    return data[:-1], read_header(data).result


def more_than_it_declares(hostile: Trainer) -> tuple[bytes, str]:
    data = encode_delta(hostile.base, other_weights(hostile))
    return data + b"\0", read_header(data).result


def no_delta(hostile: Trainer) -> tuple[bytes, str]:
    return b"anything", "e" * 64


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [not_finite, another_result, another_delta, other_shapes, cut_short, more_than_it_declares, no_delta],
)
def test_blobs_that_are_not_what_their_links_say_are_left_out_by_everybody(tmp_path, make):
    """Counted once against the author, though only one of the honest ones has it as a partner."""

    async def main() -> None:
        async with Trio(tmp_path, 4, idle=()) as swarm:
            hostile = swarm.hostile
            for each in swarm.honest[1:]:
                each.members = [other.peer_id for other in swarm.honest if other is not each]
            hostile.members = [swarm.honest[0].peer_id]
            data, result = make(hostile)
            bad = hostile.signed(data, result, created_at=swarm.date(EVERY))

            async def contribute() -> SignedLink:
                return bad

            hostile.contribute = contribute
            await swarm.until_round(2.9)
            swarm.require_merged(2, 3)
            assert sum(swarm.blamed().values()) == 3
            assert all(not each.notices for each in swarm.honest)

    run_virtual(main())


@pytest.mark.slow
def test_an_author_that_never_serves_its_blob_stops_one_merge_in_many(tmp_path):
    async def main() -> None:
        async with Trio(tmp_path) as swarm:
            contributed = link_of(identity_of(2), swarm)

            async def serve(swarm: Trio, stream: Stream) -> None:
                await reply(swarm, stream, [contributed])

            swarm.answer(serve)
            for number in range(1, 6):  # another one each round
                contributed = link_of(identity_of(2), swarm, created_at=swarm.date(number * EVERY))
                await swarm.until_round(number + 0.9)
            assert [len(each.merges) for each in swarm.honest] == [4, 4]
            assert len({tuple(merge.digest for merge in each.merges) for each in swarm.honest}) == 1
            assert not swarm.blamed()

    run_virtual(main())


# --- sets that never rest -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_author_with_a_new_version_at_every_request_is_left_out_and_postpones_nothing(tmp_path):
    async def main() -> None:
        async with Trio(tmp_path) as swarm:
            version = 0

            async def serve(swarm: Trio, stream: Stream) -> None:
                nonlocal version
                version += 1
                link = link_of(identity_of(2), swarm, policy_version=version, base_version=version)
                await reply(swarm, stream, [link], held=f"{version:064x}")

            swarm.answer(serve)
            await swarm.until_round(3.9)
            swarm.require_merged(3)
            assert swarm.blamed() == {"merge_restless": 6}  # once a round

    run_virtual(main())


@pytest.mark.slow
def test_an_author_that_withdraws_at_every_request_postpones_nothing(tmp_path):
    async def main() -> None:
        async with Trio(tmp_path) as swarm:
            made = 0

            async def serve(swarm: Trio, stream: Stream) -> None:
                nonlocal made
                made += 1
                removal = MergeRemoval(swarm.hostile.peer_id, swarm.digest, (f"{made:064x}",), made)
                signed = sign_removal(identity_of(2), SWARM, removal)
                await reply(swarm, stream, [], [signed], held=f"{made:064x}")

            swarm.answer(serve)
            await swarm.until_round(2.9)
            swarm.require_merged(2)
            assert swarm.blamed() == {"merge_restless": 4}

    run_virtual(main())


@pytest.mark.slow
def test_new_authors_at_every_request_postpone_the_merge_to_the_middle_of_the_round_at_most(tmp_path):
    """Each has the blob of an honest contribution under its own name, so that it can be merged."""

    async def main() -> None:
        async with Trio(tmp_path) as swarm:
            invented = 100

            async def serve(swarm: Trio, stream: Stream) -> None:
                nonlocal invented
                visible = swarm.honest[0].merger.exchange.set.visible()
                own = next(each.link for each in visible if each.author == swarm.honest[0].peer_id)
                invented += 1
                link = link_of(identity_of(invented), swarm, blob=own.blob, result=own.result)
                await reply(swarm, stream, [link], held=f"{invented:064x}")

            swarm.answer(serve)
            for each in swarm.honest:
                each.late_s = 0.1
            await swarm.until_round(1.45)
            assert [each.merges for each in swarm.honest] == [[], []]
            await swarm.until_round(1.9)
            for each in swarm.honest:
                assert len(each.merges) == 1
                assert EVERY / 2 < each.at_s[0] - EVERY < EVERY / 2 + 10

    run_virtual(main())


@pytest.mark.slow
@pytest.mark.parametrize("admitted", [False, True])
def test_a_thousand_authors_take_bounded_room(tmp_path, admitted):
    """A partner answers with 64 links of invented authors, other ones each time."""

    async def main() -> None:
        async with Trio(tmp_path) as swarm:
            made = [link_of(identity_of(1000 + number), swarm) for number in range(1024)]
            known = {each.peer_id for each in swarm.all}
            calls = 0

            async def serve(swarm: Trio, stream: Stream) -> None:
                nonlocal calls
                first = (calls * MAX_CONTRIBUTIONS) % len(made)
                calls += 1
                links = made[first : first + MAX_CONTRIBUTIONS]
                await reply(swarm, stream, links, held=f"{calls:064x}")

            swarm.answer(serve)
            if not admitted:
                for each in swarm.honest:
                    each.peers.known = known
            tracemalloc.start()
            await swarm.until_round(1.95)
            grown, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert grown < 8 << 20
            assert calls > 10
            if admitted:
                for each in swarm.honest:
                    assert len(each.merger.exchange.set.links()) == MAX_CONTRIBUTIONS
                    assert not each.merges
                    assert "did not come" in each.merger.status.why
                    assert len(each.notices) == 1
            else:
                swarm.require_merged(1)
            assert swarm.blamed().keys() <= {"merge_rate"}

    run_virtual(main())


@pytest.mark.slow
def test_more_than_a_peer_may_send_is_refused(tmp_path):
    async def main() -> None:
        async with Trio(tmp_path) as swarm:
            swarm.hostile.own = None
            links = [link_of(identity_of(2), swarm)] * MAX_CONTRIBUTIONS
            calls = 0

            async def serve(swarm: Trio, stream: Stream) -> None:
                nonlocal calls
                calls += 1
                await reply(swarm, stream, links, held=f"{calls:064x}")

            swarm.answer(serve)
            honest = swarm.honest[0].merger.exchange
            await swarm.honest[0].transport.connect(f"/memory/p2p/{swarm.hostile.peer_id}")
            for _ in range(200):
                await honest.ask(swarm.hostile.peer_id)
            elapsed_s = asyncio.get_running_loop().time()
            assert calls == 200
            refused = swarm.blamed()["merge_rate"]
            assert 200 - refused <= 16 + 64 * elapsed_s / 64 + 1
            assert refused > 50

    run_virtual(main())


# --- requests -----------------------------------------------------------------------------------------------


def test_requests_that_are_wrong_are_counted(tmp_path):
    async def main() -> None:
        async with Trio(tmp_path) as swarm:
            victim = swarm.honest[0]
            answer = encode(MergeReply(swarm.digest, RULE.digest(), "d" * 64, 0, 0))
            for data in (b"\xff" * 100, b"\x80", bytes(513), answer):
                stream = await swarm.hostile.transport.open_stream(victim.peer_id, MERGE_PROTOCOL)
                await stream.send(data)
                with pytest.raises(TransportError):
                    await stream.receive()
                await stream.close()
            counted = victim.transport.refusals.counters()
            assert counted[swarm.hostile.peer_id, "decode"] == 3
            assert counted[swarm.hostile.peer_id, "frame_size"] == 1

    run_virtual(main())


@pytest.mark.slow
def test_a_flood_of_requests_leaves_room_for_others(tmp_path):
    """Without a pause, over eight streams at once, from before the round until after it."""

    async def main() -> None:
        async with Trio(tmp_path) as swarm:
            victim = swarm.honest[0]
            links = 0

            async def ask() -> None:
                nonlocal links
                request = MergeRequest(
                    lineage_of(0).base_model, swarm.digest, RULE.digest(), "1" * 64, "2" * 64
                )
                stream = await swarm.hostile.transport.open_stream(victim.peer_id, MERGE_PROTOCOL)
                try:
                    await stream.send(encode(request))
                    answer = decode(await stream.receive(), MergeReply, max_bytes=1024)
                    for _ in range(answer.links):
                        await stream.receive()
                        links += 1
                finally:
                    await stream.close()

            async def flood() -> None:
                while True:
                    try:
                        await ask()
                    except TransportError:
                        await asyncio.sleep(0.02)

            victim.merger.exchange.contribute(await victim.contribute())
            flooding = [asyncio.create_task(flood()) for _ in range(16)]
            await swarm.until_round(1.9)
            for task in flooding:
                task.cancel()
            await asyncio.gather(*flooding, return_exceptions=True)
            swarm.require_merged(1)
            assert links < 1024 + 64 * 1.9 * EVERY
            counted = victim.transport.refusals.counters()
            assert counted[swarm.hostile.peer_id, "merge_rate"] > 100
            assert {peer_id for peer_id, _ in counted} == {swarm.hostile.peer_id}

    run_virtual(main())

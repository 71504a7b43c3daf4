"""Merging between nodes: the same bytes whoever is heard first, and rounds that make none and say why."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tracemalloc
from collections import namedtuple

import numpy as np
import pytest

from node.clock import run_virtual
from node.weights.merge.scratch import MergeScratch
from protocol.delta import encode, weights_digest
from protocol.links import decode_link
from protocol.messages import SignedLink, WeightsLink
from tests.node.weights.lineage import Weights
from tests.node.weights.merging import (
    EVERY,
    SETTINGS,
    SETTLE_S,
    SHAPES,
    Swarm,
    Trainer,
    expected_mean,
)

pytestmark = pytest.mark.usefixtures("compiled_merge")


def digests(trainer: Trainer) -> list[str]:
    return [merge.digest for merge in trainer.merges]


# --- the same bytes -----------------------------------------------------------------------------------------

ORDERS = list(itertools.permutations((0.0, 1.5, 3.0)))


@pytest.mark.slow
@pytest.mark.parametrize("late_s", ORDERS)
@pytest.mark.parametrize("connected", ["all", "in a line"])
def test_all_make_the_same_bytes_whoever_they_hear_first(tmp_path, late_s, connected):
    """Dated 8, 3 and 0 windows before the newest: weights 1/3, 1/2 and 1."""

    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            for each, age, late in zip(swarm.all, (8, 3, 0), late_s, strict=True):
                each.date_ms, each.late_s = swarm.date(EVERY - age), late
            if connected == "in a line":
                middle = swarm.all[1]
                swarm.all[0].members = swarm.all[2].members = [middle.peer_id]
            await swarm.until_round(1.9)
            own = [each.contributed[0] for each in swarm.all]
            expected = expected_mean(swarm.base.base, own, (8, 3, 0))
            for each in swarm.all:
                (merge,) = each.merges
                assert merge.bits.keys() == expected.keys()
                for name, array in merge.bits.items():
                    assert np.array_equal(array, expected[name])
                assert merge.digest == weights_digest(expected)
                assert {used.author: used.age_windows for used in merge.used} == {
                    other.peer_id: age for other, age in zip(swarm.all, (8, 3, 0), strict=True)
                }
                assert not merge.dropped
                assert not each.failures
                assert not each.notices
                assert each.merger.status.contributions == 3
                assert (each.merger.status.rounds, each.merger.status.merges) == (1, 1)
                assert not each.merger.status.why
                assert each.at_s[0] - EVERY < 3.0 + 2 * SETTLE_S

    run_virtual(main())


def test_tied_weights_stay_tied_from_the_blob_to_the_merge(tmp_path):
    async def main() -> None:
        def tie(base: Weights) -> None:
            base.state["tied"] = base.state["w"]
            base.base["tied"] = base.base["w"]

        async with Swarm(tmp_path, 2, change=tie) as swarm:
            await swarm.until_round(1.5)
            for each in swarm.all:
                (merge,) = each.merges
                assert merge.bits["tied"] is merge.bits["w"]
            assert digests(swarm.all[0]) == digests(swarm.all[1])

    run_virtual(main())


@pytest.mark.slow
def test_a_merge_is_taken_once_and_the_newest_replaces_one_that_was_not_taken(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path, 2, idle=(0,)) as swarm:
            first, second = swarm.all
            running = asyncio.create_task(first.merger.run())
            await swarm.until_round(1.5)
            await swarm.until_round(2.5)
            merge = first.merger.take()
            assert merge is not None
            assert [merge.digest] == digests(second)[1:]
            assert first.merger.take() is None
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    run_virtual(main())


@pytest.mark.slow
def test_rounds_go_on_and_the_newest_contribution_of_each_counts(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            await swarm.until_round(3.9)
            for number in range(3):
                own = [each.contributed[number] for each in swarm.all]
                expected = weights_digest(expected_mean(swarm.base.base, own, (0, 0, 0)))
                assert [digests(each)[number] for each in swarm.all] == [expected] * 3
            assert len(set(digests(swarm.all[0]))) == 3

    run_virtual(main())


# --- rounds -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_who_starts_in_the_middle_of_a_round_waits_for_the_next(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path, idle=(2,)) as swarm:
            await swarm.until_round(1.02)  # two seconds after it began
            late = swarm.all[2]
            late.begin()
            await swarm.until_round(1.9)
            assert late.merger.status.rounds == 0
            assert [len(each.merges) for each in swarm.all] == [1, 1, 0]
            await swarm.until_round(2.9)
            assert len({digests(each)[-1] for each in swarm.all}) == 1
            assert len(late.merges) == 1

    run_virtual(main())


def test_rounds_follow_a_clock_that_is_set(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path, 1) as swarm:
            (alone,) = swarm.all
            await swarm.until_round(0.5)
            alone.ahead_windows = 0.9 * EVERY  # into the middle of a round: the next one is waited for
            await swarm.until_round(1.05)
            assert alone.merger.status.rounds == 0
            await swarm.until_round(1.5)
            assert alone.merger.status.rounds == 1
            alone.ahead_windows = -100.0 * EVERY  # noticed within a minute, after that of the third round
            await swarm.until_round(4.5)
            assert alone.merger.status.rounds == 3

    run_virtual(main())


def test_who_has_nothing_to_contribute_merges_what_others_do(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            swarm.all[2].own = None
            await swarm.until_round(1.9)
            assert len({digests(each)[0] for each in swarm.all}) == 1
            assert len(swarm.all[2].merges[0].used) == 2

    run_virtual(main())


def test_alone_there_is_nothing_to_merge(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path, 1) as swarm:
            await swarm.until_round(3.9)
            (alone,) = swarm.all
            assert alone.merges == []
            assert alone.merger.status.why == "no other trainer of the base model is connected"
            assert alone.contributed == []
            assert alone.merger.status.rounds == 3
            assert not alone.notices

    run_virtual(main())


@pytest.mark.slow
def test_nothing_new_makes_no_merge(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            for each in swarm.all:
                each.date_ms = swarm.date(EVERY)  # the same links again
                each.drift = lambda each=each: each.contributed[0]
            await swarm.until_round(2.9)
            for each in swarm.all:
                assert len(each.merges) == 1
                assert each.merger.status.why == "nobody contributed anything new"
                each.date_ms += 1  # the same weights again
            await swarm.until_round(3.9)
            for each in swarm.all:
                assert len(each.merges) == 1
                assert each.merger.status.why == "it would be the weights of the last merge"

    run_virtual(main())


@pytest.mark.slow
def test_authors_that_are_not_admitted_do_not_count_here_and_do_elsewhere(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path, 4) as swarm:
            picky, other = swarm.all[0], swarm.all[3]
            picky.peers.distrusted = {other.peer_id}
            await swarm.until_round(1.9)
            assert [len(each.merges[0].used) for each in swarm.all] == [3, 4, 4, 4]
            assert other.peer_id not in {each.author for each in picky.merges[0].used}
            assert not picky.failures

    run_virtual(main())


@pytest.mark.slow
def test_trust_that_is_lost_counts_though_the_contribution_was_let_in(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            await swarm.until_round(1.9)
            picky = swarm.all[0]
            picky.peers.distrusted = {swarm.all[2].peer_id}
            await swarm.until_round(2.9)
            assert [len(each.merges[1].used) for each in swarm.all] == [2, 3, 3]

    run_virtual(main())


def test_sets_that_stay_different_are_sent_once_a_round(tmp_path, monkeypatch):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            picky = swarm.all[0]
            picky.peers.distrusted = {swarm.all[2].peer_id}
            await swarm.until_round(1.9)
            heard = []

            def counted(signed: SignedLink) -> WeightsLink:
                heard.append(signed)
                return decode_link(signed)

            monkeypatch.setattr("node.weights.merge.exchange.decode_link", counted)
            for each in swarm.all:
                each.own = None
            await swarm.until_round(2.9)
            # three links from each partner, and two from it to each of them, though all ask five times
            assert len(heard) == 2 * 3 + 2 * 2

    run_virtual(main())


def test_a_contribution_that_takes_too_long_is_told_and_the_others_are_merged(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            slow = swarm.all[2]
            slow.late_s = 100.0
            await swarm.until_round(1.9)
            assert [len(each.merges) for each in swarm.all] == [1, 1, 1]
            assert slow.notices == ["this node's contribution to the merge did not finish within 30 s"]

    run_virtual(main())


def test_what_it_waits_for_is_shown(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            first = swarm.all[0]
            first.late_s = 2.0
            await asyncio.sleep(EVERY + 1)
            assert first.gauge.status().waiting_for == "own contribution"
            await asyncio.sleep(2)
            assert first.gauge.status().waiting_for == "partners' sets"
            for each in swarm.all[1:]:
                swarm.network.limit(each.peer_id, 0.001, 1.0)
            await asyncio.sleep(SETTLE_S + 1)
            assert first.gauge.status().waiting_for == "contributions"
            await swarm.until_round(1.9)
            assert first.gauge.status().waiting_for == "the next round"

    run_virtual(main())


# --- rules --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_partners_with_another_rule_are_not_merged_with(tmp_path):
    async def main() -> None:
        other = SETTINGS.model_copy(update={"max_age_windows": 7})
        async with Swarm(tmp_path, 5, settings={3: other, 4: other}) as swarm:
            await swarm.until_round(3.9)
            others = {each.peer_id for each in swarm.all[3:]}
            for each in swarm.all[:3]:
                assert [len(merge.used) for merge in each.merges] == [3, 3, 3]
                (told,) = each.notices  # once, whoever it is
                assert "merges by another rule than this node" in told
                assert each.failures == {(peer_id, "merge_rule"): 3 for peer_id in others}
            for each in swarm.all[3:]:
                assert [len(merge.used) for merge in each.merges] == [2, 2, 2]

    run_virtual(main())


# --- blobs --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_blob_that_does_not_come_stops_this_merge_and_not_the_next(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path, 4) as swarm:
            *honest, broken = swarm.all
            await swarm.until_round(1.9)
            sign = broken.contribute

            async def contribute():
                link = await sign()
                broken.store.get(decode_link(link).blob.root).remove()
                return link

            broken.contribute = contribute
            await swarm.until_round(2.9)
            for each in honest:
                assert len(each.merges) == 1
                assert each.merger.status.why == f"what {broken.peer_id} contributed did not come"
                assert each.notices == [f"no merge this time: {each.merger.status.why}"]
                assert not each.failures
            await swarm.until_round(3.9)
            for each in honest:
                assert {used.author for used in each.merges[1].used} == {other.peer_id for other in honest}
                assert len(each.notices) == 1
            assert len({digests(each)[1] for each in honest}) == 1
            broken.contribute = sign  # it serves what it contributes again
            await swarm.until_round(4.9)
            assert [len(each.merges[-1].used) for each in honest] == [4, 4, 4]
            assert len({digests(each)[-1] for each in honest}) == 1

    run_virtual(main())


def test_a_blob_comes_from_partners_when_its_author_is_gone(tmp_path):
    """Trainer 2 knows trainer 1 only, and trainer 0 vanishes once 1 has its blob."""

    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            first, second, third = swarm.all
            third.members = [second.peer_id]
            first.date_ms, first.drift = swarm.date(EVERY), lambda: first.contributed[0]
            link = await first.contribute()
            second.store.add(bytes(first.store.get(decode_link(link).blob.root).data()))
            await swarm.until_round(1)
            await asyncio.sleep(SETTLE_S - 1)
            swarm.network.kill(first.peer_id)
            await swarm.until_round(1.9)
            assert digests(third) == digests(second)
            assert len(third.merges[0].used) == 3

    run_virtual(main())


def test_who_may_have_a_blob(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            await swarm.until_round(1.9)
            first, second, third = swarm.all
            visible = first.merger.exchange.set.visible()
            (root,) = {each.link.blob.root for each in visible if each.author == second.peer_id}
            assert first.merger.providers(root) == (second.peer_id, third.peer_id)
            assert first.merger.providers("f" * 64) == ()

    run_virtual(main())


def test_old_contributions_are_not_even_fetched(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            old = swarm.all[2]
            old.date_ms = swarm.date(EVERY - SETTINGS.max_age_windows - 5)
            sign = old.contribute

            async def contribute():
                link = await sign()
                old.store.get(decode_link(link).blob.root).remove()
                return link

            old.contribute = contribute
            await swarm.until_round(1.9)
            assert [len(each.merges[0].used) for each in swarm.all] == [2, 2, 2]

    run_virtual(main())


def test_the_date_of_a_bad_contribution_makes_no_other_too_old(tmp_path):
    """By its date, a window ahead, the two honest ones are too old; but its blob lies."""

    async def main() -> None:
        settings = SETTINGS.model_copy(update={"max_age_windows": 4})
        async with Swarm(tmp_path, 4, settings=dict.fromkeys(range(4), settings)) as swarm:
            liar = swarm.all[3]
            for each in swarm.all[:3]:
                each.date_ms = swarm.date(EVERY - 4)
            liar.date_ms = swarm.date(EVERY + 1)

            async def contribute():
                return liar.signed(encode(liar.base, liar.own, base_digest=liar.base_digest), "e" * 64)

            liar.contribute = contribute
            await swarm.until_round(1.9)
            for each in swarm.all[:3]:
                assert len(each.merges[0].used) == 3
                assert each.failures == {(liar.peer_id, "delta_link"): 1}
            assert len({digests(each)[0] for each in swarm.all}) == 1

    run_virtual(main())


# --- withdraw -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_who_withdraws_is_left_out_by_all_who_hear_of_it(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            first, middle, gone = swarm.all
            first.members, gone.members = [middle.peer_id], [middle.peer_id]  # passed on
            await swarm.until_round(1.9)
            gone.not_sharing = "as told"
            await swarm.until_round(2.9)
            for each in swarm.all:
                assert {used.author for used in each.merges[1].used} == {first.peer_id, middle.peer_id}
                assert each.merger.status.contributions == 2
                assert not each.failures
            assert len({digests(each)[1] for each in swarm.all}) == 1
            await swarm.until_round(3.9)
            assert len(gone.merges[2].used) == 2  # it contributed nothing again

    run_virtual(main())


def test_what_an_earlier_run_contributed_is_withdrawn_once_it_is_heard_of(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path, idle=(2,)) as swarm:
            first, second, again = swarm.all
            first.merger.exchange.contribute(await first.contribute())
            earlier = await again.contribute()
            first.merger.exchange.set.add(earlier)
            again.not_sharing = "as told"
            again.begin()
            await swarm.until_round(1.9)
            for each in (first, second, again):
                assert {used.author for used in each.merges[0].used} == {first.peer_id, second.peer_id}

    run_virtual(main())


# --- disk and memory ----------------------------------------------------------------------------------------


def test_a_disk_without_room_makes_no_merge(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")

    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            with monkeypatch.context() as patched:
                patched.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, (1 << 30) - 999, 999))
                await swarm.until_round(1.9)
            for each in swarm.all:
                (told,) = each.notices
                assert "0.00 GB free, 3 contributions need 0.00 GB; free some disk" in told
                assert each.merger.status.why in told
                assert not each.scratch.exists()
            await swarm.until_round(2.9)
            assert [len(each.merges) for each in swarm.all] == [1, 1, 1]

    run_virtual(main())


def test_a_disk_that_is_full_in_the_middle_makes_no_merge_and_the_next_round_does(tmp_path, monkeypatch):
    async def main() -> None:
        async with Swarm(tmp_path) as swarm:
            keep, kept = MergeScratch.keep, 0

            def full(self, name, weights):
                nonlocal kept
                kept += 1
                if kept % 2 == 0:
                    raise OSError(28, "No space left on device")
                return keep(self, name, weights)

            with monkeypatch.context() as patched:
                patched.setattr(MergeScratch, "keep", full)
                await swarm.until_round(1.9)
            for each in swarm.all:
                assert not each.merges
                assert each.notices == ["no merge this time: [Errno 28] No space left on device"]
                assert not each.scratch.exists()
                assert not each.failures
            await swarm.until_round(2.9)
            assert [len(each.merges) for each in swarm.all] == [1, 1, 1]

    run_virtual(main())


def test_a_store_that_is_too_small_for_a_blob_blames_nobody(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path, keep={0: 1000}) as swarm:
            small = swarm.all[0]
            small.own = None
            await swarm.until_round(1.9)
            assert not small.merges
            assert not small.failures
            assert "broadcast.keep_gib allows 1000 in all" in small.notices[0]
            assert digests(swarm.all[1]) == digests(swarm.all[2])

    run_virtual(main())


def test_what_a_killed_run_left_on_the_disk_is_removed(tmp_path):
    async def main() -> None:
        async with Swarm(tmp_path, idle=(0,)) as swarm:
            first = swarm.all[0]
            first.scratch.mkdir(parents=True)
            (first.scratch / "left").write_bytes(bytes(100))
            first.begin()
            await asyncio.sleep(1)
            assert not first.scratch.exists()

    run_virtual(main())


@pytest.mark.slow
def test_memory_holds_one_contribution_at_a_time(tmp_path):
    """Weights of 1 MB: the peak with seven others is that with two, but for what fetching takes."""

    async def main(count: int) -> int:
        shapes = {"w": (1024, 512)}
        async with Swarm(tmp_path / f"{count}", count, shapes=shapes, idle=range(1, count)) as swarm:
            first = swarm.all[0]
            for each in swarm.all[1:]:
                each.merger.exchange.contribute(await each.contribute())
            await swarm.until_round(1)
            await asyncio.sleep(SETTLE_S - 1)
            tracemalloc.start()
            await swarm.until_round(1.9)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert len(first.merges[0].used) == count
            return peak

    assert run_virtual(main(8)) < run_virtual(main(3)) + 1_500_000


def test_the_scratch_gives_back_what_it_was_given(tmp_path):
    scratch = MergeScratch(tmp_path / "scratch")
    base = Weights(SHAPES | {"empty": (0, 3), "scalar": ()}).base
    base["tied"] = base["w"]
    scratch.require_room(1, base)
    kept = scratch.keep("a", base)
    assert kept.keys() == base.keys()
    for name, array in base.items():
        assert np.array_equal(kept[name], array)
        assert kept[name].shape == array.shape
        assert kept[name].flags.c_contiguous
        assert not kept[name].flags.writeable
    assert kept["tied"] is kept["w"]
    assert (tmp_path / "scratch" / "a").stat().st_size == 2 * (64 * 32 + 32 + 1)
    scratch.clear()
    assert not (tmp_path / "scratch").exists()
    assert np.array_equal(kept["w"], base["w"])  # still mapped
    scratch.clear()

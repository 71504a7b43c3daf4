"""Which prompt comes next: slots in order, window after window, and no slot twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from node.clock import VIRTUAL_EPOCH_MS, Clock, VirtualClock, run_virtual
from node.environment.tasks import Completion, Prompt, Score
from node.membership import Membership
from node.rollout import prompts
from node.rollout.prompts import PromptFeed, Universe
from node.state.stores import MemoryWindows, WindowStore
from protocol.charter import found, swarm_id
from protocol.messages import Charter
from protocol.prompts import environment_of, is_held_out, slots
from tests.node.runtimes import make_runtime
from tests.node.verify.world import identity

WINDOW_MS = 10_000
ALICE = identity("alice")
PEER = ALICE.peer_id


class Numbers:
    """Asks for a number of three digits: so few that held-out ones come up often."""

    evaluates_answers = False
    reproducible = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.derived = 0

    def prompt(self, seed: int, index: int) -> Prompt:
        self.derived += 1
        return Prompt(self.name, f"{self.name} {seed % 1000}", seed, index, {})

    def score(self, prompt: Prompt, completion: Completion) -> Score:
        return Score(0.0, ())


def charter_of(**changes: object) -> Charter:
    rules: dict[str, object] = {
        "name": "test",
        "environments": [{"name": "one", "weight": 2}, {"name": "two"}],
        "tokenizers": [{"name": "letters", "digest": "a" * 64, "vocab_size": 10, "end_token_ids": [1]}],
        "window_ms": WINDOW_MS,
        "universe_size": 400,
        "pool_size": 12,
        "slots_per_window": 5,
    }
    return found(identity("founder"), rules | changes, VIRTUAL_EPOCH_MS)


CHARTER = charter_of()
SWARM = swarm_id(CHARTER)


def universe(charter: Charter = CHARTER) -> Universe:
    return Universe(swarm_id(charter), charter, {"one": Numbers("one"), "two": Numbers("two")})


def feed(windows: MemoryWindows | WindowStore | None = None) -> PromptFeed:
    return feed_at(VirtualClock(), windows or MemoryWindows())


def feed_at(clock: Clock, windows: MemoryWindows | WindowStore) -> PromptFeed:
    return PromptFeed(make_runtime(clock), Membership(ALICE, CHARTER, clock), universe(), windows)


# --- PromptFeed --------------------------------------------------------------------------------------------


def test_slots_come_in_their_order_and_then_those_of_the_next_window() -> None:
    async def main() -> None:
        source, loop = feed(), asyncio.get_running_loop()
        for window in range(3):
            wanted = slots(SWARM, CHARTER, window, PEER)
            got = [(await source.next()).ref for _ in range(5)]
            assert [ref.slot for ref in got] == [0, 1, 2, 3, 4]
            assert [ref.index for ref in got] == list(wanted)
            assert {ref.window for ref in got} == {window}
            # the first slot of a window comes at its beginning, the others at once
            assert loop.time() == pytest.approx(window * 10, abs=0.01)

    run_virtual(main())


def test_a_new_window_begins_at_its_first_slot_even_when_old_slots_are_left() -> None:
    async def main() -> None:
        source = feed()
        assert (await source.next()).ref.slot == 0
        await asyncio.sleep(25)
        ref = (await source.next()).ref
        assert (ref.window, ref.slot) == (2, 0)

    run_virtual(main())


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_restart_in_the_same_window_waits_for_the_next_one(tmp_path: Path, on_disk: bool) -> None:
    def windows() -> MemoryWindows | WindowStore:
        return WindowStore(tmp_path / "window") if on_disk else memory

    memory = MemoryWindows()

    async def main() -> None:
        await asyncio.sleep(21)
        first = feed(windows())
        assert (await first.next()).ref.window == 2
        assert windows().newest() == 2
        again = feed(windows())  # a slot of window 2 may have been answered already
        ref = (await again.next()).ref
        assert (ref.window, ref.slot) == (3, 0)
        assert asyncio.get_running_loop().time() == pytest.approx(30, abs=0.01)

    run_virtual(main())


def test_the_window_is_written_down_before_its_first_slot_is_given() -> None:
    class Full(MemoryWindows):
        def begun(self, window: int) -> None:
            raise OSError(28, "No space left on device")

    async def main() -> None:
        source = feed(Full())
        for _ in range(2):  # and never given later without it
            with pytest.raises(OSError, match="No space"):
                await source.next()

    run_virtual(main())


def test_a_clock_that_runs_backwards_repeats_no_slot() -> None:
    class Wrong(VirtualClock):
        offset_ms = 20_000

        def now_ms(self) -> int:
            return super().now_ms() + self.offset_ms

    async def main() -> None:
        clock = Wrong()
        source = feed_at(clock, MemoryWindows())
        seen = [(await source.next()).ref for _ in range(3)]
        clock.offset_ms = 0  # two windows back
        seen += [(await source.next()).ref for _ in range(4)]
        assert len(set(seen)) == 7
        assert [(ref.window, ref.slot) for ref in seen] == [
            *((2, slot) for slot in range(5)),
            (3, 0),
            (3, 1),
        ]

    run_virtual(main())


# --- Universe ----------------------------------------------------------------------------------------------


def test_every_item_belongs_to_its_environment_and_none_is_held_out() -> None:
    items = universe()
    for index in range(CHARTER.universe_size):
        prompt = items.item(index)
        assert prompt.environment == environment_of(CHARTER, index).name
        assert not is_held_out(prompt.text)
        assert prompt.index == 0


def test_held_out_prompts_are_held_out_per_environment_and_the_same_everywhere() -> None:
    found_prompts = universe().held_out(20)
    assert sorted(found_prompts) == ["one", "two"]
    training = {universe().item(index).text for index in range(CHARTER.universe_size)}
    for name, listed in found_prompts.items():
        assert len(listed) == 20
        assert all(prompt.environment == name and is_held_out(prompt.text) for prompt in listed)
        assert not training & {prompt.text for prompt in listed}
    assert universe().held_out(20) == found_prompts
    assert {name: listed[:5] for name, listed in found_prompts.items()} == universe().held_out(5)


def test_two_nodes_derive_the_same_item() -> None:
    assert [universe().item(index) for index in range(50)] == [universe().item(index) for index in range(50)]


def test_the_cache_saves_deriving_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "CACHED_ITEMS", 10)
    one = Numbers("one")
    items = Universe(SWARM, CHARTER, {"one": one, "two": Numbers("two")})
    items.item(0)
    derived = one.derived
    items.item(0)
    assert one.derived == derived
    for index in range(1, 11):
        items.item(index)
    derived = one.derived
    items.item(0)
    assert one.derived > derived

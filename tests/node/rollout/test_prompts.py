"""Which prompt comes next: slots in order, window after window, and no slot twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from node.clock import VIRTUAL_EPOCH_MS, Clock, VirtualClock, run_virtual
from node.environment.host import TrustedHost
from node.environment.records import Completion, Prompt, Score
from node.events import Notice
from node.membership import Membership
from node.rollout import prompts
from node.rollout.prompts import PromptFeed, Universe
from node.state.windows import MemoryWindows, WindowStore
from node.supervise import StageGauge
from protocol.charter import found, swarm_id
from protocol.messages import Charter, PromptRef
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
    return Universe(swarm_id(charter), charter, TrustedHost({"one": Numbers("one"), "two": Numbers("two")}))


def feed(windows: MemoryWindows | None = None, told: list[str] | None = None) -> PromptFeed:
    return feed_at(VirtualClock(), windows or MemoryWindows(), told)


def feed_at(clock: Clock, windows: MemoryWindows, told: list[str] | None = None) -> PromptFeed:
    runtime = make_runtime(clock)
    if told is not None:
        runtime.bus.subscribe(lambda event: told.append(event.text) if isinstance(event, Notice) else None)
    return PromptFeed(runtime, Membership(ALICE, CHARTER, clock), universe(), windows)


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


def test_no_slot_is_given_before_its_window_is_written_down() -> None:
    """A full disk is waited for by name, told once, and ends nothing."""

    class Full(MemoryWindows):
        full = True

        def begin(self, window: int) -> None:
            if self.full:
                raise OSError(28, "No space left on device")
            super().begin(window)

    async def main() -> None:
        windows, told = Full(), list[str]()
        source = feed(windows, told)
        gauge = StageGauge("rollout", VirtualClock(), "the trainer")
        asking = asyncio.create_task(source.next(gauge))
        await asyncio.sleep(33)
        assert not asking.done()
        assert gauge.status().waiting_for == "the disk"
        windows.full = False
        ref = (await asking).ref
        assert (ref.window, ref.slot) == (3, 0)  # not one whose time is over
        assert [text.split(":")[0] for text in told] == [
            "cannot write that a window of prompts is begun",
            "that a window of prompts is begun",
        ]

    run_virtual(main())


class Wrong(VirtualClock):
    """A clock that may be set wrong."""

    offset_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.offset_ms


def test_a_clock_that_was_ahead_costs_nothing_once_it_is_right(tmp_path: Path) -> None:
    """An hour for two windows: then the windows of now are answered, also after a restart, and those of then
    are not answered again when their time comes."""

    async def main() -> None:
        clock, told, seen = Wrong(), list[str](), list[PromptRef]()
        source = feed_at(clock, WindowStore(tmp_path / "window"), told)
        seen += [(await source.next()).ref for _ in range(2)]
        clock.offset_ms = 3_600_000
        seen += [(await source.next()).ref for _ in range(7)]
        assert {ref.window for ref in seen} == {0, 360, 361}
        clock.offset_ms = 0
        now = (await source.next()).ref.window
        assert now in (1, 2)
        assert len(told) == 1
        assert "this machine's clock was ahead: windows up to one 60 min from now were begun" in told[0]
        again = feed_at(clock, WindowStore(tmp_path / "window"), told)
        assert (await again.next()).ref.window == now + 1
        await asyncio.sleep(3_600 - asyncio.get_running_loop().time())
        assert (await again.next()).ref.window == 362

    run_virtual(main())


def test_a_file_of_a_wrong_clock_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "window").write_text("10800\n")  # as the first format had it: a day ahead

    async def main() -> None:
        told = list[str]()
        source = feed(WindowStore(tmp_path / "window"), told)
        assert (await source.next()).ref.window == 0
        assert "windows up to one 30 h from now were begun" in told[0]

    run_virtual(main())


def test_ranges_of_windows_stay_few_and_forget_nothing() -> None:
    windows = MemoryWindows()
    begun = [*range(5), *range(1000, 1300, 7), 10**6, 10**9]
    for window in begun:
        windows.begin(window)
        assert windows.was_begun(window)
    assert all(windows.was_begun(window) for window in begun)
    assert not windows.was_begun(500)
    assert not windows.was_begun(10**6 - 1)
    assert windows.newest() == 10**9


def test_a_damaged_file_of_windows_is_no_end(tmp_path: Path) -> None:
    for text in ("", "x", "5-", "9-5", "5-7 1-2", "-", "1-2 3", "\xff"):
        (tmp_path / "window").write_text(text)
        assert WindowStore(tmp_path / "window").newest() == -1


def test_a_clock_that_runs_backwards_repeats_no_slot() -> None:
    async def main() -> None:
        clock = Wrong()
        clock.offset_ms = 20_000
        source = feed_at(clock, MemoryWindows())
        seen = [(await source.next()).ref for _ in range(3)]
        clock.offset_ms = 0  # two windows back
        seen += [(await source.next()).ref for _ in range(4)]
        assert len(set(seen)) == 7
        # window 0 was never begun, so it is free
        assert [(ref.window, ref.slot) for ref in seen] == [
            *((2, slot) for slot in range(3)),
            *((0, slot) for slot in range(4)),
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
    items = Universe(SWARM, CHARTER, TrustedHost({"one": one, "two": Numbers("two")}))
    items.item(0)
    derived = one.derived
    items.item(0)
    assert one.derived == derived
    for index in range(1, 11):
        items.item(index)
    derived = one.derived
    items.item(0)
    assert one.derived > derived


def test_a_task_that_fails_on_seeds_costs_its_slots_at_most() -> None:
    """Seeds on which it raises are passed over, the same on every machine; a task that always does is told
    once, and the others go on."""

    class Fails(Numbers):
        def __init__(self, name: str, every: int) -> None:
            super().__init__(name)
            self.every = every

        def prompt(self, seed: int, index: int) -> Prompt:
            if seed % self.every == 0:
                raise IndexError("no such word")
            return super().prompt(seed, index)

    now_and_then = Universe(SWARM, CHARTER, TrustedHost({"one": Fails("one", 2), "two": Numbers("two")}))
    for index in range(CHARTER.universe_size):
        assert now_and_then.item(index).seed % 2 or environment_of(CHARTER, index).name == "two"
    assert len(now_and_then.held_out(5)["one"]) == 5

    async def main() -> None:
        told, clock = list[str](), VirtualClock()
        runtime = make_runtime(clock)
        runtime.bus.subscribe(lambda event: told.append(event.text) if isinstance(event, Notice) else None)
        always = Universe(SWARM, CHARTER, TrustedHost({"one": Fails("one", 1), "two": Numbers("two")}))
        source = PromptFeed(runtime, Membership(ALICE, CHARTER, clock), always, MemoryWindows())
        assert {(await source.next()).prompt.environment for _ in range(12)} == {"two"}
        assert len(told) == 1
        assert told[0].startswith("slots of one are left out: ")

    run_virtual(main())

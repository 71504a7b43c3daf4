"""Which prompt comes next: the slots of this peer in the current window, and the items behind universe
indexes.

`Universe` turns indexes of the charter's universe into items of environments (any peer can, that is the point
of D4), and lists the held-out prompts; it asks the task host for many questions at once and remembers
those of training. `PromptFeed` walks through this peer's own slots, window by window. Which seed counts is
decided in `protocol/prompts.py`; this file only binds it to the host.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cachetools import LRUCache

from node.clock import duration
from node.compute import Lane
from node.durable import durable
from node.environment.host import HostFailure, TaskHost
from node.environment.records import Prompt
from node.events import NoticeLevel
from node.membership import Membership
from node.runtime import Runtime
from node.state.windows import MemoryWindows
from node.supervise import StageGauge
from node.transport.limits import FirstTimes
from protocol.constants import MAX_CLOCK_SKEW_MS
from protocol.errors import CharterError
from protocol.messages import Charter, Digest, PromptRef
from protocol.prompts import (
    MAX_ATTEMPTS,
    Question,
    environment_of,
    held_out_question,
    held_out_seed,
    item_seed,
    slots,
    training_question,
    window_of,
)

__all__ = ["AssignedPrompt", "PromptFeed", "Universe"]

CACHED_ITEMS = 8192
AHEAD_SLOTS = 64
"""Slots whose prompts are derived at once."""

Derived = Prompt | CharterError
"""An item, or why there is none."""


@dataclass(frozen=True, slots=True)
class AssignedPrompt:
    """A slot of ours and the item it stands for."""

    ref: PromptRef
    prompt: Prompt


class Universe:
    """The items of a swarm: universe index -> prompt, and the held-out prompts. Blocking and thread-safe."""

    def __init__(self, swarm_id: Digest, charter: Charter, host: TaskHost) -> None:
        self._swarm_id = swarm_id
        self._charter = charter
        self._host = host
        self._items: LRUCache[int, Derived] = LRUCache(CACHED_ITEMS)
        self._lock = threading.Lock()
        """Of the items."""

    def item(self, index: int) -> Prompt:
        """The training prompt behind a universe index; never a held-out one. Raises CharterError where the
        environment has none."""
        derived = self.items([index])[index]
        if isinstance(derived, CharterError):
            raise derived
        return derived

    def items(self, indexes: Iterable[int]) -> Mapping[int, Derived]:
        """What is behind each index."""
        with self._lock:
            known = {index: self._items.get(index) for index in indexes}
        found = {index: item for index, item in known.items() if item is not None}
        unknown: dict[str, list[int]] = {}
        for index in known.keys() - found.keys():
            unknown.setdefault(environment_of(self._charter, index).name, []).append(index)
        for name, missing in unknown.items():
            found |= self._derive(name, sorted(missing), _TRAINING)
        with self._lock:
            self._items.update({index: item for index, item in found.items() if isinstance(item, Prompt)})
        return found

    def held_out(self, per_task: int, *, after: int = 0) -> dict[str, list[Prompt]]:
        """`per_task` evaluation prompts of every environment, those that follow the first `after` ones; the
        same on every node of the swarm. Fewer where an environment has none."""
        names = [spec.name for spec in self._charter.environments]
        listed = {}
        for position, name in enumerate(names):
            numbers = [number * len(names) + position for number in range(after, after + per_task)]
            derived = self._derive(name, numbers, _HELD_OUT)
            found = (derived[number] for number in numbers)
            listed[name] = [item for item in found if isinstance(item, Prompt)]
        return listed

    def _derive(self, environment: str, numbers: Sequence[int], kind: _Kind) -> dict[int, Derived]:
        """The question of each number, by asking for the seeds of a few attempts, and of some more for those
        that have none yet."""
        known: dict[int, str | HostFailure | None] = {}
        derived: dict[int, Derived] = {}
        attempts = range(kind.first_attempts)
        while attempts and len(derived) < len(numbers):
            wanted = [number for number in numbers if number not in derived]
            seeds = [kind.seed(self._swarm_id, number, attempt) for number in wanted for attempt in attempts]
            known |= zip(seeds, self._host.questions(environment, seeds), strict=True)
            for number in wanted:
                try:
                    question = kind.question(self._swarm_id, number, functools.partial(_text, known))
                    derived[number] = Prompt(environment, question.text, question.seed, 0)
                except _NotAskedError:
                    continue
                except CharterError as error:
                    derived[number] = error
            more = max(kind.first_attempts, attempts.stop // 4)
            attempts = range(attempts.stop, min(attempts.stop + more, MAX_ATTEMPTS))
        return derived


@dataclass(frozen=True, slots=True)
class _Kind:
    """How the questions of numbers are found."""

    seed: Callable[[Digest, int, int], int]
    question: Callable[[Digest, int, Callable[[int], str | None]], Question]
    first_attempts: int
    """How many seeds are asked for at first: one is enough for nine of ten training questions, ten for most
    held-out ones."""


_TRAINING = _Kind(item_seed, training_question, 1)
_HELD_OUT = _Kind(held_out_seed, held_out_question, 4)


class _NotAskedError(Exception):
    """The host was not asked for this seed yet."""


def _text(known: Mapping[int, str | HostFailure | None], seed: int) -> str | None:
    if seed not in known:
        raise _NotAskedError
    answer = known[seed]
    if isinstance(answer, HostFailure):
        raise CharterError(f"a question could not be derived here ({answer.reason}: {answer.detail})")
    return answer


class PromptFeed:
    """This peer's slots in order. When those of a window are used up, waits for the next window.

    A restarted node begins with a window it has not begun before: answering a slot twice is equivocation.
    """

    def __init__(
        self,
        runtime: Runtime,
        membership: Membership,
        universe: Universe,
        windows: MemoryWindows,
    ) -> None:
        self._runtime = runtime
        self._membership = membership
        self._universe = universe
        self._windows = windows
        self._window = -1
        """The one whose slots are given now; -1 for none."""
        self._slot = 0
        self._derived: dict[int, Derived] = {}
        """Of the slots that come next."""
        self._told_ahead = -1
        self._first_times = FirstTimes()

    async def next(self, gauge: StageGauge | None = None) -> AssignedPrompt:
        """The next slot; at most one window away, where the disk takes that a window is begun. That wait is
        one of `gauge`."""
        charter = self._membership.charter
        while True:
            window = window_of(charter, self._runtime.now_ms())
            self._tell_ahead(window)
            if not self._windows.was_begun(window):
                begin = functools.partial(self._windows.begin, window)
                await durable(self._runtime, "that a window of prompts is begun", begin, gauge)
                self._window, self._slot = window, 0
                continue  # the disk may have taken its time
            if window == self._window and self._slot < charter.slots_per_window:
                if (assigned := await self._assigned()) is not None:
                    return assigned
                continue
            await self._derive(window + 1, 0)
            next_at = charter.created_at + (window + 1) * charter.window_ms
            await asyncio.sleep(max(1, next_at - self._runtime.now_ms()) / 1000)

    async def _assigned(self) -> AssignedPrompt | None:
        """The next slot of this window; None, told once, where its environment has no question for it."""
        member, charter = self._membership, self._membership.charter
        window, slot = self._window, self._slot
        index = slots(member.swarm_id, charter, window, member.peer_id)[slot]
        ref = PromptRef(window=window, slot=slot, index=index)
        if ref.index not in self._derived:
            await self._derive(self._window, self._slot)
        self._slot += 1
        derived = self._derived.pop(ref.index)
        if isinstance(derived, Prompt):
            return AssignedPrompt(ref=ref, prompt=derived)
        name = environment_of(charter, index).name
        if self._first_times.is_new(name):
            self._runtime.notice(NoticeLevel.WARNING, f"slots of {name} are left out: {derived}")
        return None

    async def _derive(self, window: int, first: int) -> None:
        """Derive the prompts of the slots from `first` on, beside the event loop."""
        member = self._membership
        indexes = slots(member.swarm_id, member.charter, window, member.peer_id)[first : first + AHEAD_SLOTS]
        if not self._derived.keys() >= set(indexes):
            derived = await self._runtime.run(Lane.DERIVE, self._universe.items, indexes)
            self._derived = dict(derived)

    def _tell_ahead(self, window: int) -> None:
        """Say once of each such time that windows were begun which lie ahead of the clock's."""
        newest, window_ms = self._windows.newest(), self._membership.charter.window_ms
        ahead_ms = (newest - window) * window_ms
        if ahead_ms > MAX_CLOCK_SKEW_MS + window_ms and newest != self._told_ahead:
            self._told_ahead = newest
            self._runtime.notice(
                NoticeLevel.WARNING,
                f"this machine's clock was ahead: windows up to one {duration(ahead_ms / 1000)} from now "
                "were begun; they stay unanswered when their time comes, all others are answered",
            )

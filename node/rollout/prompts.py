"""Which prompt comes next: the slots of this peer in the current window, and the items behind universe
indexes.

`Universe` turns an index of the charter's universe into an item of an environment (any peer can, that is the
point of D4), and lists the held-out prompts. `PromptFeed` walks through this peer's own slots, window by
window. Derivation itself is in `protocol/prompts.py`; this file only binds it to environments.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from cachetools import FIFOCache, cachedmethod

from node.clock import duration
from node.durable import durable
from node.environment.tasks import Environment, Prompt
from node.events import NoticeLevel
from node.membership import Membership
from node.runtime import Runtime
from node.state.windows import MemoryWindows
from node.supervise import StageGauge
from node.transport.limits import FirstTimes
from protocol.constants import MAX_CLOCK_SKEW_MS
from protocol.errors import CharterError
from protocol.messages import Charter, Digest, PromptRef
from protocol.prompts import environment_of, held_out_question, slots, training_question, window_of

__all__ = ["AssignedPrompt", "PromptFeed", "Universe"]

CACHED_ITEMS = 8192


@dataclass(frozen=True, slots=True)
class AssignedPrompt:
    """A slot of ours and the item it stands for."""

    ref: PromptRef
    prompt: Prompt


class Universe:
    """The items of a swarm: universe index -> prompt, and the held-out prompts."""

    def __init__(self, swarm_id: Digest, charter: Charter, environments: Mapping[str, Environment]) -> None:
        self._swarm_id = swarm_id
        self._charter = charter
        self._environments = environments
        self._items: FIFOCache[int, Prompt] = FIFOCache(CACHED_ITEMS)
        self._lock = threading.Lock()

    @cachedmethod(attrgetter("_items"), lock=attrgetter("_lock"))
    def item(self, index: int) -> Prompt:
        """The training prompt behind a universe index; never a held-out one. Raises CharterError where the
        environment has none."""
        environment = self._environments[environment_of(self._charter, index).name]
        question = training_question(self._swarm_id, index, functools.partial(_question, environment))
        return environment.prompt(question.seed, 0)

    def held_out(self, per_task: int, *, after: int = 0) -> dict[str, list[Prompt]]:
        """`per_task` evaluation prompts of every environment, those that follow the first `after` ones; the
        same on every node of the swarm."""
        count = len(self._environments)
        return {
            name: [
                self._held_out_item(environment, number * count + position)
                for number in range(after, after + per_task)
            ]
            for position, (name, environment) in enumerate(self._environments.items())
        }

    def _held_out_item(self, environment: Environment, number: int) -> Prompt:
        question = held_out_question(self._swarm_id, number, functools.partial(_question, environment))
        return environment.prompt(question.seed, 0)


def _question(environment: Environment, seed: int) -> str | None:
    """The question of a seed; None where the environment fails on it, which it does on every machine."""
    try:
        text = environment.prompt(seed, 0).text
    except Exception:  # of a third party's code
        return None
    return text if isinstance(text, str) else None


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
                if (assigned := self._assigned()) is not None:
                    return assigned
                continue
            next_at = charter.created_at + (window + 1) * charter.window_ms
            await asyncio.sleep(max(1, next_at - self._runtime.now_ms()) / 1000)

    def _assigned(self) -> AssignedPrompt | None:
        """The next slot of this window; None, told once, where its environment has no question for it."""
        member, charter = self._membership, self._membership.charter
        index = slots(member.swarm_id, charter, self._window, member.peer_id)[self._slot]
        ref = PromptRef(window=self._window, slot=self._slot, index=index)
        self._slot += 1
        try:
            return AssignedPrompt(ref=ref, prompt=self._universe.item(index))
        except CharterError as error:
            name = environment_of(charter, index).name
            if self._first_times.is_new(name):
                self._runtime.notice(NoticeLevel.WARNING, f"slots of {name} are left out: {error}")
            return None

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

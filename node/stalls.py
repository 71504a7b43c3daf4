"""Which stages stand still: far longer without progress than is usual for them.

    gauges --progress--> StallWatch, ticked by `Status` --> a sentence when a stage stops, one when it goes on

Progress is that a piece of work begins or ends, or that a wait ends. What is usual is measured: the longest
of the last pauses between two of those, times PATIENCE, and never under QUIET_S. A stage without such a
history is judged only while it works, after FIRST_WORK_S. Time is counted in ticks of at most
LONGEST_TICK_S, so that a machine that slept does not find all its stages stalled. Not for what to do about
it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from node.supervise import StageGauge

__all__ = ["StallWatch"]

PATIENCE = 10.0
QUIET_S = 60.0
FIRST_WORK_S = 600.0
LONGEST_TICK_S = 2.0
HISTORY = 32


@dataclass(slots=True)
class _Watched:
    gauge: StageGauge
    progress: int = 0
    quiet_s: float = 0.0
    told: bool = False
    pauses_s: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))

    @property
    def limit_s(self) -> float:
        if len(self.pauses_s) == HISTORY:
            return max(QUIET_S, PATIENCE * max(self.pauses_s))
        return FIRST_WORK_S if self.gauge.busy else float("inf")


class StallWatch:
    """Watches `gauges`, from the first tick on."""

    def __init__(self, gauges: Sequence[StageGauge]) -> None:
        self._watched = [_Watched(gauge, gauge.progress) for gauge in gauges]

    def tick(self, elapsed_s: float) -> list[str]:
        """`elapsed_s` have passed since the last tick; what is to be told."""
        told: list[str] = []
        for each in self._watched:
            gauge = each.gauge
            if gauge.progress != each.progress:
                if each.told:
                    told.append(f"{gauge.stage} goes on after {each.quiet_s:.0f} s")
                each.pauses_s.append(each.quiet_s)
                each.progress, each.quiet_s, each.told = gauge.progress, 0.0, False
            each.quiet_s += min(elapsed_s, LONGEST_TICK_S)
            if not each.told and each.quiet_s > each.limit_s:
                each.told = True
                told.append(f"{gauge.stage} makes no progress for {each.quiet_s:.0f} s{_usual(each)}")
            gauge.stalled_s = each.quiet_s if each.told else 0.0
        return told


def _usual(watched: _Watched) -> str:
    waiting_for = watched.gauge.status().waiting_for
    doing = f"it waits for {waiting_for}" if waiting_for else "it works on one piece"
    if not watched.pauses_s:
        return f": {doing}"
    return f", {max(watched.pauses_s):.1f} s at most are usual: {doing}"

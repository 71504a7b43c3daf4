"""What a node's events say about a month of running: what it lost, did twice, and what of it grows.

For: the events of one node over all its lives, in order, with the time at which they were read; and slopes
over its readings. Pure. Not for starting or ending nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from node.events import Event, GroupJudged, Health, PeersSeen, StagesSeen, StepDone

__all__ = ["NodeRecord", "Slope", "slope"]

EXPLAINS_S = 120.0
"""A stage that stands still so soon after a fault of its own node is explained by it."""
KNOWN_TRUST = 0.8
"""Trust that took work to get."""


@dataclass(frozen=True, slots=True)
class Slope:
    """Growth per minute, and the half-width of its 95 % interval."""

    per_minute: float
    noise: float


def slope(readings: Sequence[tuple[float, float]]) -> Slope:
    """Least squares over (seconds, value); neither growth nor noise where there are less than three."""
    count = len(readings)
    if count < 3:
        return Slope(0.0, 0.0)
    mean_s = math.fsum(s for s, _ in readings) / count
    mean = math.fsum(value for _, value in readings) / count
    spread = math.fsum((s - mean_s) ** 2 for s, _ in readings)
    if spread == 0.0:
        return Slope(0.0, 0.0)
    per_s = math.fsum((s - mean_s) * (value - mean) for s, value in readings) / spread
    rest = math.fsum((value - mean - per_s * (s - mean_s)) ** 2 for s, value in readings)
    return Slope(60.0 * per_s, 60.0 * 1.96 * math.sqrt(rest / (count - 2) / spread))


@dataclass(slots=True)
class NodeRecord:
    """One node, from its first start on."""

    versions: int = 0
    """Steps done, those of all lives."""
    lost_steps: int = 0
    """Most steps that were done, and had to be done again after a kill."""
    twice: int = 0
    """Own slots answered twice and groups accepted twice."""
    trust_lost: float = 0.0
    """Most trust in a peer that a kill has cost."""
    stalls: list[str] = field(default_factory=list)
    """Stages that stood still, and no fault of this node explains it."""
    recovered_s: dict[str, float] = field(default_factory=dict)
    """Time from the end of each fault to the next step."""
    health: list[tuple[float, Health]] = field(default_factory=list)
    """Readings of the life that goes on."""
    daemon_bytes: list[tuple[float, float]] = field(default_factory=list)
    _version: int = -1
    _redone_from: int | None = None
    _trust: dict[str, float] = field(default_factory=dict)
    _compare_trust: bool = False
    _slots: set[tuple[int, int]] = field(default_factory=set)
    _accepted: set[str] = field(default_factory=set)
    _stalled: frozenset[str] = frozenset()
    _fault_s: float = -math.inf
    _faults: dict[str, float] = field(default_factory=dict)

    def fault(self, name: str, now_s: float) -> None:
        """A fault of this node begins, or goes on."""
        self._fault_s = now_s
        self._faults.pop(name, None)

    def mended(self, name: str, now_s: float) -> None:
        """It is over: the next step says how soon the node has recovered."""
        self._fault_s = now_s
        self._faults[name] = now_s

    def killed(self, now_s: float) -> None:
        """The process is gone; what follows is of the next one."""
        self.mended("kill", now_s)
        self._redone_from = self._version
        self._compare_trust = True
        self._stalled = frozenset()
        self.health.clear()
        self.daemon_bytes.clear()

    def take(self, event: Event, now_s: float) -> None:
        """The next event, read at `now_s`."""
        if isinstance(event, StepDone):
            self._step(event, now_s)
        elif isinstance(event, GroupJudged):
            self._group(event)
        elif isinstance(event, Health):
            self.health.append((now_s, event))
        elif isinstance(event, PeersSeen):
            self._peers(event)
        elif isinstance(event, StagesSeen):
            stalled = frozenset(each.stage for each in event.stages if each.stalled_s)
            if now_s - self._fault_s > EXPLAINS_S:
                self.stalls.extend(sorted(stalled - self._stalled))
            self._stalled = stalled

    def _step(self, event: StepDone, now_s: float) -> None:
        self.versions += 1
        if self._redone_from is not None:
            self.lost_steps = max(self.lost_steps, self._redone_from + 1 - event.policy_version)
            self._redone_from = None
        self._version = event.policy_version
        for name, since_s in self._faults.items():
            self.recovered_s[name] = max(self.recovered_s.get(name, 0.0), now_s - since_s)
        self._faults.clear()

    def _group(self, event: GroupJudged) -> None:
        if event.own:
            slot = (event.window, event.slot)
            self.twice += slot in self._slots
            self._slots.add(slot)
        elif event.accepted:
            self.twice += event.group in self._accepted
            self._accepted.add(event.group)

    def _peers(self, event: PeersSeen) -> None:
        trust = {peer.peer_id: peer.trust for peer in event.peers}
        if self._compare_trust:
            lost = [before - trust.get(peer, before) for peer, before in self._trust.items()]
            self.trust_lost = max(self.trust_lost, *lost, 0.0)
            self._compare_trust = False
        self._trust = {peer: value for peer, value in trust.items() if value >= KNOWN_TRUST}

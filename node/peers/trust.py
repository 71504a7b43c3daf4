"""Trust in each peer, earned by accepted groups and lost by refused ones.

trust = (a + 1) / (a + 1/newcomer + k_hard h + k_soft s), with a, h, s the decayed counts of accepted groups,
hard and soft failures. Honest work cannot be banked without limit (a is capped), one hard failure weighs as
much as k_hard accepted groups, and hard failures are forgotten more slowly than good work. So a peer caught
cheating in 5 % of its groups stays below one half however many good ones it sends: 0.95 / (0.95 + 0.05
k_hard) < 1/2 from k_hard = 19 on. Below the threshold after a hard failure a peer is quarantined for a term,
twice as long each time. Not for: deciding what is a failure (`node.verify`). Time is an argument: fractional
windows, never running backwards per peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import msgspec

from node.state.stores import write_atomically
from protocol.messages import Digest

__all__ = ["Hardness", "Standing", "TrustBook", "TrustSettings", "load_standings", "save_standings"]

MAX_TERM_FACTOR = 64


class Hardness(StrEnum):
    """What verification found in a group."""

    ACCEPTED = "accepted"
    SOFT = "soft"
    """Suspicious within the noise of honest peers: log-probability gap, slow answers."""
    HARD = "hard"
    """No honest peer sends it: false reward, broken digest, prompt that is not its own."""


@dataclass(frozen=True)
class TrustSettings:
    """Tunable numbers; counts decay by half in the given windows."""

    newcomer: float = 0.5
    hard_weight: float = 25.0
    soft_weight: float = 1.0
    max_accepted: float = 100.0
    good_half_life_windows: float = 50.0
    hard_half_life_windows: float = 100.0
    quarantine_below: float = 0.2
    quarantine_windows: float = 20.0
    max_peers: int = 4096


@dataclass(frozen=True)
class Standing:
    """Everything remembered about one peer; a plain value, so it can be stored and restored."""

    peer: str
    accepted: float = 0.0
    soft: float = 0.0
    hard: float = 0.0
    at_window: float = 0.0
    quarantined_until: float = 0.0
    quarantines: int = 0


class TrustBook:
    """Standing of every peer met, at most `max_peers`; the one longest unheard of is forgotten first, peers
    with hard failures last."""

    def __init__(self, settings: TrustSettings = TrustSettings(), standings: Sequence[Standing] = ()) -> None:
        self._settings = settings
        self._standings = {standing.peer: standing for standing in standings}

    def record(self, peer: str, found: Hardness, window: float) -> None:
        """Count one judged group of `peer`."""
        settings = self._settings
        now = self._decayed(peer, window)
        if found is Hardness.ACCEPTED:
            now = replace(now, accepted=min(now.accepted + 1, settings.max_accepted))
        elif found is Hardness.SOFT:
            now = replace(now, soft=now.soft + 1)
        else:
            now = replace(now, hard=now.hard + 1)
            if self._value(now) < settings.quarantine_below and now.quarantined_until <= window:
                term = settings.quarantine_windows * min(2**now.quarantines, MAX_TERM_FACTOR)
                now = replace(now, quarantined_until=window + term, quarantines=min(now.quarantines + 1, 64))
        self._standings.pop(peer, None)
        self._standings[peer] = now
        if len(self._standings) > settings.max_peers:
            forgotten = next(
                (p for p, s in self._standings.items() if s.hard < 0.05), next(iter(self._standings))
            )
            del self._standings[forgotten]

    def trust(self, peer: str, window: float) -> float:
        """Trust in [0, 1]; 0 during a quarantine."""
        return 0.0 if self.quarantined(peer, window) else self._value(self._decayed(peer, window))

    def quarantined(self, peer: str, window: float) -> bool:
        """Whether nothing of this peer is to be fetched or used now."""
        standing = self._standings.get(peer)
        return standing is not None and window < standing.quarantined_until

    def standings(self) -> tuple[Standing, ...]:
        """All of it, to be stored and given to `TrustBook` again."""
        return tuple(self._standings.values())

    def _decayed(self, peer: str, window: float) -> Standing:
        standing = self._standings.get(peer)
        if standing is None:
            return Standing(peer, at_window=window)
        passed = max(window - standing.at_window, 0.0)
        good = 0.5 ** (passed / self._settings.good_half_life_windows)
        return replace(
            standing,
            accepted=standing.accepted * good,
            soft=standing.soft * good,
            hard=standing.hard * 0.5 ** (passed / self._settings.hard_half_life_windows),
            at_window=max(window, standing.at_window),
        )

    def _value(self, standing: Standing) -> float:
        settings = self._settings
        bad = settings.hard_weight * standing.hard + settings.soft_weight * standing.soft
        return (standing.accepted + 1) / (standing.accepted + 1 / settings.newcomer + bad)


class _Kept(msgspec.Struct, frozen=True):
    """What is on disk: windows are counted from a swarm's beginning, so it is one swarm's."""

    swarm_id: Digest
    standings: tuple[Standing, ...]


def save_standings(path: Path, swarm_id: Digest, standings: Sequence[Standing]) -> None:
    """Replace `path`. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.encode(_Kept(swarm_id, tuple(standings))))


def load_standings(path: Path, swarm_id: Digest) -> tuple[Standing, ...]:
    """What was saved for this swarm; nothing when the file is missing, damaged or another swarm's."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.MsgspecError):
        return ()
    return kept.standings if kept.swarm_id == swarm_id else ()

"""Trust in a peer, earned by accepted groups and lost by refused ones: arithmetic on a `Standing`.

trust = (a + 1) / (a + 1/newcomer + k_hard h + k_soft s), with a, h, s the decayed counts of accepted groups,
hard and soft failures. Honest work cannot be banked without limit (a is capped), one hard failure weighs as
much as k_hard accepted groups, and hard failures are forgotten more slowly than good work. So a peer caught
cheating in 5 % of its groups stays below one half however many good ones it sends: 0.95 / (0.95 + 0.05
k_hard) < 1/2 from k_hard = 19 on. Below the threshold after a hard failure a peer is quarantined for a term,
twice as long each time. Pure, but for the file: who has which standing is `node/peers/book.py`, what a
failure is `node/verify`. Time is an argument: fractional windows, never running backwards per peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import msgspec

from node.state.stores import write_atomically
from protocol.messages import Digest, PeerId

__all__ = [
    "Hardness",
    "Standing",
    "TrustSettings",
    "after_judgement",
    "is_quarantined",
    "load_standings",
    "save_standings",
    "trust_in",
]

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

    peer: PeerId
    accepted: float = 0.0
    soft: float = 0.0
    hard: float = 0.0
    at_window: float = 0.0
    """When the three counts were as they are here."""
    quarantined_until: float = 0.0
    quarantines: int = 0


def after_judgement(standing: Standing, found: Hardness, window: float, settings: TrustSettings) -> Standing:
    """The standing once one more group was judged in `window`."""
    now = _decayed(standing, window, settings)
    if found is Hardness.ACCEPTED:
        return replace(now, accepted=min(now.accepted + 1, settings.max_accepted))
    if found is Hardness.SOFT:
        return replace(now, soft=now.soft + 1)
    now = replace(now, hard=now.hard + 1)
    if _value(now, settings) < settings.quarantine_below and now.quarantined_until <= window:
        term = settings.quarantine_windows * min(2**now.quarantines, MAX_TERM_FACTOR)
        now = replace(now, quarantined_until=window + term, quarantines=min(now.quarantines + 1, 64))
    return now


def trust_in(standing: Standing, window: float, settings: TrustSettings) -> float:
    """Trust in [0, 1]; 0 during a quarantine."""
    if is_quarantined(standing, window):
        return 0.0
    return _value(_decayed(standing, window, settings), settings)


def is_quarantined(standing: Standing, window: float) -> bool:
    """Whether nothing of this peer is to be fetched or used in `window`."""
    return window < standing.quarantined_until


def _decayed(standing: Standing, window: float, settings: TrustSettings) -> Standing:
    passed = max(window - standing.at_window, 0.0)
    good = 0.5 ** (passed / settings.good_half_life_windows)
    return replace(
        standing,
        accepted=standing.accepted * good,
        soft=standing.soft * good,
        hard=standing.hard * 0.5 ** (passed / settings.hard_half_life_windows),
        at_window=max(window, standing.at_window),
    )


def _value(standing: Standing, settings: TrustSettings) -> float:
    bad = settings.hard_weight * standing.hard + settings.soft_weight * standing.soft
    return (standing.accepted + 1) / (standing.accepted + 1 / settings.newcomer + bad)


class _StandingsFile(msgspec.Struct, frozen=True):
    """What is on disk: windows are counted from a swarm's beginning, so it is one swarm's."""

    swarm_id: Digest
    standings: tuple[Standing, ...]


def save_standings(path: Path, swarm_id: Digest, standings: Sequence[Standing]) -> None:
    """Replace `path`. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.encode(_StandingsFile(swarm_id, tuple(standings))))


def load_standings(path: Path, swarm_id: Digest) -> tuple[Standing, ...]:
    """What was saved for this swarm; nothing when the file is missing, damaged or another swarm's."""
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=_StandingsFile)
    except (OSError, msgspec.MsgspecError):
        return ()
    return saved.standings if saved.swarm_id == swarm_id else ()

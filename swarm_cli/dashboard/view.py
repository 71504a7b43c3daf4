"""What the screen knows about one node: an immutable `NodeView`, folded from events.

`fold(view, event)` is pure and bounded: histories keep the newest entries, snapshots replace the last one.
Widgets read a `NodeView` and nothing else, so a frozen view is a frozen screen. There is no clock here: "now"
is the time of the newest event, which a running node renews twice a second and a replay carries with it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from node.events import (
    MAX_SHOWN_CHARS,
    Evaluated,
    Event,
    GroupJudged,
    Health,
    NodeStarted,
    NodeStopped,
    Notice,
    PeersSeen,
    PeerStatus,
    StagesSeen,
    StageStatus,
    StepDone,
    WeightsSeen,
    inert,
)

__all__ = ["Link", "NodeView", "NumberedGroup", "fold", "inert_event", "lose_line", "set_link"]

MAX_STEPS = 480
MAX_EVALUATIONS = 100
MAX_GROUPS = 200
MAX_NOTICES = 200
MAX_INT = 2**63

E = TypeVar("E", bound=Event)


class Link(StrEnum):
    """How this view is fed."""

    CONNECTING = "connecting"
    LIVE = "live"
    GONE = "gone"
    """The socket closed without a word or refuses; it is tried again."""
    STOPPED = "stopped"
    """The node said that it stopped; its socket is tried again too."""
    REPLAY = "replay"
    ENDED = "ended"
    """The replay came to its end."""


class NumberedGroup(msgspec.Struct, frozen=True):
    """A judged group with its place in the feed: the same digest may be judged more than once."""

    number: int
    event: GroupJudged


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """Everything shown about one node."""

    label: str
    """What the operator calls this feed, until the node says its name."""
    link: Link = Link.CONNECTING
    at: int = 0
    """Time of the newest event, milliseconds."""
    started: NodeStarted | None = None
    stopped: NodeStopped | None = None
    stages: tuple[StageStatus, ...] = ()
    peers: tuple[PeerStatus, ...] = ()
    steps: tuple[StepDone, ...] = ()
    before: Evaluated | None = None
    """Held-out result before the first step."""
    evaluations: tuple[Evaluated, ...] = ()
    groups: tuple[NumberedGroup, ...] = ()
    groups_judged: int = 0
    notices: tuple[Notice, ...] = ()
    weights: WeightsSeen | None = None
    """How the weights of this node's lineage, or of the one it follows, travel."""
    health: Health | None = None
    malformed: int = 0
    """Lines of the feed that could not be read."""

    @property
    def name(self) -> str:
        return self.started.name if self.started else self.label

    @property
    def peer_id(self) -> str:
        return self.started.peer_id if self.started else ""

    @property
    def role(self) -> str:
        return self.started.role if self.started else "trainer"

    @property
    def policy_version(self) -> int:
        """Newest version this node made or evaluated, for a follower that it generates with; -1 before."""
        if self.role == "follower":
            return self.weights.policy_version if self.weights else -1
        made = self.steps[-1].policy_version if self.steps else -1
        measured = self.evaluations[-1].policy_version if self.evaluations else -1
        return max(made, measured)

    @property
    def uptime_s(self) -> float:
        return max(0, self.at - self.started.at) / 1000 if self.started else 0.0

    @property
    def connected(self) -> int:
        return sum(peer.connected for peer in self.peers)

    @property
    def frozen(self) -> int:
        """Peers whose link stands and whose application does not answer."""
        return sum(peer.frozen for peer in self.peers)

    def name_of(self, peer_id: str) -> str:
        """Name of a peer, or the tail of its id where it told none."""
        if peer_id == self.peer_id:
            return self.name
        for peer in self.peers:
            if peer.peer_id == peer_id and peer.name:
                return peer.name
        return f"…{peer_id[-8:]}"


def _place(peer: PeerStatus) -> tuple[bool, bool, str, str]:
    """Connected peers first, then frozen ones, each by name."""
    return not peer.connected, not peer.frozen, peer.name, peer.peer_id


def fold(view: NodeView, event: Event) -> NodeView:
    """The view after `event`, whose text is taken to be inert already (`inert_event`)."""
    view = replace(view, at=max(view.at, event.at))
    match event:
        case NodeStarted():
            return _start(view, event)
        case StagesSeen(stages=stages):
            return replace(view, stages=stages)
        case PeersSeen(peers=peers):
            once = {peer.peer_id: peer for peer in peers}.values()
            ordered = sorted(
                once, key=lambda peer: (not peer.connected, not peer.frozen, peer.name, peer.peer_id)
            )
            return replace(view, peers=tuple(ordered))
        case StepDone():
            return replace(view, steps=(*_before_version(view.steps, event), event)[-MAX_STEPS:])
        case Evaluated():
            return _evaluate(view, event)
        case GroupJudged():
            number = view.groups_judged + 1
            groups = (*view.groups, NumberedGroup(number, event))[-MAX_GROUPS:]
            return replace(view, groups=groups, groups_judged=number)
        case Notice():
            return replace(view, notices=(*view.notices, event)[-MAX_NOTICES:])
        case WeightsSeen():
            return replace(view, weights=event)
        case Health():
            return replace(view, health=event)
        case NodeStopped():
            link = Link.STOPPED if view.link is Link.LIVE else view.link
            return replace(view, stopped=event, link=link)
        case _:
            return view


def lose_line(view: NodeView) -> NodeView:
    """The view after a line that could not be read."""
    return replace(view, malformed=view.malformed + 1)


def set_link(view: NodeView, link: Link) -> NodeView:
    """The view with another state of its feed."""
    return view if view.link is link else replace(view, link=link)


def inert_event(event: E) -> E:
    """`event` with every text in it made harmless for a screen: a recorded file may come from anywhere."""
    return msgspec.convert(_inert(msgspec.to_builtins(event)), type(event))


def _inert(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= MAX_SHOWN_CHARS and value.isprintable() else inert(value)
    if isinstance(value, int):
        return (
            value if abs(value) < MAX_INT else MAX_INT
        )  # a number that float() cannot take is no number here
    if isinstance(value, dict):
        return {_inert(key): _inert(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_inert(item) for item in value]
    return value


def _start(view: NodeView, event: NodeStarted) -> NodeView:
    """A run begins. The same node resuming keeps its curves; another one in the same file starts afresh."""
    fresh = NodeView(
        label=view.label,
        link=Link.LIVE if view.link is Link.STOPPED else view.link,
        at=view.at,
        started=event,
        notices=view.notices,
        malformed=view.malformed,
    )
    known = view.started or event
    if (known.peer_id, known.swarm_id, known.model) != (event.peer_id, event.swarm_id, event.model):
        return fresh
    return replace(
        fresh,
        steps=view.steps,
        before=view.before,
        evaluations=view.evaluations,
        groups=view.groups,
        groups_judged=view.groups_judged,
    )


def _before_version(steps: tuple[StepDone, ...], event: StepDone) -> tuple[StepDone, ...]:
    """A node resumed from a checkpoint makes some versions again: the new ones replace the old."""
    if event.skipped or not steps or steps[-1].policy_version < event.policy_version:
        return steps
    return tuple(step for step in steps if step.policy_version < event.policy_version)


def _evaluate(view: NodeView, event: Evaluated) -> NodeView:
    before = view.before
    if event.moment == "before" and (before is None or event.policy_version <= before.policy_version):
        before = event
    return replace(view, before=before, evaluations=(*view.evaluations, event)[-MAX_EVALUATIONS:])

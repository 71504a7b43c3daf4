"""This node as a member of one swarm: its identity, the charter, and swarm time in windows.

For: whatever speaks to peers or asks how old something is. Not for other members (`node/peers/`) nor for
tunable settings (`node/config.py`).
"""

from __future__ import annotations

from node.clock import Clock
from protocol.charter import swarm_id
from protocol.identity import Identity
from protocol.messages import Charter, PeerId, PromptRef
from protocol.prompts import window_of

__all__ = ["Membership"]


class Membership:
    """Identity and charter, and the current window by `clock`."""

    def __init__(self, identity: Identity, charter: Charter, clock: Clock) -> None:
        self.identity = identity
        self.charter = charter
        self.swarm_id = swarm_id(charter)
        self._clock = clock

    @property
    def peer_id(self) -> PeerId:
        """This node's own."""
        return self.identity.peer_id

    def window(self) -> float:
        """Swarm time in windows since the founding, with the elapsed fraction of the current one."""
        now_ms, charter = self._clock.now_ms(), self.charter
        inside_ms = (now_ms - charter.created_at) % charter.window_ms
        return window_of(charter, now_ms) + inside_ms / charter.window_ms

    def too_old(self, prompt: PromptRef) -> bool:
        """Whether peers refuse a group of this slot for its age."""
        return int(self.window()) - prompt.window > self.charter.rules.max_age_windows

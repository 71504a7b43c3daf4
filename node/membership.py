"""This node as a member of one swarm: its identity, the charter, who else is a member, and time in windows.

For: whatever speaks to peers or asks how old something is. In a closed swarm everybody's token comes with the
handshake and with announcements; `admit` checks it once and remembers it. Not for what peers do
(`node/peers/book.py`) nor for tunable settings (`node/config.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cachetools import FIFOCache

from node.clock import Clock
from protocol.annex import check_annex, is_member, newer, token_name
from protocol.charter import swarm_id
from protocol.identity import Identity
from protocol.messages import Annex, Charter, EnvironmentPin, EnvironmentPins, MemberToken, PeerId, PromptRef
from protocol.prompts import environment_of, window_of

__all__ = ["Membership"]

MAX_TOKENS = 4096
"""Members of a closed swarm that are remembered; others show their token again."""


class Membership:
    """Identity and charter, and the current window by `clock`. `token` is this node's own, for a closed
    swarm; `keep` stores an annex that is newer than the one known."""

    def __init__(
        self,
        identity: Identity,
        charter: Charter,
        clock: Clock,
        *,
        pins: Mapping[str, str] | None = None,
        token: MemberToken | None = None,
        keep: Callable[[Annex], None] = lambda annex: None,
    ) -> None:
        self.identity = identity
        self.charter = charter
        self.swarm_id = swarm_id(charter)
        self.token = token
        self.annex: Annex | None = None
        """The newest one known."""
        self._clock = clock
        self._keep = keep
        self.pins = dict(pins or {})
        """What this node has installed, by environment, where that is known."""
        self._tokens: FIFOCache[PeerId, MemberToken] = FIFOCache(MAX_TOKENS)

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

    # --- members ------------------------------------------------------------------------------------------

    def admit(self, peer_id: PeerId, token: MemberToken | None) -> bool:
        """Whether this peer is a member, as it shows by `token` now or showed before."""
        if self.is_member(peer_id):
            return True
        if not is_member(self.charter, self.annex, peer_id, token, self._clock.now_ms()):
            return False
        if token is not None:
            self._tokens[peer_id] = token
        return True

    def is_member(self, peer_id: PeerId) -> bool:
        """Whether this peer is a member for what is known of it: everybody in an open swarm."""
        token = self._tokens.get(peer_id)
        if token is not None:  # its signature was checked
            return self._clock.now_ms() < token.expires_at
        return is_member(self.charter, self.annex, peer_id, None, self._clock.now_ms())

    def renew(self, annex: Annex) -> bool:
        """Take over an annex that somebody sent; whether it is newer than the one known. Tokens that it
        revokes are forgotten. Raises RemoteProtocolError for a wrong signer, or another content under the
        same sequence."""
        check_annex(annex, self.charter)
        before = self.annex
        self.annex = newer(before, annex)
        for peer_id, token in list(self._tokens.items()):
            if token_name(token) in self.annex.revoked:
                del self._tokens[peer_id]
        if self.annex is before:
            return False
        self._keep(self.annex)
        return True

    # --- environments -------------------------------------------------------------------------------------

    def pin(self, prompt: PromptRef) -> str:
        """What this node has installed of the environment that a prompt belongs to, "" where not known."""
        return self.pins.get(environment_of(self.charter, prompt.index).name, "")

    @property
    def environments(self) -> EnvironmentPins:
        """What this node has installed, as it tells others."""
        names = (spec.name for spec in self.charter.environments)
        return tuple(EnvironmentPin(name, self.pins[name]) for name in names if self.pins.get(name))

    def mismatches(self, theirs: EnvironmentPins) -> tuple[tuple[str, str, str], ...]:
        """Environments of which a peer has something else: name, own pin, its pin."""
        return tuple(
            (each.name, self.pins[each.name], each.pin)
            for each in theirs
            if self.pins.get(each.name) and each.pin and each.pin != self.pins[each.name]
        )

"""Partners tell each other who has contributed to the next merge, until nothing new comes.

    asker                                                   partner
        MergeRequest (base, rule, digests) ----------------->
        <-------------- MergeReply, SignedLinks, SignedRemovals, none when it holds nothing new
        each checked --> MergeSet

Both ends ask, nobody pushes; what is taken from one is answered to the next. A partner is blamed for what it
should not have passed on, an author for what it signed. Only authors that this node admits get into its set,
else invented keys would push honest ones out; sets of nodes that admit others stay different, and the digest
of what was taken from a partner saves asking for it again. Not for when rounds are: `merger.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection

from node.events import NoticeLevel
from node.membership import Membership
from node.peers.backoff import Backoff
from node.runtime import Runtime
from node.transport.base import Stream
from node.transport.limits import KeyedTokenBuckets
from node.weights.merge.contributions import MAX_SIGNED_REMOVAL_BYTES, MergeError, MergeSet, decode_removal
from node.weights.merge.resolve import MergeRule
from node.weights.sharing import WeightsSharing
from protocol.codec import decode, encode
from protocol.constants import MAX_CONTRIBUTIONS
from protocol.errors import DeadlineError, FreshnessError, LimitError, RemoteProtocolError, TransportError
from protocol.links import MAX_SIGNED_LINK_BYTES, decode_link
from protocol.merge_messages import MergeReply, MergeRequest, SignedRemoval
from protocol.messages import Digest, PeerId, SignedLink
from protocol.topics import MERGE_PROTOCOL

__all__ = ["MergeExchange"]

POLL_S = 1.0
"""Time between two requests to one partner."""
_ASK_S = 15.0
"""How long an answer may take."""
_FANOUT = 8
"""Partners that are asked at a time, the next ones the time after."""
_CHANGES = 3
"""New contributions or removals of one author in a round: one, and older ones that others still hold."""
_SLICE = 16
"""Contributions, each with a signature to check, between two turns of the event loop."""
_REMEMBERED_PEERS = 256
_MAX_REQUEST_BYTES = 512
_MAX_REPLY_BYTES = 512
_ITEMS_PER_S, _ITEM_BURST = 64.0, 16 * MAX_CONTRIBUTIONS
"""Contributions and removals to and from one peer: each costs a signature check where it arrives."""


class MergeExchange:
    """This node's set of contributions, `set`, and its exchange with the trainers that `sharing` is connected
    to. Serves it from the start. A contribution may be dated at most a window ahead of this clock, and its
    blob have at most `max_bytes`."""

    def __init__(
        self,
        runtime: Runtime,
        membership: Membership,
        contributions: MergeSet,
        sharing: WeightsSharing,
        rule: MergeRule,
        max_bytes: int,
    ) -> None:
        self.set = contributions
        self._runtime = runtime
        self._membership = membership
        self._network = sharing.network
        self._peers = sharing.peers
        self._rule = rule.digest()
        self._max_bytes = max_bytes
        self._served = KeyedTokenBuckets(_ITEMS_PER_S, _ITEM_BURST)
        self._received = KeyedTokenBuckets(_ITEMS_PER_S, _ITEM_BURST)
        self._withdrawn = False
        self._told: set[str] = set()
        self._changed_s = 0.0
        self._changes: Counter[PeerId] = Counter()
        """New contributions and removals of others in this round."""
        self._taken: dict[PeerId, Digest] = {}
        """Sets of partners that were taken as a whole in this round."""
        self._aside: set[PeerId] = set()
        """Partners whose answer was wrong in this round."""
        self._rests: Backoff[PeerId] = Backoff(POLL_S, _ASK_S, max_keys=_REMEMBERED_PEERS)
        """When partners that did not answer are asked again."""
        self._turn = 0
        self._network.transport.serve(MERGE_PROTOCOL, self._serve)

    def partners(self) -> list[PeerId]:
        """Connected trainers of the base model, in order of peer ids."""
        return self._network.trainers_of(self.set.base_model)

    # --- this node's own ----------------------------------------------------------------------------------

    def contribute(self, signed: SignedLink) -> None:
        """Add this node's own. Raises as MergeSet.add does."""
        if self.set.add(signed):
            self._changed_s = self._runtime.monotonic_s()
            self._remove_own()

    def withdraw(self) -> None:
        """What this node has contributed counts no more, nor what it may yet hear of an earlier run."""
        self._withdrawn = True
        self._remove_own()

    def _remove_own(self) -> None:
        removal = (
            self.set.removal(self._membership.identity, self._runtime.now_ms()) if self._withdrawn else None
        )
        if removal is not None:
            self.set.remove(removal)

    # --- a round ------------------------------------------------------------------------------------------

    def admits(self, author: PeerId) -> bool:
        """Whether this author's contributions count here, now and in this round: this node's own, and those
        of who has earned trust and does not change them again and again."""
        if author == self._membership.peer_id:
            return True
        return self._changes[author] <= _CHANGES and self._peers.has_earned_trust(author)

    async def settle(self, settle_s: float, until_s: float, own: asyncio.Future[None]) -> None:
        """A new round: ask partners until `own`, by which this node contributes, is done and nothing new came
        for `settle_s`, or until `until_s` of the monotonic clock."""
        self._changes.clear()
        self._taken.clear()
        self._aside.clear()
        self._changed_s = self._runtime.monotonic_s()
        asking: dict[PeerId, asyncio.Task[None]] = {}
        try:
            while True:
                quiet_s = self._changed_s + settle_s if own.done() else until_s
                left_s = min(until_s, quiet_s) - self._runtime.monotonic_s()
                if left_s <= 0:
                    return
                for peer_id in self._next_partners(asking):
                    asking[peer_id] = asyncio.create_task(self.ask(peer_id))
                await asyncio.sleep(min(POLL_S, max(left_s, 0.01)))
                for peer_id in [peer_id for peer_id, task in asking.items() if task.done()]:
                    asking.pop(peer_id).result()
        finally:
            for task in asking.values():
                task.cancel()
            await asyncio.gather(*asking.values(), return_exceptions=True)

    def _next_partners(self, asking: Collection[PeerId]) -> list[PeerId]:
        me, now_s = self._membership.peer_id, self._runtime.monotonic_s()
        idle = [
            peer_id
            for peer_id in self.partners()
            if peer_id != me and peer_id not in asking and peer_id not in self._aside
            if not self._rests.ready_in_s(peer_id, now_s)
        ]
        start = self._turn % len(idle) if idle else 0
        self._turn += _FANOUT
        return [*idle[start:], *idle[:start]][:_FANOUT]

    # --- asking -------------------------------------------------------------------------------------------

    async def ask(self, peer_id: PeerId) -> None:
        """Take in what one partner has heard. What is wrong with its answer is counted against it."""
        try:
            await self._take_from(peer_id)
        except (DeadlineError, TransportError) as error:
            if isinstance(error, DeadlineError):
                self._peers.refused(peer_id, "deadline")
            self._rests.failed(peer_id, self._runtime.monotonic_s())
        except RemoteProtocolError as error:
            self._peers.refused(peer_id, error.reason)
            self._aside.add(peer_id)
        else:
            self._rests.succeeded(peer_id)

    async def _take_from(self, peer_id: PeerId) -> None:
        try:
            async with asyncio.timeout(_ASK_S):
                stream = await self._network.transport.open_stream(peer_id, MERGE_PROTOCOL)
                try:
                    await self._asked(stream)
                finally:
                    await stream.close()
        except TimeoutError:
            raise DeadlineError(f"contributions from {peer_id}", _ASK_S) from None

    async def _asked(self, stream: Stream) -> None:
        mine, peer_id = self.set.whole_digest(), stream.peer_id
        taken = self._taken.get(peer_id, mine)
        await stream.send(encode(MergeRequest(self.set.base_model, self.set.base, self._rule, mine, taken)))
        reply = decode(await stream.receive(_MAX_REPLY_BYTES), MergeReply, max_bytes=_MAX_REPLY_BYTES)
        if reply.base != self.set.base:
            raise self._stranger(f"{peer_id} merges other weights than this node", "merge_base")
        if reply.rule != self._rule:
            raise self._stranger(f"{peer_id} merges by another rule than this node", "merge_rule")
        count = reply.links + reply.removals
        if count and not self._received.take(peer_id, self._runtime.monotonic_s(), count):
            raise LimitError(
                f"{peer_id} sends {count} more contributions; {_ITEMS_PER_S:g} a second are taken",
                reason="merge_rate",
            )
        whole = True
        for number in range(count):
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            try:
                if number < reply.links:
                    data = await stream.receive(MAX_SIGNED_LINK_BYTES)
                    link = decode(data, SignedLink, max_bytes=MAX_SIGNED_LINK_BYTES)
                    self._take_link(link)
                else:
                    data = await stream.receive(MAX_SIGNED_REMOVAL_BYTES)
                    removal = decode(data, SignedRemoval, max_bytes=MAX_SIGNED_REMOVAL_BYTES)
                    self._take_removal(removal)
            except FreshnessError as error:  # to be heard again, once its time has come
                self._peers.refused(peer_id, error.reason)
                whole = False
        if whole:
            self._taken[peer_id] = reply.held

    def _stranger(self, message: str, reason: str) -> MergeError:
        """For a partner that cannot be merged with; the first one is told."""
        if reason not in self._told:
            self._told.add(reason)
            self._runtime.notice(NoticeLevel.WARNING, f"{message}; nothing is taken from such nodes")
        return MergeError(message, reason=reason)

    def _take_link(self, signed: SignedLink) -> None:
        """Take one in, if its author is admitted. Raises RemoteProtocolError for what nobody should have
        passed on."""
        link = decode_link(signed)
        author = link.lineage.owner
        if not self.admits(author):
            return
        if link.created_at > self._runtime.now_ms() + self._membership.charter.window_ms:
            raise FreshnessError(f"a contribution of {author} is dated in the future", reason="merge_future")
        if link.blob.size > self._max_bytes:
            raise LimitError(
                f"{author} contributes {link.blob.size} bytes on weights of {self._max_bytes}",
                reason="merge_size",
            )
        if self.set.add(signed):
            self._changed(author)

    def _take_removal(self, signed: SignedRemoval) -> None:
        author = decode_removal(signed).author
        if self.admits(author) and self.set.remove(signed):
            self._changed(author)

    def _changed(self, author: PeerId) -> None:
        if author == self._membership.peer_id:
            self._remove_own()  # heard of an earlier run
            return
        self._changes[author] += 1
        if self._changes[author] > _CHANGES:
            self._peers.refused(author, "merge_restless")
        else:
            self._changed_s = self._runtime.monotonic_s()

    # --- serving ------------------------------------------------------------------------------------------

    async def _serve(self, stream: Stream) -> None:
        request = decode(await stream.receive(_MAX_REQUEST_BYTES), MergeRequest, max_bytes=_MAX_REQUEST_BYTES)
        same_merge = (self.set.base_model, self.set.base, self._rule)
        mine = self.set.whole_digest()
        links: list[SignedLink] = []
        removals: list[SignedRemoval] = []
        if (request.base_model, request.base, request.rule) == same_merge and mine not in (
            request.held,
            request.taken,
        ):
            links, removals = self.set.links(), self.set.removals()
        count = max(1, len(links) + len(removals))
        if not self._served.take(stream.peer_id, self._runtime.monotonic_s(), count):
            raise LimitError(
                f"{stream.peer_id} asks for {count} more contributions; {_ITEMS_PER_S:g} a second are given",
                reason="merge_rate",
            )
        reply = MergeReply(self.set.base, self._rule, mine, len(links), len(removals))
        for each in (reply, *links, *removals):
            await stream.send(encode(each))

"""A follower's weights: kept at the newest version that the owner of a lineage published.

    HEAR     long poll at the owner, and at one other member --> links, each signed by the owner --> chain
    ADVANCE  path from the version here to the newest --> blobs, some ahead --> applied --> on_version

A version is applied as a whole or not at all, and what is here stays as it is when a link or a blob is wrong:
the fault is counted, against the owner for what it signed, else against whoever sent it; the next anchor may
lead around it. An owner that contradicts itself (fork, rollback) is not followed any further. What was
applied is kept, and anchors are made again from the weights that are here (the same bytes as the owner's), so
that every follower can serve a newcomer. Not for choosing an owner (`choose.py`), nor for engines.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from cachetools import FIFOCache

from node.compute import Lane
from node.durable import LeftOut
from node.events import NoticeLevel
from node.peers.backoff import Backoff
from node.peers.trust import Hardness
from node.runtime import Runtime
from node.supervise import run_stages
from node.weights.chain.apply import THREADS, apply_link
from node.weights.chain.base import Base
from node.weights.chain.bf16 import U16
from node.weights.chain.chain import Chain, ChainError
from node.weights.chain.chains import MAX_WAIT_S
from node.weights.exchange.store import StoredBlob
from node.weights.sharing import WeightsSharing
from protocol.constants import MAX_CHAIN_LINKS
from protocol.delta import encode, max_delta_bytes
from protocol.errors import (
    DeadlineError,
    DecodeError,
    LimitError,
    OurFault,
    RemoteProtocolError,
    TransportError,
)
from protocol.messages import Digest, Lineage, PeerId, SignedLink, WeightsLink

__all__ = ["Tracker", "useless_blobs"]

ROUND_S = 1.0
"""Shortest time between two requests to one peer that brought nothing."""
MAX_REST_S = 15.0
"""Longest time that a peer is left alone after failures in a row; the first time it is ROUND_S."""
AHEAD = 4
"""Blobs that are fetched while an earlier one is applied: as many as the exchange asks one peer for."""
STALL_S = 60.0
"""A blob of which no chunk comes for so long is given up."""
LATE_S = 600.0
"""How long another way is taken where there is one: whoever kept that blob may have let it go."""
_SLICE = 16
"""Links, each with a signature to check, between two turns of the event loop."""
_REMEMBERED_PEERS = 256


def useless_blobs() -> FIFOCache[Digest, None]:
    """An empty set of blobs' roots. It holds more than a chain can name, so that none is tried twice."""
    return FIFOCache(2 * MAX_CHAIN_LINKS)


class Tracker:
    """Follows `lineage`, whose anchors start from `base`. `on_version(version, weights)` is called for every
    version reached, the newest where several came at once; the weights are the tracker's own and change once
    it returns, so it copies what it keeps; what it raises ends `run`. `useless` holds the roots of blobs that
    are of no use, from one tracker to the next, so that none is held against an owner twice."""

    def __init__(
        self,
        runtime: Runtime,
        lineage: Lineage,
        base: Base,
        sharing: WeightsSharing,
        useless: FIFOCache[Digest, None],
        on_version: Callable[[int, dict[str, U16]], Awaitable[None]],
    ) -> None:
        self._runtime = runtime
        self._keeping = LeftOut(runtime, "versions of the owner")
        self._anchors = LeftOut(runtime, "anchors of the owner")
        self._lineage = lineage
        self._base = base.bits
        self._base_digest = base.digest
        self._sharing = sharing
        self._chains = sharing.chains
        self._store = sharing.store
        self._useless = useless
        self._on_version = on_version
        self._opened: Chain | None = None
        self._bits: dict[str, U16] | None = None
        self._at = -1
        """Version of `_bits`."""
        self._made: Digest = ""
        """Root of the anchor that was made last, or tried."""
        self._late: dict[Digest, float] = {}
        """Roots of blobs that did not come, and until when they are not waited for."""
        self._rests: Backoff[PeerId] = Backoff(ROUND_S, MAX_REST_S, max_keys=_REMEMBERED_PEERS)
        """When peers that failed are asked again."""
        self._end = asyncio.Event()
        self._heard_s: float | None = None
        self.version = -1
        """Version that `on_version` was called with last."""
        self.digest: Digest = ""
        """Hash of the weights that are here."""
        self.stopped = ""
        """Why the owner is not followed any more: chain_fork, chain_rollback."""
        self.misled = ""
        """How the owner's last blob of that kind was not what its link says: reason of the refusal."""

    @property
    def lag(self) -> int:
        """Versions from the one here to the newest one known."""
        head = self._opened.head if self._opened is not None else None
        return max(0, head.policy_version - self.version) if head is not None else 0

    @property
    def signs_of_life_s(self) -> float:
        """Seconds since the owner answered, or a new link of it came; infinite once it is not followed any
        more."""
        if self.stopped:
            return math.inf
        return self._runtime.monotonic_s() - self._heard_s if self._heard_s is not None else 0.0

    async def run(self) -> None:
        """Follow until cancelled, or until the owner contradicts itself (`stopped`). Begins with what an
        earlier run left on the disk."""
        self._heard_s = self._runtime.monotonic_s()
        self._opened = await self._runtime.run(
            Lane.BROADCAST, self._chains.open, self._lineage, [self._base_digest]
        )
        if self._opened.evidence:
            self.stopped = "chain_fork"
            return
        await run_stages(
            {
                "hear_owner": self._hear(self._owner),
                "hear_member": self._hear(self._member),
                "advance": self._advance(),
            },
            until=self._end,
        )

    # --- hear ---------------------------------------------------------------------------------------------

    async def _hear(self, choose: Callable[[], PeerId | None]) -> None:
        while True:
            began_s = self._runtime.monotonic_s()
            peer_id = choose()
            if peer_id is None or not await self._ask(peer_id):
                await asyncio.sleep(max(0.0, began_s + ROUND_S - self._runtime.monotonic_s()))

    def _owner(self) -> PeerId | None:
        return None if self._rests_now(self._lineage.owner) else self._lineage.owner

    def _member(self) -> PeerId | None:
        """Another member: the next one in order of peer ids that does not rest, so that not all ask one."""
        me = self._chains.peer_id
        members = [peer for peer in self._sharing.members() if peer not in (me, self._lineage.owner)]
        awake = [peer for peer in members if not self._rests_now(peer)]
        return min(awake, key=lambda peer: (peer < me, peer), default=None)

    async def _ask(self, peer_id: PeerId) -> bool:
        """Whether this peer had news."""
        head = self._chain().head
        after = head.policy_version if head is not None else None
        try:
            links = await self._chains.ask(peer_id, self._lineage, after, MAX_WAIT_S)
            news = await self._learn(peer_id, after, links)
        except DeadlineError:
            self._sharing.peers.refused(peer_id, "deadline")
        except TransportError:
            pass  # it is not there
        except RemoteProtocolError as error:
            self._sharing.peers.refused(
                self._lineage.owner if _is_the_owners(error) else peer_id, error.reason
            )
            if isinstance(error, ChainError) and error.evidence:
                self.stopped = error.reason
                self._end.set()
        else:
            self._rests.succeeded(peer_id)
            if peer_id == self._lineage.owner:
                self._heard_s = self._runtime.monotonic_s()
            return news
        self._rests.failed(peer_id, self._runtime.monotonic_s())
        return False

    async def _learn(self, peer_id: PeerId, after: int | None, links: Sequence[SignedLink]) -> bool:
        """Whether one of these links was new. All that fit are taken in before the first error is raised: an
        anchor may follow a link that does not fit."""
        chain, news, wrong = self._chain(), False, None
        for number, signed in enumerate(links):
            if number % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            try:
                link = self._chains.learn(chain, signed)
            except ChainError as error:
                if error.reason not in ("chain_base", "chain_gap"):
                    raise
                wrong = wrong or error
            else:
                if link is not None:
                    news = True
                    self._heard_s = self._runtime.monotonic_s()
        if wrong is not None:
            raise wrong
        if peer_id == self._lineage.owner and links:
            chain.check_head(links[-1], after)
        return news

    def _rests_now(self, peer_id: PeerId) -> bool:
        return self._rests.ready_in_s(peer_id, self._runtime.monotonic_s()) > 0

    # --- advance ------------------------------------------------------------------------------------------

    async def _advance(self) -> None:
        rest_s = ROUND_S
        while True:
            await self._keep_anchor()  # that of a version may be heard of together with the next version
            changes = self._chains.changes
            path = self._path()
            if not path:
                await self._chains.changed(changes)
                continue
            try:
                await self._walk(path)
            except (DeadlineError, OurFault, OSError) as error:
                if not isinstance(error, DeadlineError):
                    self._keeping.failed(f"version {path[-1].policy_version} waits: {error}")
                await self._activate()
                await asyncio.sleep(rest_s)
                rest_s = min(2 * rest_s, MAX_REST_S)
            else:
                await self._activate()
                self._keeping.worked()
                rest_s = ROUND_S

    def _path(self) -> list[WeightsLink]:
        at = self._at if self._bits is not None else None
        now_s = self._runtime.monotonic_s()
        self._late = {root: until_s for root, until_s in self._late.items() if now_s < until_s}
        around = self._chain().path(at, cost=self._cost, avoid={*self._useless, *self._late})
        return around or self._chain().path(at, cost=self._cost, avoid=self._useless)

    def _cost(self, link: WeightsLink) -> float:
        """Bytes still to be fetched."""
        return 0 if self._here(link) else link.blob.size

    def _here(self, link: WeightsLink) -> bool:
        stored = self._store.get(link.blob.root)
        return stored is not None and stored.complete

    async def _walk(self, path: Sequence[WeightsLink]) -> None:
        """Fetch and apply these links, as far as they are what they say. Raises DeadlineError, or OurFault
        when the disk does not take a blob."""
        self._pin(path)
        fetches: deque[asyncio.Task[StoredBlob]] = deque()
        try:
            for number, link in enumerate(path):
                for following in path[number + len(fetches) : number + AHEAD]:
                    fetches.append(asyncio.create_task(self._fetch(following)))
                try:
                    with self._sharing.gauge.waiting("weights"):
                        stored = await fetches[0]
                    fetches.popleft()
                    if number + AHEAD < len(path):
                        fetches.append(asyncio.create_task(self._fetch(path[number + AHEAD])))
                    with self._sharing.gauge.working():
                        await self._runtime.run(Lane.APPLY, self._apply, link, stored)
                except LimitError as error:  # larger than the store
                    self._refuse(link, error)
                    self._runtime.notice(
                        NoticeLevel.WARNING, f"version {link.policy_version} cannot be kept: {error}"
                    )
                    return
                except RemoteProtocolError as error:
                    self._refuse(link, error)
                    return
                await self._keep_anchor()
        finally:
            for fetch in fetches:
                fetch.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)

    async def _fetch(self, link: WeightsLink) -> StoredBlob:
        most = max_delta_bytes(self._base)
        if link.blob.size > most:
            raise DecodeError(f"a blob of {link.blob.size} bytes for weights of {most}", reason="delta_size")
        fetch = asyncio.create_task(
            self._sharing.exchange.fetch(link.blob, self._sharing.settings.fetch_timeout_s)
        )
        try:
            have = -1
            while not (await asyncio.wait([fetch], timeout=STALL_S))[0]:
                have, before = self._chunks_of(link.blob.root), have
                if have == before:
                    raise DeadlineError(f"a chunk of version {link.policy_version}", STALL_S)
            return fetch.result()
        except DeadlineError:
            self._late[link.blob.root] = self._runtime.monotonic_s() + LATE_S
            raise
        finally:
            fetch.cancel()
            await asyncio.gather(fetch, return_exceptions=True)

    def _chunks_of(self, root: Digest) -> int:
        return sum(each.have for each in self._sharing.exchange.progress() if each.root == root)

    def _apply(self, link: WeightsLink, stored: StoredBlob) -> None:
        """Blocking."""
        self._bits = apply_link(link, stored.data(), self._bits, self._base)
        self._at, self.digest = link.policy_version, link.result

    def _refuse(self, link: WeightsLink, error: RemoteProtocolError) -> None:
        """The owner signed a blob that is of no use: one that is too large for this node, or that is not what
        its link says."""
        peers, owner = self._sharing.peers, self._lineage.owner
        peers.refused(owner, error.reason)
        if isinstance(error, DecodeError):
            self.misled = error.reason
            peers.judged(owner, Hardness.HARD)
        self._useless[link.blob.root] = None

    async def _activate(self) -> None:
        """Tell of the version that is here, if it is newer than the last one told."""
        if self._bits is None or self._at <= self.version:
            return
        version = self._at
        await self._on_version(version, self._bits)
        self.version = version
        self._pin()

    async def _keep_anchor(self) -> None:
        """Where the newest anchor is of the version that is here: make its blob, to serve newcomers."""
        anchor = self._chain().anchor
        if anchor is None or self._bits is None or anchor.policy_version != self._at:
            return
        if self._here(anchor) or anchor.blob.root == self._made:
            return
        self._made = anchor.blob.root
        data = await self._runtime.run(
            Lane.BROADCAST,
            encode,
            self._base,
            self._bits,
            base_digest=anchor.base,
            new_digest=anchor.result,
            threads=THREADS,
        )
        if len(data) == anchor.blob.size:  # else it was made by another version of the coder
            try:
                await self._runtime.run(Lane.DISK, self._store.add, data)
            except (OurFault, OSError) as error:
                self._anchors.failed(f"the anchor of version {anchor.policy_version} is not kept: {error}")
            else:
                self._anchors.worked()

    def _pin(self, path: Sequence[WeightsLink] = ()) -> None:
        """Keep what others may need, and what is on its way."""
        kept = self._chain().worth_keeping(self._store.max_bytes // 2, strictly=True)
        self._store.pin({*kept, *(link.blob.root for link in path)})

    def _chain(self) -> Chain:
        if self._opened is None:
            raise OurFault("the tracker does not run")
        return self._opened


def _is_the_owners(error: RemoteProtocolError) -> bool:
    """Whether it lies in what the owner signed, whoever passed it on."""
    return isinstance(error, ChainError) and error.reason not in ("chain_gap", "chain_owner")

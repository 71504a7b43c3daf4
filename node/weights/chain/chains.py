"""The chains that this node knows: kept on disk, served to others, asked for from others.

    follower                                        whoever has the chain
        ChainRequest (after, wait_ms) ------------->
                                                    waits for a newer version, at most wait_ms
        <------------- ChainReply, SignedLinks

A link says itself who signed it, so it does not matter from whom it comes. The own chain outlives `kill -9`:
a link is on the disk (`commit`) before anybody hears of it. Links of others may be lost and are asked for
again. Not for what a chain allows (`chain.py`), nor for weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.transport.base import Stream, Transport
from node.transport.limits import KeyedTokenBuckets
from node.weights.chain.chain import Chain, ChainError
from node.weights.chain.file import ChainFile
from protocol.codec import decode, encode
from protocol.constants import MAX_CHAIN_LINKS
from protocol.errors import DeadlineError, LimitError, OurFault, RemoteProtocolError
from protocol.links import MAX_SIGNED_LINK_BYTES
from protocol.messages import ChainReply, ChainRequest, Digest, Lineage, PeerId, SignedLink, WeightsLink
from protocol.topics import CHAIN_PROTOCOL

__all__ = ["MAX_WAIT_S", "Chains"]

log = logging.getLogger(__name__)

MAX_WAIT_S = 15.0
"""How long an answer may wait for news (ChainRequest.wait_ms)."""
_ANSWER_S = 15.0
"""How long an answer may take once there is something to say."""
_WAITERS, _WAITERS_PER_PEER = 192, 4
"""Requests that wait for news: fewer than the streams that a transport allows, so that others still pass."""
_MAX_REQUEST_BYTES = 512
_MAX_REPLY_BYTES = 64
_LINKS_PER_S, _LINK_BURST = 128.0, 4 * MAX_CHAIN_LINKS
"""Links to and from one peer: each costs a signature check where it arrives."""
_WANTED_S = 2 * MAX_WAIT_S
"""Whoever follows this node's chain asks for it at least so often."""
_FOLLOWED = 4
"""Chains of others that are kept, the last ones opened."""


@dataclass(slots=True)
class _Opened:
    chain: Chain
    file: ChainFile | None
    own: bool
    changes: int = 0


class Chains:
    """Chains of one swarm, in `folder` (None: in memory only). Serves them from the start."""

    def __init__(self, transport: Transport, swarm_id: Digest, folder: Path | None = None) -> None:
        self._transport = transport
        self._swarm_id = swarm_id
        self._folder = folder
        self._opened: OrderedDict[tuple[PeerId, Digest], _Opened] = OrderedDict()
        self._news = asyncio.Event()
        self.changes = 0
        """Links added so far, to any chain."""
        self._asking = asyncio.Event()
        self._asked_s = -math.inf
        """When this node's own chain was asked for last."""
        self._waiting: Counter[PeerId] = Counter()
        self._served = KeyedTokenBuckets(_LINKS_PER_S, _LINK_BURST)
        self._received = KeyedTokenBuckets(_LINKS_PER_S, _LINK_BURST)
        transport.serve(CHAIN_PROTOCOL, self._serve, deadline_s=MAX_WAIT_S + _ANSWER_S)

    @property
    def peer_id(self) -> PeerId:
        """This node."""
        return self._transport.peer_id

    # --- chains -------------------------------------------------------------------------------------------

    def of(self, owner: PeerId, base_model: Digest) -> Chain | None:
        """The chain of a lineage that was opened."""
        opened = self._opened.get((owner, base_model))
        return opened.chain if opened is not None else None

    def is_kept(self, lineage: Lineage) -> bool:
        """Whether an earlier run, or this one, has left links of this chain on the disk."""
        path = self._path(lineage)
        return path is not None and path.exists()

    def open(self, lineage: Lineage, bases: Collection[Digest]) -> Chain:
        """The chain of `lineage`, with what an earlier run knew of it. `bases`: see Chain. Blocking: up to
        1,024 signatures are checked. Raises OurFault when this node's own chain cannot be read as it was
        written, since then nobody knows which versions it has signed."""
        key = (lineage.owner, lineage.base_model)
        opened = self._opened.get(key)
        if opened is not None and opened.chain.lineage == lineage and opened.chain.bases == frozenset(bases):
            self._opened.move_to_end(key)
            return opened.chain
        own = lineage.owner == self._transport.peer_id
        chain = Chain(self._swarm_id, lineage, bases)
        path = self._path(lineage)
        file = ChainFile(path) if path is not None else None
        if file is not None:
            if own:
                _load_own(chain, file)
            else:
                _load(chain, file)
        self._opened[key] = _Opened(chain, file, own)
        self._opened.move_to_end(key)
        self._forget_old()
        return chain

    def learn(self, chain: Chain, signed: SignedLink) -> WeightsLink | None:
        """Add a link of another owner; None when it is nothing new. Raises as Chain.add does. A fork is
        remembered over restarts."""
        opened = self._of(chain)
        try:
            link = chain.add(signed)
        except ChainError as error:
            if error.evidence and error.evidence[-1] == signed:
                self._write_down(opened, signed)
            raise
        if link is not None:
            self._write_down(opened, signed)
            self._announce(opened)
        return link

    async def commit(
        self, chain: Chain, signed: SignedLink, run_blocking: Callable[..., Awaitable[Any]]
    ) -> None:
        """Add a link of this node's own chain: on the disk first, then for everybody to see. One at a time.
        Raises as Chain.add does, and OSError when the disk refuses; then the chain is as it was."""
        opened = self._of(chain)
        chain.check(signed)
        if opened.file is not None:
            await run_blocking(functools.partial(opened.file.append, signed, durable=True))
        chain.add(signed)
        self._announce(opened)
        if opened.file is not None:
            with contextlib.suppress(OSError):  # it stays longer than need be
                await run_blocking(opened.file.tidy, chain.links())

    async def changed(self, since: int) -> None:
        """Return once `changes` is not `since` any more: a chain has a new link."""
        while self.changes == since:
            await self._news.wait()

    # --- who follows --------------------------------------------------------------------------------------

    @property
    def wanted(self) -> bool:
        """Whether somebody has asked for this node's own chain lately, as all do who follow it."""
        return _now_s() - self._asked_s <= _WANTED_S

    async def asked(self) -> None:
        """Return once this node's own chain is `wanted`."""
        while not self.wanted:
            self._asking.clear()
            await self._asking.wait()

    # --- asking -------------------------------------------------------------------------------------------

    async def ask(
        self, peer_id: PeerId, lineage: Lineage, after: int | None, wait_s: float
    ) -> list[SignedLink]:
        """A peer's answer: links as it holds them, not yet checked, at most MAX_CHAIN_LINKS. Raises
        TransportError, DeadlineError, or RemoteProtocolError for an answer that the protocol forbids
        (LimitError chain_rate: more links than a chain grows by)."""
        wait_s = min(wait_s, MAX_WAIT_S)
        request = ChainRequest(lineage.owner, lineage.base_model, after, int(wait_s * 1000))
        deadline_s = wait_s + _ANSWER_S
        try:
            async with asyncio.timeout(deadline_s):
                stream = await self._transport.open_stream(peer_id, CHAIN_PROTOCOL)
                try:
                    return await self._asked(stream, request)
                finally:
                    await stream.close()
        except TimeoutError:
            raise DeadlineError(f"links of {lineage.owner} from {peer_id}", deadline_s) from None

    async def _asked(self, stream: Stream, request: ChainRequest) -> list[SignedLink]:
        await stream.send(encode(request))
        reply = decode(await stream.receive(_MAX_REPLY_BYTES), ChainReply, max_bytes=_MAX_REPLY_BYTES)
        if not self._received.take(stream.peer_id, _now_s(), reply.count):
            raise LimitError(
                f"{stream.peer_id} sends {reply.count} more links; {_LINKS_PER_S:g} a second are taken",
                reason="chain_rate",
            )
        return [
            decode(await stream.receive(MAX_SIGNED_LINK_BYTES), SignedLink, max_bytes=MAX_SIGNED_LINK_BYTES)
            for _ in range(reply.count)
        ]

    # --- serving ------------------------------------------------------------------------------------------

    async def _serve(self, stream: Stream) -> None:
        request = decode(await stream.receive(_MAX_REQUEST_BYTES), ChainRequest, max_bytes=_MAX_REQUEST_BYTES)
        if request.owner == self.peer_id:
            self._asked_s = _now_s()
            self._asking.set()
        links = await self._answer(stream.peer_id, request)
        if not self._served.take(stream.peer_id, _now_s(), len(links)):
            raise LimitError(
                f"{stream.peer_id} asks for {len(links)} more links; {_LINKS_PER_S:g} a second are given",
                reason="chain_rate",
            )
        await stream.send(encode(ChainReply(count=len(links))))
        for signed in links:
            await stream.send(encode(signed))

    async def _answer(self, peer_id: PeerId, request: ChainRequest) -> list[SignedLink]:
        """What there is after the asked version, once there is something new or the asker's patience ends."""
        key = (request.owner, request.base_model)
        opened = self._opened.get(key)
        changes = opened.changes if opened is not None else 0
        with contextlib.suppress(TimeoutError), self._waiter(peer_id) as may_wait:
            async with asyncio.timeout(request.wait_ms / 1000 if may_wait else 0):
                while opened is None or (opened.changes == changes and _at_head(opened.chain, request.after)):
                    await self._news.wait()
                    opened = self._opened.get(key)
        return opened.chain.after(request.after) if opened is not None else []

    @contextlib.contextmanager
    def _waiter(self, peer_id: PeerId) -> Iterator[bool]:
        """Whether one more request of this peer may wait; counts it for the time of the block."""
        if self._waiting.total() >= _WAITERS or self._waiting[peer_id] >= _WAITERS_PER_PEER:
            yield False
            return
        self._waiting[peer_id] += 1
        try:
            yield True
        finally:
            self._waiting[peer_id] -= 1
            if not self._waiting[peer_id]:
                del self._waiting[peer_id]

    # --- internals ----------------------------------------------------------------------------------------

    def _path(self, lineage: Lineage) -> Path | None:
        """File of a chain, None where nothing is kept on disk."""
        if self._folder is None:
            return None
        return self._folder / f"{lineage.owner}-{lineage.base_model[:16]}.links"

    def _of(self, chain: Chain) -> _Opened:
        opened = self._opened.get((chain.lineage.owner, chain.lineage.base_model))
        if opened is None or opened.chain is not chain:
            raise OurFault(f"the chain of {chain.lineage.owner} is closed; open it again")
        return opened

    def _write_down(self, opened: _Opened, signed: SignedLink) -> None:
        if opened.file is None:
            return
        try:
            opened.file.append(signed, durable=False)
            if not opened.chain.evidence:
                opened.file.tidy(opened.chain.links())
        except OSError as error:
            log.debug("%s: a link was not kept: %s", opened.file.path, error)

    def _announce(self, opened: _Opened) -> None:
        opened.changes += 1
        self.changes += 1
        self._news.set()
        self._news = asyncio.Event()

    def _forget_old(self) -> None:
        """Keep only the chains of others that were opened last, in memory and on disk."""
        followed = [key for key, opened in self._opened.items() if not opened.own]
        for key in followed[: max(0, len(followed) - _FOLLOWED)]:
            del self._opened[key]
        if self._folder is None or not self._folder.exists():
            return
        files = [
            path for path in self._folder.glob("*.links") if not path.name.startswith(self._transport.peer_id)
        ]
        in_use = {opened.file.path for opened in self._opened.values() if opened.file is not None}
        unused = sorted((path for path in files if path not in in_use), key=lambda path: path.stat().st_mtime)
        for path in unused[: max(0, len(files) - 2 * _FOLLOWED)]:
            path.unlink(missing_ok=True)


def _at_head(chain: Chain, after: int | None) -> bool:
    """Whether who is at version `after` needs nothing now."""
    head = chain.head
    return head is None or head.policy_version == after


def _load_own(chain: Chain, file: ChainFile) -> None:
    try:
        _load_into(chain, file)
    except RemoteProtocolError as error:
        raise OurFault(
            f"{file.path} holds links that do not fit this node's weights or each other ({error}); was it "
            f"written with another adapter, or copied? Remove it and publish under another identity"
        ) from error


def _load(chain: Chain, file: ChainFile) -> None:
    """What cannot be read is asked for again."""
    try:
        _load_into(chain, file)
    except (OurFault, RemoteProtocolError) as error:
        log.debug("%s: %s", file.path, error)


def _load_into(chain: Chain, file: ChainFile) -> None:
    for signed in file.read():
        try:
            chain.add(signed)
        except ChainError as error:
            # The oldest links may be deltas from a version that was forgotten.
            if error.reason != "chain_gap" or chain.head is not None:
                raise


def _now_s() -> float:
    return asyncio.get_running_loop().time()

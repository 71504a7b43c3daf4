"""An owner's weights become versions of its chain that anybody can fetch.

    state dict --bf16 bits--> delta from the version published before --> store --> link on the chain
                              every `anchor_every` versions also from the base model (anchor)

The order is what makes a kill harmless: the blob is on the disk, then its link, then it is announced. So a
version that anybody heard of can be fetched after a restart, and is the one that the chain goes on from; what
was in work is forgotten. No version is ever signed twice. A version that has little in common with the one
before, as after a merge, is an anchor only: a delta would be as large. What a merge is given of this node
(`contribute`) is an anchor of the chain like any other. Not for when to publish (`owner.py`).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from torch import Tensor

from node.clock import Clock
from node.compute import Compute, Lane
from node.events import NoticeLevel
from node.weights.chain.apply import THREADS, apply_link
from node.weights.chain.bf16 import U16, all_finite, to_bits
from node.weights.chain.chain import Chain
from node.weights.chain.chains import Chains
from node.weights.exchange.exchange import Exchange
from node.weights.exchange.store import WeightsStore
from protocol.delta import encode, weights_digest
from protocol.errors import LocalProtocolError, OurFault, RemoteProtocolError
from protocol.identity import Identity
from protocol.links import decode_link, sign_link
from protocol.messages import Digest, Lineage, LinkKind, SignedLink, WeightsLink

__all__ = ["WeightsPublisher"]

_ANCHOR_TRIES = 4
"""An anchor that could not be kept is tried again so many times in the span between two."""


@dataclass(frozen=True, slots=True)
class _Coded:
    kind: LinkKind
    policy_version: int
    base_version: int
    base: Digest
    result: Digest
    data: bytes


class WeightsPublisher:
    """Publishes `lineage`, this node's own: full weights or adapters, whatever has the names and shapes of
    `base_bits`, which everybody of the lineage has. `notice(level, text)` tells the operator."""

    def __init__(
        self,
        identity: Identity,
        swarm_id: Digest,
        lineage: Lineage,
        base_bits: Mapping[str, U16],
        store: WeightsStore,
        chains: Chains,
        exchange: Exchange,
        *,
        anchor_every: int,
        compute: Compute,
        clock: Clock,
        notice: Callable[[NoticeLevel, str], None],
    ) -> None:
        self._identity = identity
        self._swarm_id = swarm_id
        self._lineage = lineage
        self._base = base_bits
        self._store = store
        self._chains = chains
        self._exchange = exchange
        self._anchor_every = anchor_every
        self._compute = compute
        self._clock = clock
        self._notice = notice
        self._base_digest: Digest = ""
        self._opened: Chain | None = None
        self._bits: dict[str, U16] | None = None
        """Weights of the chain's head, when they are known."""
        self._lock = asyncio.Lock()
        self._committing: asyncio.Task[None] | None = None
        self._next_try = 0
        """No anchor before this version."""

    def restore(self) -> tuple[int, dict[str, U16]] | None:
        """The chain that an earlier run left: its newest version and weights; None when there is none. Also
        None when they cannot be rebuilt, which is told: then versions above the last one signed go on from
        an anchor. Blocking. Raises OurFault for a chain that must not be gone on with (`Chains.open`)."""
        self._base_digest = weights_digest(self._base, threads=THREADS)
        chain = self._opened = self._chains.open(self._lineage, [self._base_digest])
        self._keep(chain)
        head = chain.head
        if head is None:
            return None
        try:
            self._bits = self._rebuilt(chain, head)
        except (OSError, OurFault, RemoteProtocolError) as error:
            self._notice(
                NoticeLevel.WARNING,
                f"version {head.policy_version}, the last one published, cannot be rebuilt: {error}; "
                f"publishing goes on above it",
            )
            return None
        return head.policy_version, self._bits

    @property
    def base_digest(self) -> Digest:
        """Hash of what anchors start from, once `restore` was called."""
        return self._base_digest

    async def publish(
        self, policy_version: int, state: Mapping[str, Tensor], *, anchor: bool = False
    ) -> WeightsLink:
        """Publish these weights, with `anchor` as an anchor only; returns the version's link. Nobody may
        change `state` meanwhile. Calls wait for each other. Raises LocalProtocolError for a version that is
        not above all earlier ones, for weights that are not finite or do not fit the base, OurFault or
        OSError when the disk does not take it; the chain is then as it was."""
        async with self._turn():
            if self._opened is None:
                await self._compute.run(Lane.BROADCAST, self.restore)
            chain = self._chain()
            if chain.head is not None and policy_version <= chain.head.policy_version:
                raise LocalProtocolError(
                    f"version {policy_version} cannot be published after version {chain.head.policy_version}"
                )
            bits, coded = await self._compute.run(Lane.BROADCAST, self._coded, policy_version, state, anchor)
            link = await self._add(coded, bits)
            if link.kind is LinkKind.DELTA and self._anchor_due(policy_version):
                try:
                    await self._add_anchor(link, bits)
                except (OSError, OurFault) as error:
                    self._next_try = policy_version + max(1, self._anchor_every // _ANCHOR_TRIES)
                    self._notice(
                        NoticeLevel.WARNING, f"no anchor of version {policy_version} was made: {error}"
                    )
            self._keep(chain)
            return link

    async def contribute(self) -> SignedLink | None:
        """The anchor of the newest version, made if it has none; None before the first version, and while
        the weights of the newest one are not at hand. Raises OurFault or OSError when the disk does not take
        it."""
        async with self._turn():
            chain = self._opened
            if chain is None or chain.head is None or self._bits is None:
                return None
            anchor = chain.anchor
            if anchor is None or anchor.policy_version != chain.head.policy_version:
                await self._add_anchor(chain.head, self._bits)
                self._keep(chain)
            return chain.after(None)[0]  # the newest anchor comes first

    # --- internals ----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One at a time, and what a cancelled call has left to the disk is done first."""
        async with self._lock:
            if self._committing is not None:
                await asyncio.wait([self._committing])
            yield

    def _coded(
        self, policy_version: int, state: Mapping[str, Tensor], anchor: bool
    ) -> tuple[dict[str, U16], _Coded]:
        """The weights' bits, and the delta to them from the version before; from the base for an `anchor`,
        and where there is none before. Blocking."""
        bits = to_bits(state)
        if not all_finite(bits):
            raise LocalProtocolError(f"weights of version {policy_version} are not all finite")
        result = weights_digest(bits, threads=THREADS)
        head = self._chain().head
        if anchor or head is None or self._bits is None:
            return bits, self._anchor_coded(policy_version, bits, result)
        data = encode(self._bits, bits, base_digest=head.result, new_digest=result, threads=THREADS)
        return bits, _Coded(LinkKind.DELTA, policy_version, head.policy_version, head.result, result, data)

    def _anchor_coded(self, policy_version: int, bits: Mapping[str, U16], result: Digest) -> _Coded:
        """A version from the base. Blocking."""
        base = self._base_digest
        data = encode(self._base, bits, base_digest=base, new_digest=result, threads=THREADS)
        return _Coded(LinkKind.ANCHOR, policy_version, policy_version, base, result, data)

    async def _add_anchor(self, of: WeightsLink, bits: dict[str, U16]) -> None:
        """Make and add the anchor of a version that is on the chain."""
        coded = await self._compute.run(
            Lane.BROADCAST, self._anchor_coded, of.policy_version, bits, of.result
        )
        await self._add(coded, bits)

    async def _add(self, coded: _Coded, bits: dict[str, U16]) -> WeightsLink:
        """Keep the blob, sign its link and announce it."""
        stored = await self._compute.run(Lane.DISK, self._store.add, coded.data)
        link = WeightsLink(
            lineage=self._lineage,
            policy_version=coded.policy_version,
            kind=coded.kind,
            base_version=coded.base_version,
            base=coded.base,
            result=coded.result,
            blob=stored.blob,
            created_at=self._clock.now_ms(),
        )
        newest = self._chain().head
        with stored.used():
            if newest is None or newest.policy_version < link.policy_version:
                self._exchange.seed(stored.blob.root)  # everybody will want it at once
            # Ended half-way, the file would hold a version that this object does not know of.
            signed = sign_link(self._identity, self._swarm_id, link)
            self._committing = asyncio.create_task(self._commit(signed, bits))
            await asyncio.shield(self._committing)
            self._keep(self._chain())
        return link

    async def _commit(self, signed: SignedLink, bits: dict[str, U16]) -> None:
        chain = self._chain()
        try:
            await self._chains.commit(chain, signed, functools.partial(self._compute.run, Lane.DISK))
        except RemoteProtocolError as error:
            raise LocalProtocolError(f"this node's own chain does not take its link: {error}") from error
        self._bits = bits

    def _anchor_due(self, policy_version: int) -> bool:
        anchor = self._chain().anchor
        if policy_version < self._next_try or anchor is None:
            return False
        stored = self._store.get(anchor.blob.root)
        if stored is None or not stored.complete:
            return True
        late = policy_version - anchor.policy_version >= self._anchor_every
        large = max(anchor.blob.size, self._store.max_bytes // 4)
        return late or self._chain().bytes_after_anchor > large

    def _keep(self, chain: Chain) -> None:
        """Pin what others may need; the rest may leave the disk."""
        self._store.pin(chain.worth_keeping(self._store.max_bytes // 2, strictly=False))

    def _rebuilt(self, chain: Chain, head: WeightsLink) -> dict[str, U16]:
        """Weights of the head, from the blobs that are here. Blocking."""
        roots = {link.blob.root for link in map(decode_link, chain.links())}
        lost = {root for root in roots if (blob := self._store.get(root)) is None or not blob.complete}
        path = chain.path(None, cost=lambda link: link.blob.size, avoid=lost)
        if not path or path[-1].policy_version != head.policy_version:
            raise OurFault(f"{len(lost)} of {len(roots)} blobs are not in the store")
        bits: dict[str, U16] = {}
        for link in path:
            stored = self._store.get(link.blob.root)
            if stored is not None:
                bits = apply_link(link, stored.data(), bits, self._base)
        return bits

    def _chain(self) -> Chain:
        if self._opened is None:
            raise LocalProtocolError("restore() comes before the chain is used")
        return self._opened

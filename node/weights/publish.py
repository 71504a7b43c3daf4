"""This node's own weights become versions of its chain that anybody can fetch, as soon as somebody asks.

    EngineSync --offer(version, weights)--> newest one due --run, once asked for--> publish
        publish: bf16 bits --> delta from the version published before --> store --> signed link on the chain
                 every `broadcast.anchor_every` versions also a delta from the base model (anchor)
    Merger --contribute()--> anchor of the newest version

Nothing is loaded, kept or coded for followers that do not exist. Coding may take longer than a step: then the
versions in between are left out, and the trainer never waits. The order is what makes a kill harmless: the
blob is on the disk, then its link, then it is announced. So a version that anybody heard of can be fetched
after a restart, and the chain goes on from it. No version is ever signed twice. Not for the local engine
(`engine_sync.py`), nor for how blobs travel (`exchange/`).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from node.compute import Lane
from node.durable import LeftOut
from node.events import NoticeLevel, VersionPublished, WeightsSeen
from node.membership import Membership
from node.rollout.engine.base import Engine
from node.runtime import Runtime
from node.train.checkpoint import take_weights
from node.train.step import Trainer
from node.weights.chain.apply import THREADS, apply_link
from node.weights.chain.base import Base, BaseWeights, travelling
from node.weights.chain.bf16 import U16, all_finite, to_bits, to_tensors
from node.weights.chain.chain import Chain
from node.weights.sharing import WeightsSharing
from protocol.delta import encode, weights_digest
from protocol.errors import LocalProtocolError, OurFault, RemoteProtocolError
from protocol.links import decode_link, sign_link
from protocol.messages import Digest, Lineage, LinkKind, SignedLink, WeightsLink

__all__ = ["VersionPublisher"]

_ANCHOR_TRIES = 4
"""An anchor that could not be kept is tried again so many times in the span between two."""


@dataclass(frozen=True, slots=True)
class _Coded:
    """A link that is to be signed, and its blob."""

    kind: LinkKind
    policy_version: int
    base_version: int
    base: Digest
    result: Digest
    data: bytes


@dataclass(frozen=True, slots=True)
class _Due:
    """A version to be published. Without `state` it is taken from the trainer."""

    policy_version: int
    state: Mapping[str, Tensor] | None = None
    anchor: bool = False


class VersionPublisher:
    """Publishes `lineage`, this node's own, with the weights of `trainer`: full weights or an adapter,
    whatever has the names and shapes of `base`, which everybody of the lineage has."""

    def __init__(
        self,
        runtime: Runtime,
        membership: Membership,
        lineage: Lineage,
        trainer: Trainer,
        base: BaseWeights,
        sharing: WeightsSharing,
    ) -> None:
        self.lineage = lineage
        self.gauge = sharing.gauge
        self._runtime = runtime
        self._membership = membership
        self._trainer = trainer
        self._base = base
        self.sharing = sharing
        """What the versions travel by."""
        self._opened: Chain | None = None
        self._bits: dict[str, U16] | None = None
        """Weights of the chain's head, when they are known."""
        self._due: _Due | None = None
        self._offered = asyncio.Event()
        self._merging = False
        """A contribution waits for the next version."""
        self._broken = False
        """The chain of an earlier run must not be gone on with."""
        self._mark: Path | None = None
        self._lock = asyncio.Lock()
        self._committing: asyncio.Task[None] | None = None
        self._next_try = 0
        """No anchor before this version."""
        self._publishing = LeftOut(runtime, "versions for followers")
        sharing.network.presence.lineage = lineage

    @property
    def published(self) -> int:
        """Newest version that can be fetched, -1 before the first."""
        head = self._opened.head if self._opened is not None else None
        return head.policy_version if head is not None else -1

    def seen(self) -> WeightsSeen:
        """The snapshot for the screen."""
        followers = len(self.sharing.members())
        return self.sharing.seen(self.lineage.owner, self.published, self.published, followers)

    # --- a restart ----------------------------------------------------------------------------------------

    async def resume(self, engine: Engine, mark: Path) -> None:
        """Where the chain of an earlier run and this run part, go on so that the chain never goes back: with
        its newer weights in trainer and engine where this run made them, else with the run's own weights as
        the chain's next version. The file `mark` says that this run has published. Call it once, before `run`
        and before any step. A chain that must not be gone on with is told, and then nothing is published."""
        self._mark = mark
        if self.sharing.chains.is_kept(self.lineage):
            try:
                weights = await self.open()
            except OurFault as error:
                self._runtime.notice(NoticeLevel.ERROR, f"{error}; until then nobody can follow this node")
                self._broken = True
                return
            await self._go_on(weights, engine)
        if self.published < self._trainer.policy_version:
            self._due = _Due(self._trainer.policy_version)
            self._offered.set()

    async def _go_on(self, weights: Mapping[str, U16] | None, engine: Engine) -> None:
        """`weights` are those of the chain's head, if they are known."""
        trainer, version = self._trainer, self.published
        if version < max(trainer.policy_version, 0):
            return
        made_here = self._mark is not None and self._mark.exists()
        if weights is None or not made_here:
            if weights is not None:
                text = f"another run published up to v{version}: this one begins at v{version + 1}"
                self._runtime.notice(NoticeLevel.INFO, text)
            version, state = version + 1, trainer.state_dict()
        else:
            state = to_tensors(weights)
            if version > trainer.policy_version:
                saved = f"the checkpoint of v{trainer.policy_version}" if trainer.policy_version else "new"
                text = f"goes on from v{version}, which was published; moments of the optimiser: {saved}"
                self._runtime.notice(NoticeLevel.INFO, text)
        if version > trainer.policy_version:
            await self._runtime.run(Lane.TRAIN, take_weights, trainer, engine, state, version)

    async def open(self) -> Mapping[str, U16] | None:
        """Read the chain that an earlier run left; the weights of its newest version, None without one. Also
        None when they cannot be rebuilt, which is told: then versions above the last one signed go on from an
        anchor. Raises OurFault for a chain that must not be gone on with (`Chains.open`)."""
        base = await self._base.get()
        return await self._runtime.run(Lane.BROADCAST, self._restored, base)

    def _restored(self, base: Base) -> Mapping[str, U16] | None:
        """Blocking."""
        chain = self._opened = self.sharing.chains.open(self.lineage, [base.digest])
        self._keep(chain)
        head = chain.head
        if head is None:
            return None
        try:
            self._bits = self._rebuilt(chain, head, base)
        except (OSError, OurFault, RemoteProtocolError) as error:
            self._runtime.notice(
                NoticeLevel.WARNING,
                f"version {head.policy_version}, the last one published, cannot be rebuilt: {error}; "
                f"publishing goes on above it",
            )
        return self._bits

    def _rebuilt(self, chain: Chain, head: WeightsLink, base: Base) -> dict[str, U16]:
        """Weights of the head, from the blobs that are here. Blocking."""
        store = self.sharing.store
        roots = {link.blob.root for link in map(decode_link, chain.links())}
        lost = {root for root in roots if (blob := store.get(root)) is None or not blob.complete}
        path = chain.path(None, cost=lambda link: link.blob.size, avoid=lost)
        if not path or path[-1].policy_version != head.policy_version:
            raise OurFault(f"{len(lost)} of {len(roots)} blobs are not in the store")
        bits: dict[str, U16] = {}
        for link in path:
            stored = store.get(link.blob.root)
            if stored is not None:
                bits = apply_link(link, stored.data(), bits, base.bits)
        return bits

    # --- when to publish ----------------------------------------------------------------------------------

    def offer(self, policy_version: int, state: Mapping[str, Tensor], *, anchor: bool = False) -> None:
        """The engine computes with this version: publish it once somebody asks, with `anchor` as an anchor
        only. A newer one that is offered first takes its place, and is then a delta from the version that was
        published last, if a large one. Nobody may change `state`; it is kept only while it is asked for."""
        if self._broken:
            return
        wanted = self._merging or self.sharing.chains.wanted
        self._due = _Due(policy_version, state if wanted else None, anchor)
        self._offered.set()

    async def run(self) -> None:
        """Publish what is due while somebody asks for it, until cancelled."""
        while True:
            await self._offered.wait()
            await self.sharing.chains.asked()
            await self._publish_due(anchor=False)

    async def contribute(self) -> SignedLink | None:
        """What this node gives to a merge: the anchor of its newest version, made if there is none; None
        without a version. Waits for a step that runs. A disk that does not take it is told."""
        self._merging = True
        try:
            while self._due is not None and not await self._publish_due(
                anchor=not self.sharing.chains.wanted
            ):
                await self._offered.wait()
            return await self.anchored()
        except (OSError, OurFault) as error:
            text = f"version {self.published} cannot be contributed to a merge: {error}"
            self._runtime.notice(NoticeLevel.WARNING, text)
            return None
        finally:
            self._merging = False

    async def _publish_due(self, *, anchor: bool) -> bool:
        """False when a step has changed the weights since they were offered: others will be in a moment."""
        due, self._due = self._due, None
        self._offered.clear()
        if due is None:
            return True
        state = due.state
        if state is None:
            state = await self._runtime.run(Lane.TRAIN, self._taken, due.policy_version)
        if state is None:
            return False
        began_s = self._runtime.monotonic_s()
        try:
            with self.sharing.gauge.working():
                link = await self.publish(due.policy_version, state, anchor=anchor or due.anchor)
        except (OSError, OurFault, LocalProtocolError) as error:
            self._publishing.failed(f"version {due.policy_version} was not published: {error}")
            return True
        self._publishing.worked()
        arrays = {id(array): array for array in (await self._base.get()).bits.values()}
        self._runtime.emit(
            VersionPublished(
                at=self._runtime.now_ms(),
                policy_version=link.policy_version,
                kind=link.kind.value,
                digest=link.result,
                blob_bytes=link.blob.size,
                full_bytes=sum(array.nbytes for array in arrays.values()),
                publish_s=self._runtime.monotonic_s() - began_s,
            )
        )
        return True

    def _taken(self, policy_version: int) -> Mapping[str, Tensor] | None:
        """The trainer's weights while they are this version. Blocking."""
        return self._trainer.state_dict() if self._trainer.policy_version == policy_version else None

    # --- one version --------------------------------------------------------------------------------------

    async def publish(
        self, policy_version: int, state: Mapping[str, Tensor], *, anchor: bool = False
    ) -> WeightsLink:
        """Publish these weights now, with `anchor` as an anchor only; returns the version's link. Nobody may
        change `state` meanwhile. Calls wait for each other. Raises LocalProtocolError for a version that is
        not above all earlier ones, for weights that are not finite or do not fit the base, OurFault or
        OSError when the disk does not take it; the chain is then as it was."""
        async with self._turn():
            if self._opened is None:
                await self.open()
            chain, base = self._chain(), await self._base.get()
            if policy_version <= self.published:
                raise LocalProtocolError(
                    f"version {policy_version} cannot be published after version {self.published}"
                )
            bits, coded = await self._runtime.run(
                Lane.BROADCAST, self._coded, policy_version, state, base, anchor=anchor
            )
            link = await self._add(coded, bits)
            if link.kind is LinkKind.DELTA and self._anchor_due(policy_version):
                try:
                    await self._add_anchor(link, bits)
                except (OSError, OurFault) as error:
                    self._next_try = policy_version + max(
                        1, self.sharing.settings.anchor_every // _ANCHOR_TRIES
                    )
                    text = f"no anchor of version {policy_version} was made: {error}"
                    self._runtime.notice(NoticeLevel.WARNING, text)
            self._keep(chain)
            return link

    async def anchored(self) -> SignedLink | None:
        """The anchor of the version published last, made if it has none; None before the first version, and
        while its weights are not at hand. Raises OurFault or OSError when the disk does not take it."""
        async with self._turn():
            chain = self._opened
            if chain is None or chain.head is None or self._bits is None:
                return None
            if chain.anchor is None or chain.anchor.policy_version != chain.head.policy_version:
                await self._add_anchor(chain.head, self._bits)
                self._keep(chain)
            return chain.after(None)[0]  # the newest anchor comes first

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One at a time, and what a cancelled call has left to the disk is done first."""
        async with self._lock:
            if self._committing is not None:
                await asyncio.wait([self._committing])
            yield

    def _coded(
        self, policy_version: int, state: Mapping[str, Tensor], base: Base, *, anchor: bool
    ) -> tuple[dict[str, U16], _Coded]:
        """The weights' bits, and the delta to them from the version before; from the base for an `anchor`,
        and where there is none before. Blocking."""
        bits = to_bits(travelling(state, base.bits), copy=False)
        if not all_finite(bits):
            raise LocalProtocolError(f"weights of version {policy_version} are not all finite")
        result = weights_digest(bits, threads=THREADS)
        head = self._chain().head
        if anchor or head is None or self._bits is None:
            return bits, _anchor_coded(policy_version, bits, result, base)
        data = encode(self._bits, bits, base_digest=head.result, new_digest=result, threads=THREADS)
        return bits, _Coded(LinkKind.DELTA, policy_version, head.policy_version, head.result, result, data)

    async def _add_anchor(self, of: WeightsLink, bits: dict[str, U16]) -> None:
        """Make and add the anchor of a version that is on the chain."""
        coded = await self._runtime.run(
            Lane.BROADCAST, _anchor_coded, of.policy_version, bits, of.result, await self._base.get()
        )
        await self._add(coded, bits)

    async def _add(self, coded: _Coded, bits: dict[str, U16]) -> WeightsLink:
        """Keep the blob, sign its link and announce it."""
        stored = await self._runtime.run(Lane.DISK, self.sharing.store.add, coded.data)
        link = WeightsLink(
            lineage=self.lineage,
            policy_version=coded.policy_version,
            kind=coded.kind,
            base_version=coded.base_version,
            base=coded.base,
            result=coded.result,
            blob=stored.blob,
            created_at=self._runtime.now_ms(),
        )
        with stored.used():
            if self.published < link.policy_version:
                self.sharing.exchange.seed(stored.blob.root)  # everybody will want it at once
            # Ended half-way, the file would hold a version that this object does not know of.
            signed = sign_link(self._membership.identity, self._membership.swarm_id, link)
            self._committing = asyncio.create_task(self._commit(signed, bits))
            await asyncio.shield(self._committing)
            self._keep(self._chain())
        return link

    async def _commit(self, signed: SignedLink, bits: dict[str, U16]) -> None:
        if self._mark is not None:
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.touch()
            self._mark = None
        on_disk = functools.partial(self._runtime.run, Lane.DISK)
        try:
            await self.sharing.chains.commit(self._chain(), signed, on_disk)
        except RemoteProtocolError as error:
            raise LocalProtocolError(f"this node's own chain does not take its link: {error}") from error
        self._bits = bits

    def _anchor_due(self, policy_version: int) -> bool:
        anchor, store = self._chain().anchor, self.sharing.store
        if policy_version < self._next_try or anchor is None:
            return False
        stored = store.get(anchor.blob.root)
        if stored is None or not stored.complete:
            return True
        late = policy_version - anchor.policy_version >= self.sharing.settings.anchor_every
        large = max(anchor.blob.size, store.max_bytes // 4)
        return late or self._chain().bytes_after_anchor > large

    def _keep(self, chain: Chain) -> None:
        """Pin what others may need; the rest may leave the disk."""
        store = self.sharing.store
        store.pin(chain.worth_keeping(store.max_bytes // 2, strictly=False))

    def _chain(self) -> Chain:
        if self._opened is None:
            raise LocalProtocolError("open() comes before the chain is used")
        return self._opened


def _anchor_coded(policy_version: int, bits: Mapping[str, U16], result: Digest, base: Base) -> _Coded:
    data = encode(base.bits, bits, base_digest=base.digest, new_digest=result, threads=THREADS)
    return _Coded(LinkKind.ANCHOR, policy_version, policy_version, base.digest, result, data)

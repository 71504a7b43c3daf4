"""The in-memory network: the whole transport contract in one process, seeded, with faults; for simulations.

One `MemoryNetwork` holds the links and the one random source; each node has a `MemoryTransport`. Everything
moves by `loop.call_at` only, so on a virtual loop (`node.clock.run_virtual`) the same seed gives the same
run. DHT records lie at the five closest reachable peers, streams are byte pipes under the same frames and
caps as real ones; a node's streams share its up- and downlink, first come first served, where `limit` set
their bandwidth. Not modelled: bandwidth of the DHT, and the internals of Kademlia.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
import random
import re
from collections.abc import Callable, Iterable

from node.clock import Clock, SystemClock
from node.transport._memory_records import DhtRecords
from node.transport._pipes import MemoryChannel, Pipe
from node.transport.base import (
    ConnectedPeer,
    RecordValidator,
    Stream,
    StreamHandler,
    Transport,
    TransportLimits,
    require_storable,
)
from node.transport.limits import Refusals
from node.transport.links import LINKS, LinkConditions
from node.transport.streams import StreamGate
from protocol.errors import AddressError, DeadlineError, TransportError
from protocol.messages import PeerId

__all__ = ["MemoryNetwork", "MemoryTransport"]

_ADDRESS = re.compile(r"/memory/p2p/([1-9A-HJ-NP-Za-km-z]{1,64})")
_REPLICAS = 5
_BEAM = 20
_FIFO_STEP_S = 1e-6


class _Line:
    """One direction of a node's access to the network."""

    __slots__ = ("_bytes_per_s", "_free_at_s")

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def through(self, now_s: float, count: int) -> float:
        """When `count` bytes that come now have passed."""
        if math.isinf(self._bytes_per_s):  # shared by runs whose virtual clocks begin anew
            return now_s
        self._free_at_s = max(self._free_at_s, now_s) + count / self._bytes_per_s
        return self._free_at_s


_UNLIMITED = _Line(math.inf)


class MemoryNetwork:
    """Who is connected to whom, over which links. All randomness of a run comes from `seed`."""

    def __init__(
        self,
        seed: int = 0,
        link: LinkConditions = LINKS["perfect"],
        clock: Clock | None = None,
    ) -> None:
        self.link = link
        self.clock = clock or SystemClock()
        self._random = random.Random(seed)
        self._transports: dict[PeerId, MemoryTransport] = {}
        self._group_of: dict[PeerId, int] = {}
        self._channels: dict[MemoryChannel, tuple[PeerId, PeerId]] = {}
        self._silent: set[PeerId] = set()
        self._uplinks: dict[PeerId, _Line] = {}
        self._downlinks: dict[PeerId, _Line] = {}

    def transport(
        self,
        peer_id: PeerId,
        *,
        validate_record: RecordValidator | None = None,
        limits: TransportLimits | None = None,
    ) -> MemoryTransport:
        """A node of this network. Without `validate_record` every DHT record within its size is accepted."""
        return MemoryTransport(self, peer_id, validate_record, limits or TransportLimits())

    def limit(self, peer_id: PeerId, up_mbit: float, down_mbit: float) -> None:
        """From now on all streams of a peer share this bandwidth, in Mbit/s."""
        self._uplinks[peer_id] = _Line(up_mbit * 1e6 / 8)
        self._downlinks[peer_id] = _Line(down_mbit * 1e6 / 8)

    # --- faults ---

    def partition(self, groups: Iterable[Iterable[PeerId]]) -> None:
        """Peers of different groups no longer reach each other; those in no group form one more."""
        self._group_of = {peer_id: number for number, group in enumerate(groups) for peer_id in group}
        self._reset_broken_channels()

    def heal(self) -> None:
        """End all partitions. Connections made before are there again."""
        self._group_of = {}

    def kill(self, peer_id: PeerId) -> None:
        """The network stack of a peer dies: its streams break, its calls fail, records it held are gone."""
        self._of(peer_id).stack_died()
        self._reset_broken_channels()

    def restart(self, peer_id: PeerId) -> None:
        """A killed stack comes back with its connections and own records."""
        self._of(peer_id).stack_restarted()

    def silence(self, peer_id: PeerId) -> None:
        """A peer's cable is pulled: from now on nothing reaches it or comes from it, and nobody is told, so
        that its streams stay open until a deadline. For good."""
        self._silent.add(self._of(peer_id).peer_id)
        for channel, (source, _) in self._channels.items():
            if source == peer_id:
                channel.unplug()

    # --- for MemoryTransport ---

    def attach(self, transport: MemoryTransport) -> None:
        if transport.peer_id in self._transports:
            raise TransportError(f"{transport.peer_id} is already in this network; close the other one first")
        self._transports[transport.peer_id] = transport

    def detach(self, transport: MemoryTransport) -> None:
        if self._transports.get(transport.peer_id) is transport:
            del self._transports[transport.peer_id]
        for other in self._transports.values():
            other.neighbours.pop(transport.peer_id, None)
        self._reset_broken_channels()

    def reachable(self, source: PeerId, target: PeerId) -> MemoryTransport | None:
        """The transport of `target` when both stacks run and no partition separates them."""
        ends = self._transports.get(source), self._transports.get(target)
        if ends[0] is None or ends[1] is None or not (ends[0].up and ends[1].up):
            return None
        if self._group_of.get(source) != self._group_of.get(target):
            return None
        return ends[1]

    def linked(self, source: PeerId) -> list[MemoryTransport]:
        """Neighbours that `source` reaches now, in order of connection."""
        transport = self._transports.get(source)
        neighbours = transport.neighbours if transport is not None else {}
        return [other for peer_id in neighbours if (other := self.reachable(source, peer_id)) is not None]

    def closest(self, source: PeerId, key: str, count: int) -> list[MemoryTransport]:
        """Up to `count` peers in `source`'s connected component, nearest to `key` first, without `source`."""
        found: dict[PeerId, MemoryTransport] = {}
        frontier = [source]
        while frontier:
            for other in self.linked(frontier.pop()):
                if other.peer_id != source and other.peer_id not in found:
                    found[other.peer_id] = other
                    frontier.append(other.peer_id)
        target = _point(key)
        answering = (other for other in found.values() if not self._is_cut(source, other.peer_id))
        return sorted(answering, key=lambda other: _point(other.peer_id) ^ target)[:count]

    async def round_trip(self, *ends: PeerId) -> None:
        """Wait as long as a small request and its reply take, lost ones sent again; for ever where one of
        `ends` is silent."""
        await asyncio.sleep(self._reliable_delay_s() + self._reliable_delay_s())
        if self._is_cut(*ends):
            await asyncio.get_running_loop().create_future()

    def open_channels(self, source: PeerId, target: PeerId) -> tuple[MemoryChannel, MemoryChannel]:
        """Both ends of a new byte channel."""
        there, back = Pipe(), Pipe()
        ends = (
            MemoryChannel(back, there, functools.partial(self._carry, source, target)),
            MemoryChannel(there, back, functools.partial(self._carry, target, source)),
        )
        self._channels |= zip(ends, ((source, target), (target, source)), strict=True)
        for end in ends:
            end.on_close = lambda closed: self._channels.pop(closed, None)
        return ends

    def _carry(
        self, source: PeerId, target: PeerId, pipe: Pipe, count: int, arrive: Callable[[], None]
    ) -> None:
        """Through the uplink of `source`, over the network, through the downlink of `target`."""
        loop = asyncio.get_running_loop()
        sent_at_s = self._uplinks.get(source, _UNLIMITED).through(self._now_s(), count)
        pipe.last_at_s = max(sent_at_s + self._reliable_delay_s(), pipe.last_at_s + _FIFO_STEP_S)
        downlink = self._downlinks.get(target)

        def pass_on() -> None:
            if not self._is_cut(source, target):
                arrive()

        if downlink is None:
            loop.call_at(pipe.last_at_s, pass_on)
            return

        def reached() -> None:
            loop.call_at(downlink.through(self._now_s(), count), pass_on)

        loop.call_at(pipe.last_at_s, reached)

    def _is_cut(self, *ends: PeerId) -> bool:
        return not self._silent.isdisjoint(ends)

    def _reset_broken_channels(self) -> None:
        for channel, (source, target) in list(self._channels.items()):
            if self.reachable(source, target) is None:
                channel.reset()

    def _of(self, peer_id: PeerId) -> MemoryTransport:
        transport = self._transports.get(peer_id)
        if transport is None:
            raise ValueError(f"{peer_id} is not in this network; start its transport first")
        return transport

    def _delay_s(self) -> float:
        return self._random.uniform(self.link.delay_min_ms, self.link.delay_max_ms) / 1000

    def _reliable_delay_s(self) -> float:
        """Delay of a retransmitting transport: each loss costs a time-out of at least 200 ms."""
        delay_s = self._delay_s()
        while self._random.random() < min(self.link.loss, 0.95):
            delay_s += max(0.2, 2 * self.link.delay_max_ms / 1000)
        return delay_s

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


class MemoryTransport(Transport):
    """One node of a `MemoryNetwork`; made by `MemoryNetwork.transport`."""

    def __init__(
        self,
        network: MemoryNetwork,
        peer_id: PeerId,
        validate_record: RecordValidator | None,
        limits: TransportLimits,
    ) -> None:
        self.peer_id = peer_id
        self.up = False
        self.neighbours: dict[PeerId, None] = {}
        """Peers this one was ever connected to; a dict because the order of a set differs between runs."""
        self._network = network
        self._validate_record = validate_record
        self._limits = limits
        self.refusals = Refusals()
        self._gate = StreamGate(limits, self.refusals)
        self.records = DhtRecords(validate_record, limits, self.refusals)
        self._handlers: dict[str, tuple[StreamHandler, float | None]] = {}
        self._own_records: dict[str, tuple[bytes, int]] = {}
        self.restarts = 0
        self._closed = False

    async def start(self) -> None:
        self._network.attach(self)
        self.up = True

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.up = False
        self._network.detach(self)
        await self._gate.close()

    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/p2p/{self.peer_id}",)

    def may_dial(self, address: str) -> bool:
        return True

    async def connect(self, address: str) -> PeerId:
        self._require_up()
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise AddressError(f"{address[:200]!r} is no address of the form /memory/p2p/<peer id>")
        peer_id = match.group(1)
        if peer_id == self.peer_id:
            raise AddressError(f"{address} is this node itself; give the address of another one")
        unreachable = AddressError(f"no peer answers at {address}; is it running and reachable?")
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                await self._network.round_trip(self.peer_id, peer_id)
        except TimeoutError:
            raise unreachable from None
        self._dial(peer_id, unreachable)
        return peer_id

    async def peers(self) -> tuple[ConnectedPeer, ...]:
        self._require_up()
        return tuple(
            ConnectedPeer(other.peer_id, other.addresses()) for other in self._network.linked(self.peer_id)
        )

    # --- DHT ---

    async def store(self, key: str, value: bytes, expires_at: int) -> None:
        require_storable(self._validate_record, key, value, expires_at)
        self._own_records[key] = (value, expires_at)
        self._require_up()
        await self._within_dht_deadline(f"storing the DHT record {key}")
        self._place(key, value, expires_at)

    async def get(self, key: str) -> bytes | None:
        self._require_up()
        await self._within_dht_deadline(f"reading the DHT record {key}")
        now_ms = self._network.clock.now_ms()
        best, best_expires_at = None, now_ms
        own = self.records.kept.get(key)
        if own is not None and own[1] > best_expires_at:
            best, best_expires_at = own
        for holder in self._network.closest(self.peer_id, key, _BEAM):
            found = holder.records.asked(self.peer_id, key)
            if (
                found is not None
                and found[1] > best_expires_at
                and self.records.is_valid(holder.peer_id, key, *found)
            ):
                best, best_expires_at = found
        return best

    def _place(self, key: str, value: bytes, expires_at: int) -> None:
        self.records.kept[key] = (value, expires_at)
        for other in self._network.closest(self.peer_id, key, _REPLICAS):
            other.records.offered(self.peer_id, key, value, expires_at)

    async def _within_dht_deadline(self, waiting_for: str) -> None:
        try:
            async with asyncio.timeout(self._limits.dht_timeout_s):
                await self._network.round_trip()
        except TimeoutError:
            raise DeadlineError(waiting_for, self._limits.dht_timeout_s) from None
        self._require_up()

    # --- streams ---

    async def open_stream(self, peer_id: PeerId, protocol: str) -> Stream:
        self._require_up()
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                await self._network.round_trip(self.peer_id, peer_id)
        except TimeoutError:
            raise DeadlineError(f"opening {protocol} at {peer_id}", self._limits.connect_timeout_s) from None
        other = self._dial(peer_id, TransportError(f"{peer_id} cannot be reached"))
        served = other._handlers.get(protocol)
        if served is None:
            raise TransportError(f"{peer_id} does not serve {protocol}")
        here, there = self._network.open_channels(self.peer_id, peer_id)
        other._gate.accept(self.peer_id, there, *served)
        return Stream(peer_id, here, self._limits.stream_timeout_s)

    def serve(self, protocol: str, handler: StreamHandler, *, deadline_s: float | None = None) -> None:
        self._handlers[protocol] = (handler, deadline_s)

    # --- state ---

    def stack_died(self) -> None:
        """For `MemoryNetwork.kill`."""
        self.up = False
        self.records.kept.clear()

    def stack_restarted(self) -> None:
        """For `MemoryNetwork.restart`."""
        self.up = True
        self.restarts += 1
        now_ms = self._network.clock.now_ms()
        self._own_records = {key: record for key, record in self._own_records.items() if record[1] > now_ms}
        for key, (value, expires_at) in self._own_records.items():
            self._place(key, value, expires_at)

    def _dial(self, peer_id: PeerId, unreachable: TransportError) -> MemoryTransport:
        other = self._network.reachable(self.peer_id, peer_id)
        if other is None:
            raise unreachable
        self.neighbours[peer_id] = None
        other.neighbours[self.peer_id] = None
        return other

    def _require_up(self) -> None:
        if not self.up:
            raise TransportError(f"the network stack of {self.peer_id} is down")


def _point(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest(), "big")

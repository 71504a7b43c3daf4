"""The liar's process: a member of the swarm that only ever publishes lies (`swarm_cli/liar.py`).

Started by `swarm demo --with-liar` as `python -m swarm_cli.demo.liar_node <config>`. It walks through its own
slots like an honest node, so that nothing but the lie is wrong with what it sends: a slot whose prompt a peer
has answered already is answered with a copy, the others with false rewards, an easier question, or another
slot's prompt in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import signal
import sys
from collections import OrderedDict
from pathlib import Path

from node.clock import Clock, SystemClock
from node.compute import Lane, ThreadCompute
from node.config import NodeConfig, load_config
from node.events import EventBus, NoticeLevel
from node.membership import Membership
from node.open.charter import read_or_found_charter
from node.open.engine import open_engine
from node.open.policy import open_environments, open_policy, open_sandbox
from node.peers.book import PeerBook
from node.peers.presence import Presence
from node.peers.trust import TrustSettings
from node.rollout.engine.base import Engine
from node.rollout.generate import Generator
from node.rollout.policy import Policy
from node.rollout.prompts import AssignedPrompt, PromptFeed, Universe
from node.rollout.scoring import OwnScorer
from node.runtime import Runtime
from node.sandbox.scorer import Scorer
from node.share.collect import fetch_body
from node.share.gossip import Gossip
from node.share.publish import Publisher
from node.state.keys import load_key
from node.state.paths import Home
from node.state.stores import MemorySequence, MemoryWindows
from node.supervise import run_stages
from node.transport import open_transport
from node.transport.base import Transport
from protocol.charter import swarm_id
from protocol.codec import decode
from protocol.constants import MAX_BLOB_BYTES
from protocol.errors import RemoteProtocolError, TransportError
from protocol.identity import Identity
from protocol.messages import Charter, Lineage, PromptRef, RolloutGroup
from protocol.records import record_validator
from swarm_cli.liar import Liar, Lie

__all__ = ["LiarNode", "main"]

log = logging.getLogger(__name__)

PACE_S = 0.25
"""One lie in this time: about as many groups as an honest node sends."""
LIES = (*5 * (Lie.FALSE_REWARD, Lie.EASY_QUESTION), Lie.WRONG_INDEX)
"""In turn. A wrong index is seen in the announcement already, so it is rare: receivers would fetch nothing
else."""
KEPT_GROUPS = 512
FETCH_S = 5.0


class LiarNode:
    """Listens, keeps what it can copy, and lies."""

    def __init__(
        self,
        config: NodeConfig,
        identity: Identity,
        charter: Charter,
        clock: Clock,
        transport: Transport,
        sandbox: Scorer,
        policy: Policy,
        engine: Engine,
    ) -> None:
        environments = open_environments(charter)
        swarm = swarm_id(charter)
        lineage = Lineage(
            owner=identity.peer_id, base_model=policy.base_model, tokenizer=policy.tokenizer_digest
        )
        universe = Universe(swarm, charter, environments)
        sequence = MemorySequence(clock.now_ms() * 1024)
        self._transport = transport
        self._liar = Liar(charter, swarm, lineage)
        self._runtime = Runtime(clock, ThreadCompute(), EventBus(), random.Random(config.seed))
        membership = Membership(identity, charter, clock)
        self._feed = PromptFeed(self._runtime, membership, universe, MemoryWindows())
        self._generator = Generator(
            membership, lineage, policy, engine, OwnScorer(environments, sandbox), config
        )
        self._used: set[tuple[int, int]] = set()
        self._copyable: OrderedDict[tuple[int, int], RolloutGroup] = OrderedDict()
        peers = PeerBook(self._runtime, membership, TrustSettings())
        self.gossip = Gossip(self._runtime, membership, peers, transport, sequence)
        self._publisher = Publisher(transport, self.gossip, charter)
        self.presence = Presence(
            self._runtime,
            membership,
            peers,
            transport,
            sequence,
            name=config.name,
            bootstraps=config.network.bootstraps,
        )
        self.presence.lineage = lineage

    async def listen(self) -> None:
        """Fetch every offered body: material for copies."""
        async for heard in self.gossip.heard():
            if not heard.announcement.mixed:
                continue
            try:
                body = await fetch_body(self._transport, heard.sender, heard, FETCH_S)
                group = decode(body, RolloutGroup, max_bytes=MAX_BLOB_BYTES)
            except (TransportError, TimeoutError, RemoteProtocolError):
                continue
            self._copyable[group.prompt.window, group.prompt.index] = group
            while len(self._copyable) > KEPT_GROUPS:
                self._copyable.popitem(last=False)

    async def lie(self) -> None:
        """One lie after the other, slot by slot."""
        for kind in itertools.cycle(LIES):
            assigned = await self._feed.next()
            if not self._take(assigned.ref):
                continue
            await self._answer(kind, assigned)
            await asyncio.sleep(PACE_S)

    async def _answer(self, kind: Lie, assigned: AssignedPrompt) -> None:
        group = self._copyable.get((assigned.ref.window, assigned.ref.index))
        if group is not None:
            kind = Lie.COPY
        else:
            made = await self._runtime.run(
                Lane.GENERATE, self._generator.generate, [assigned], at_ms=self._runtime.now_ms()
            )
            if not made:
                return
            group = made[0].group
        told = self._liar.lie(kind, group)
        if told is None or (kind is Lie.WRONG_INDEX and not self._take(told[0].prompt)):
            return
        await self._publisher.offer(*told)

    def _take(self, ref: PromptRef) -> bool:
        """Use a slot once: a second answer would be refused as equivocation, before the lie is looked at."""
        slot = (ref.window, ref.slot)
        if slot in self._used:
            return False
        self._used = {used for used in self._used if used[0] >= ref.window - 1} | {slot}
        return True


async def _run(config: NodeConfig) -> None:
    clock = SystemClock()
    home = Home(config.home)
    identity = load_key(home.key)
    charter = read_or_found_charter(config, identity, clock.now_ms())
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    transport = await open_transport(
        home.key,
        listen=config.network.listen,
        validate_record=record_validator(swarm_id(charter), clock.now_ms),
    )
    try:
        policy = open_policy(config, charter)
        with (
            open_sandbox(config, charter) as sandbox,
            contextlib.closing(open_engine(config, policy, _log_notice)) as engine,
        ):
            liar = LiarNode(config, identity, charter, clock, transport, sandbox, policy, engine)
            stages = {
                "gossip": liar.gossip.run(),
                "presence": liar.presence.run(),
                "listen": liar.listen(),
                "lie": liar.lie(),
            }
            await run_stages(stages, until=stop)
    finally:
        await transport.close()


def _log_notice(level: NoticeLevel, text: str) -> None:
    log.log(logging.WARNING if level == "warning" else logging.INFO, text)


def main() -> None:
    """Run until a signal comes."""
    asyncio.run(_run(load_config([Path(sys.argv[1])])))


if __name__ == "__main__":
    main()

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
from pathlib import Path

from cachetools import FIFOCache

from node.clock import SystemClock
from node.compute import Lane, ThreadCompute
from node.config import NodeConfig, load_config
from node.events import EventBus, NoticeLevel
from node.membership import Membership
from node.network import Network
from node.open.charter import read_or_found_charter
from node.open.parts import open_parts
from node.open.policy import open_host
from node.open.stores import memory_stores
from node.roles import Common
from node.rollout.prompts import AssignedPrompt
from node.runtime import Runtime
from node.share.collect import fetch_body
from node.state.keys import load_key
from node.state.paths import Home
from node.supervise import run_stages
from node.transport import open_transport
from protocol.codec import decode
from protocol.constants import MAX_BLOB_BYTES
from protocol.errors import RemoteProtocolError, TransportError
from protocol.messages import Lineage, PromptRef, RolloutGroup
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
    """Listens, keeps what it can copy, and lies, over `network`."""

    def __init__(self, common: Common, network: Network) -> None:
        membership, policy = common.membership, common.parts.policy
        lineage = Lineage(membership.peer_id, policy.base_model, policy.tokenizer_digest)
        network.presence.lineage = lineage
        self._network = network
        self._runtime = common.runtime
        self._feed = common.feed
        self._generator = common.generator(lineage)
        self._liar = Liar(membership.charter, membership.swarm_id, lineage)
        self._used: set[tuple[int, int]] = set()
        self._copyable: FIFOCache[tuple[int, int], RolloutGroup] = FIFOCache(KEPT_GROUPS)

    async def listen(self) -> None:
        """Fetch every offered body: material for copies."""
        async for heard in self._network.gossip.heard():
            if not heard.announcement.mixed:
                continue
            try:
                body = await fetch_body(self._network.transport, heard.sender, heard, FETCH_S)
                group = decode(body, RolloutGroup, max_bytes=MAX_BLOB_BYTES)
            except (TransportError, TimeoutError, RemoteProtocolError):
                continue
            self._copyable[group.prompt.window, group.prompt.index] = group

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
        await self._network.publisher.offer(*told)

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
    membership = Membership(identity, read_or_found_charter(config, identity, clock.now_ms()), clock)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    transport = await open_transport(
        home.key,
        listen=config.network.listen,
        validate_record=record_validator(membership.swarm_id, clock.now_ms),
    )
    try:
        config = config.model_copy(update={"role": "follower"})  # it trains nothing
        with open_host(config, membership.charter) as host:
            parts = open_parts(config, membership.charter, host, _log_notice, identity.peer_id)
            with contextlib.closing(parts.engine):
                runtime = Runtime(clock, ThreadCompute(), EventBus(), random.Random(config.seed))
                stores = memory_stores(clock.now_ms())
                common = Common(parts, runtime, membership, stores, transport=None)
                network = Network(
                    runtime,
                    membership,
                    common.peers,
                    transport,
                    config,
                    sequence=stores.sequence,
                    replay=stores.replay,
                )
                liar = LiarNode(common, network)
                loops = {"network": network.run(), "listen": liar.listen(), "lie": liar.lie()}
                await run_stages(loops, until=stop)
    finally:
        await transport.close()


def _log_notice(level: NoticeLevel, text: str) -> None:
    log.log(logging.WARNING if level == "warning" else logging.INFO, text)


def main() -> None:
    """Run until a signal comes."""
    asyncio.run(_run(load_config([Path(sys.argv[1])])))


if __name__ == "__main__":
    main()

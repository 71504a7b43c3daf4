"""The loop of a real node: how it ends."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from node.clock import SystemClock
from node.compute import Lane
from node.config import load_config
from node.events import Event
from node.main import EngineNotices, run_loop
from node.membership import Membership
from node.open.parts import Parts
from node.rollout.engine.base import Engine
from node.rollout.policy import Policy
from node.runtime import Runtime
from node.sandbox.scorer import Scorer
from node.state.paths import Home, bundled
from protocol.charter import found
from protocol.identity import Identity


class Endless:
    """An engine that generates until it is closed."""

    def __init__(self) -> None:
        self.generating = threading.Event()
        self._closed = threading.Event()
        self.was_ended = False

    def generate(self) -> None:
        self.generating.set()
        self.was_ended = self._closed.wait(5)

    def close(self) -> None:
        self._closed.set()


class Stopped:
    """A node that is stopped while a thread of its own waits for the engine."""

    def __init__(self, parts: Parts, runtime: Runtime) -> None:
        self._engine = cast("Endless", parts.engine)
        self._runtime = runtime

    async def run(self) -> None:
        rollouts = asyncio.create_task(self._runtime.run(Lane.GENERATE, self._engine.generate))
        await asyncio.to_thread(self._engine.generating.wait)
        rollouts.cancel()


def test_what_waits_for_the_engine_is_ended_before_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stopped(parts: Parts, runtime: Runtime, *_: object) -> Stopped:
        return Stopped(parts, runtime)

    monkeypatch.setattr("node.node.open_node", stopped)
    home, engine, identity = Home(tmp_path).create(), Endless(), Identity.generate()
    config = load_config([], {"home": tmp_path, "network.transport": "none"})
    home.run(config.run).create()
    parts = Parts(
        config=config,
        policy=cast("Policy", None),
        environments={},
        engine=cast("Engine", engine),
        sandbox=cast("Scorer", None),
        learner=None,
    )
    charter = found(identity, bundled("demo-charter.toml").read_text(encoding="utf-8"), 0)
    membership = Membership(identity, charter, SystemClock())
    shown: list[Event] = []

    async def no_network(_: Any) -> None:
        return None

    notices = EngineNotices(shown.append)
    assert asyncio.run(run_loop(parts, membership, no_network, notices, shown.append))
    assert engine.was_ended

"""The loop of a real node: how it ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from node.clock import SystemClock
from node.compute import Lane
from node.config import load_config
from node.environment.host import TrustedHost
from node.events import Event
from node.main import EngineNotices, run_loop
from node.membership import Membership
from node.open.parts import Parts
from node.rollout.engine.base import Engine
from node.rollout.policy import Policy
from node.runtime import Runtime
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
        engine=cast("Engine", engine),
        host=TrustedHost({}),
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


WORDS = """
from node.environment.records import Prompt, Score

class Words:
    name, evaluates_answers, reproducible = "words", False, True

    def prompt(self, seed, index):
        return Prompt(self.name, "Say %d." % (seed % 10**6), seed, index, {})

    def score(self, prompt, completion):
        return Score(len(completion.text) % 2, ())

def load(config):
    return Words()
"""

ALONE = """
import sys
from pathlib import Path
from node.config import load_config
from node.events import StepDone
from node.main import run_node
from protocol.errors import SwarmError

steps = []

def show(event):
    if isinstance(event, StepDone):
        steps.append(event)
    if event.__class__.__name__ == "Evaluated" and event.moment == "after":
        raise KeyboardInterrupt

settings = {
    "home": sys.argv[1], "charter": sys.argv[2], "network.transport": "none", "policy.device": "cpu",
    "train.steps": 1, "train.local_groups": 2, "train.external_groups": 0, "evaluate.prompts_per_task": 2,
}
try:
    run_node(load_config([Path("demo.toml")], settings), show)
except KeyboardInterrupt:
    pass
print(len(steps), sorted({name.partition(".")[0] for name in sys.modules} & {"reasoning_gym", "words_tasks"}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_a_node_trains_without_a_tasks_code_in_its_process(tmp_path: Path) -> None:
    """Founded, derived, scored, trained and evaluated on two packages' tasks: neither was imported here."""
    packages = tmp_path / "packages"
    info = packages / "words-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: words\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[murmuration.environments]\nwords = words_tasks:load\n")
    (packages / "words_tasks.py").write_text(WORDS)
    rules = bundled("demo-charter.toml").read_text(encoding="utf-8")
    own = tmp_path / "rules.toml"
    own.write_text(f'{rules}\n[[environments]]\nname = "words"\n')
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "home"), str(own)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{root}:{packages}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["1 []"], done.stderr[-2000:]

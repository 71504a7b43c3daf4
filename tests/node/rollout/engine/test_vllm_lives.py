"""Lives and deaths of the vLLM engine with a process that only pretends: restarts, giving up, closing, seeds
and who waits for whom. The real one is in tests/vllm."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from torch import Tensor

from node.config import VllmConfig
from node.rollout.engine import vllm
from node.rollout.engine._vllm_life import Life
from node.rollout.engine._vllm_process import EngineDied
from node.rollout.engine.base import EngineError, GenerationRequest
from node.rollout.engine.fallback import FallbackEngine
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.engine.vllm import DEATHS_COUNT_S, VllmEngine
from node.rollout.policy import Policy
from protocol.messages import Sampling

MAX_RESTARTS = 2


class Core:
    """What vLLM's engine answers."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append("pause")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def get_supported_tasks(self) -> None: ...
    async def update_weight_version(self, version: str) -> None:
        self.calls.append(f"version {version}")


class Process:
    """A thread with a loop. `stillborn` says whether a start fails, `starting` runs during one."""

    all: ClassVar[list[Process]]
    lives: ClassVar[list[Life]]
    """Those that were given weights."""
    stillborn: Callable[[], bool] = staticmethod(lambda: False)
    starting: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        arguments: Callable[..., dict[str, Any]],
        *,
        start_timeout_s: float,
        deadline_s: float,
        notice: Callable[[str, str], None],
        closing: threading.Event,
    ) -> None:
        self.closing = closing
        self.seed = arguments(on_cpu=True)["seed"]
        type(self).all.append(self)
        self.dead = self.closed = False
        self.on_cpu = True
        self.pids = [1]
        self.engine = Core()
        self.loop = asyncio.new_event_loop()
        if type(self).stillborn():
            self.loop.close()
            self.dead = self.closed = True
            raise EngineDied("it did not start")
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        type(self).starting()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self.closed:
            work.close()
            raise EngineDied("closed")
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def raise_if_dead(self) -> None:
        if self.dead:
            raise EngineDied(self.obituary())

    def obituary(self) -> str:
        return "it was ended"

    def kill(self) -> None:
        self.dead = True

    def close(self) -> None:
        if not self.closed:
            self.dead = self.closed = True
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(10)
            self.loop.close()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Process]]:
    """The kind of process that an engine starts here; `all` lists them."""

    class Own(Process):
        all: ClassVar[list[Process]] = []
        lives: ClassVar[list[Life]] = []

    async def patch(life: Life, patches: Any, policy_version: int, dtype: str, *, whole: bool) -> None:
        Own.lives.append(life)
        await life.label(policy_version)

    monkeypatch.setattr(vllm, "VllmProcess", Own)
    monkeypatch.setattr(vllm, "require_vllm", lambda: None)
    monkeypatch.setattr(vllm, "BACKOFF_S", (0.0,))
    monkeypatch.setattr(Life, "patch", patch)
    yield Own
    for process in Own.all:
        process.close()


@pytest.fixture(scope="module")
def policy(tiny_policy_path: Path) -> Policy:
    return Policy.open(tiny_policy_path)


@pytest.fixture(scope="module")
def state(policy: Policy) -> dict[str, Tensor]:
    return dict(policy.load_model().state_dict())


def start(policy: Policy, notices: list[str] | None = None, *, seed: int = 0, **settings: Any) -> VllmEngine:
    return VllmEngine(
        policy,
        VllmConfig(max_restarts=MAX_RESTARTS, **settings),
        seed=seed,
        notice=lambda level, text: None if notices is None else notices.append(f"{level}: {text}"),
    )


# --- restarts and giving up --------------------------------------------------------------------------------


def test_a_restart_is_no_loss_and_too_many_deaths_are(policy: Policy, processes: type[Process]) -> None:
    engine = start(policy)
    for _ in range(MAX_RESTARTS):
        processes.all[-1].kill()
        engine.pause()  # succeeds, in a new process
        assert not engine.lost
    assert len(processes.all) == 1 + MAX_RESTARTS
    processes.all[-1].kill()
    for _ in range(2):
        with pytest.raises(EngineError, match="ended or did not start 3 times; it was ended"):
            engine.pause()
        assert engine.lost
    assert len(processes.all) == 1 + MAX_RESTARTS


def test_starts_that_fail_count(policy: Policy, processes: type[Process]) -> None:
    engine = start(policy)
    processes.stillborn = staticmethod(lambda: True)
    processes.all[-1].kill()
    with pytest.raises(EngineError, match="did not start 3 times; it did not start"):
        engine.pause()
    assert engine.lost
    assert len(processes.all) == 1 + MAX_RESTARTS


def test_deaths_long_ago_do_not_count(
    policy: Policy, processes: type[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(vllm, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    engine = start(policy)
    for _ in range(3 * MAX_RESTARTS):
        processes.all[-1].kill()
        engine.pause()
        now_s[0] += DEATHS_COUNT_S / MAX_RESTARTS
    assert not engine.lost


def test_the_first_start_of_all_is_not_repeated(policy: Policy, processes: type[Process]) -> None:
    processes.stillborn = staticmethod(lambda: True)
    with pytest.raises(EngineError, match="it did not start"):
        start(policy)
    assert len(processes.all) == 1


@pytest.mark.parametrize("refusals", [1, 2, 3, 4])
def test_weights_that_a_process_refuses_are_given_to_one_more(
    policy: Policy,
    processes: type[Process],
    state: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    refusals: int,
) -> None:
    """Each process is given them twice, as a patch and whole."""
    engine = start(policy)
    engine.update(state, 1)
    accept, refused = Life.patch, []

    async def patch(life: Life, patches: Any, policy_version: int, *rest: Any, **options: Any) -> None:
        if policy_version == 2 and len(refused) < refusals:
            refused.append(life)
            raise ValueError("no place for it")
        await accept(life, patches, policy_version, *rest, **options)

    monkeypatch.setattr(Life, "patch", patch)
    if refusals < 4:
        engine.update(state, 2)
        assert engine.policy_version == 2
        assert not engine.lost
        if refusals > 1:
            assert "version 1" in processes.all[1].engine.calls, "the new one had the old weights first"
    else:
        with pytest.raises(EngineError, match="does not take version 2: no place for it"):
            engine.update(state, 2)
        assert engine.lost
        assert engine.policy_version == 1
        assert all(process.dead for process in processes.all)
    assert len(processes.all) == (1 if refusals == 1 else 2)


def test_another_engine_takes_over_from_a_lost_one_only(
    policy: Policy, processes: type[Process], state: dict[str, Tensor]
) -> None:
    engine = start(policy)
    both = FallbackEngine(
        engine, lost=lambda: engine.lost, fall_back=lambda error: TransformersEngine(policy)
    )
    both.update(state, 1)
    processes.all[-1].kill()
    with pytest.raises(EngineError, match="do not fit"):
        both.update({}, 2)  # an error of the caller while no process runs
    both.pause()
    assert both.name == "vllm"
    processes.stillborn = staticmethod(lambda: True)
    processes.all[-1].kill()
    both.resume()
    assert (both.name, both.policy_version, both.context) == ("transformers", 1, policy.max_positions)


# --- closing, turns, seeds, context ------------------------------------------------------------------------


def test_closing_during_a_start_leaves_no_process(policy: Policy, processes: type[Process]) -> None:
    engine = start(policy)
    processes.all[-1].kill()
    begun = threading.Event()

    def starting() -> None:
        begun.set()
        assert processes.all[-1].closing.wait(5), "a start under way hears of it"

    processes.starting = staticmethod(starting)
    errors: list[str] = []

    def pause() -> None:
        try:
            engine.pause()
        except EngineError as error:
            errors.append(str(error))

    thread = threading.Thread(target=pause)
    thread.start()
    assert begun.wait(5)
    engine.close()
    assert len(processes.all) == 2
    assert all(process.closed for process in processes.all)
    thread.join(5)
    assert errors == ["the engine is closed"]
    assert not engine.lost


@pytest.mark.parametrize("call", ["resume", "wake", "pause"])
def test_nothing_enters_while_weights_change(
    policy: Policy,
    processes: type[Process],
    state: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    engine = start(policy)
    accept, others = Life.patch, []

    async def patch(life: Life, *rest: Any, **options: Any) -> None:
        others.append(threading.Thread(target=getattr(engine, call)))
        others[0].start()
        await asyncio.to_thread(others[0].join, 0.05)
        assert others[0].is_alive(), "it waits"
        assert not life.gate.is_set()
        await accept(life, *rest, **options)

    monkeypatch.setattr(Life, "patch", patch)
    engine.update(state, 1)
    others[0].join(5)
    assert not others[0].is_alive()
    assert processes.lives[-1].gate.is_set() is (call != "pause")


def test_sleep_update_and_wake_follow_each_other_on_one_thread(
    policy: Policy, processes: type[Process], state: dict[str, Tensor]
) -> None:
    engine = start(policy)
    engine.sleep()
    engine.update(state, 1)
    assert not processes.lives[-1].gate.is_set()
    engine.wake()
    assert processes.lives[-1].gate.is_set()
    engine.close()


def test_no_two_processes_draw_alike(policy: Policy, processes: type[Process]) -> None:
    for seed in (0, 1):
        engine = start(policy, seed=seed)
        processes.all[-1].kill()
        engine.pause()
    again = start(policy, seed=0)
    seeds = [process.seed for process in processes.all]
    assert len(set(seeds[:4])) == 4
    assert seeds[4] == seeds[0], "nothing but seed, version and life"
    assert all(0 <= seed < 2**31 for seed in seeds)
    again.close()


def test_a_context_beyond_the_policys_is_told_where_it_was_chosen(
    policy: Policy, processes: type[Process]
) -> None:
    notices: list[str] = []
    assert start(policy, notices).context == policy.max_positions == 128
    smaller = start(policy, notices, max_context=64)
    assert smaller.context == 64
    with pytest.raises(EngineError, match="60 tokens plus 5 new ones exceed the 64 positions"):
        smaller.open().start([GenerationRequest((5,) * 60, 1, 0, Sampling(max_new_tokens=5))])
    assert notices == []
    assert start(policy, notices, max_context=500).context == 128
    assert notices == [
        f"info: vllm.max_context 500 is more than the 128 positions of {policy.path}; 128 are used"
    ]

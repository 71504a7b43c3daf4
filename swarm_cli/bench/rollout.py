"""`swarm bench rollout`: how fast rollouts are made, and what it costs that weights change under them.

Four measurements of one policy on this machine; what is compared runs by turns, and medians are reported.

1. Tokens a second against bare `vllm.LLM.generate` (`baseline`): the same work in another engine. Ours keeps
   versions and log-probabilities of every token; scoring is left out, which bare vLLM has no counterpart of.
   Bare vLLM has its own defaults and computes no log-probabilities. Null with `--engine transformers`.
2. Partial against synchronous rollouts (`partial`): log-normal lengths, sigma 1, capped at 8 medians; updates
   of 0.5 % density; caches are kept.
3. How long such an update in the partial runs stops generation, and its share of the time; for each way to
   treat rollouts under way, the seconds that a fixed workload loses to one update halfway.
4. The largest difference in log-probability to a transformers model with the same patched weights
   (`updates`), and the difference that the patch itself makes.

Not measured: training, rewards, the network. A busy machine widens the spread of the pairs, which is
reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import Any, Literal

from node.config import NodeConfig
from node.open.machine import device_of
from node.rollout.engine._vllm_arguments import GPU_MEMORY_SHARE
from node.rollout.engine.base import Engine
from node.rollout.engine.transformers import TransformersEngine
from node.rollout.engine.vllm import VllmEngine
from node.rollout.policy import Policy
from swarm_cli.bench.baseline import BareVllm
from swarm_cli.bench.measure import Say, envelope, in_turn, spread
from swarm_cli.bench.partial import partial, synchronous
from swarm_cli.bench.updates import Weights, seconds_with_update
from swarm_cli.bench.workload import Group, LongTail, groups, prompt, rollout

__all__ = ["FULL", "QUICK", "Size", "bench_rollout"]

WAYS: tuple[Literal["continue", "recompute", "recycle"], ...] = ("continue", "recompute", "recycle")


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    pairs: int
    concurrency: int
    group_size: int
    tokens: int
    """Tokens of each rollout, in measurements 1 and 3."""
    tail: LongTail
    steps: int
    """Batches of a synchronous run."""


FULL = Size(pairs=5, concurrency=32, group_size=4, tokens=64, tail=LongTail(median=24), steps=2)
"""About seven minutes with SmolLM2-135M on two cores."""
QUICK = Size(pairs=2, concurrency=8, group_size=2, tokens=16, tail=LongTail(median=4), steps=2)
"""Shows that all of it runs; its numbers mean little."""


@dataclass
class _Updates:
    """Gives an engine new weights, on a thread, and notes how long it stood still."""

    engine: Engine
    weights: Weights
    lane: ThreadPoolExecutor
    stalls_s: list[float] = field(default_factory=list)

    def __call__(self) -> Callable[[], None]:
        return self.lane.submit(self._update).result

    def _update(self) -> None:
        began_s = time.perf_counter()
        self.weights.update(self.engine)
        took_s = time.perf_counter() - began_s
        self.stalls_s.append(self.engine.update_stall_s if isinstance(self.engine, VllmEngine) else took_s)


def bench_rollout(config: NodeConfig, policy: Policy, size: Size, say: Say) -> dict[str, Any]:
    """The report. Starts and ends engines; minutes. Raises EngineError, ConfigError, ModelError."""
    sized = {
        "max_concurrent": size.concurrency,
        "gpu_memory_share": config.vllm.gpu_memory_share or GPU_MEMORY_SHARE,
    }
    settings = config.model_copy(update={"vllm": config.vllm.model_copy(update=sized)})
    weights = Weights(policy)
    results: dict[str, Any] = {
        "engine": config.rollout.engine,
        "model": str(policy.path),
        "dtype": settings.vllm.dtype,
    }
    bare = _open_bare(settings, policy, say)
    try:
        engine = _open(settings, policy, say)
        try:
            results |= _speed(engine, bare, policy, size, say)
            if bare is not None:
                bare.close()
            results |= _partial(engine, weights, policy, size, say)
            say("comparing log-probabilities with transformers")
            results |= {"parity_max_abs": weights.parity(engine), "update_moves": weights.moved()}
            costs_s: dict[str, float] = {}
            for engine.in_flight in WAYS:
                costs_s[engine.in_flight] = _lost_s(engine, weights, policy, size, say)
            results["in_flight_cost_s"] = costs_s
        finally:
            engine.close()
    finally:
        if bare is not None:
            bare.close()
    return envelope("rollout", results)


def _speed(engine: Engine, bare: BareVllm | None, policy: Policy, size: Size, say: Say) -> dict[str, Any]:
    tokens = size.concurrency * size.tokens

    def prompts(pair: int) -> list[tuple[int, ...]]:
        first = 1000 * (pair + 2)
        return [prompt(policy, first + place) for place in range(size.concurrency // size.group_size)]

    def ours(pair: int) -> float:
        requests = [rollout(each, size.tokens, n=size.group_size) for each in prompts(pair)]
        began_s = time.perf_counter()
        engine.generate(requests)
        return tokens / (time.perf_counter() - began_s)

    say("warming up")
    ours(-1)
    if bare is None:
        alone = [ours(pair) for pair in range(size.pairs)]
        nothing = dict.fromkeys(("baseline_tokens_per_s", "ratio", "ratios"))
        return {"tokens_per_s": median(alone), **nothing, "spread": spread(alone)}

    def theirs(pair: int) -> float:
        each = [prompt_ids for prompt_ids in prompts(pair) for _ in range(size.group_size)]
        return tokens / bare.generate(each, [size.tokens] * size.concurrency)

    theirs(-1)
    pairs = in_turn(size.pairs, ours, theirs, lambda text: say(f"tokens a second, ours and bare: {text}"))
    return {
        "tokens_per_s": median(pairs.ours),
        "baseline_tokens_per_s": median(pairs.theirs),
        "ratio": pairs.ratio,
        "ratios": pairs.ratios,
        "spread": spread(pairs.ours),
    }


def _partial(engine: Engine, weights: Weights, policy: Policy, size: Size, say: Say) -> dict[str, Any]:
    per_step = size.concurrency // size.group_size
    shares: list[float] = []

    def work(pair: int) -> Iterator[Group]:
        return groups(policy, size.tail, size.group_size, 100_000 * (pair + 1))

    def synchronously(pair: int) -> float:
        run = synchronous(engine, work(pair), groups_per_step=per_step, steps=size.steps, update=between)
        return run.tokens_per_s

    def partially(pair: int) -> float:
        same = islice(work(pair), per_step * size.steps)
        run = partial(
            engine,
            work(pair),
            groups_per_step=per_step,
            in_flight=size.concurrency,
            tokens=sum(sum(group.lengths) for group in same),
            update=within,
        )
        shares.append(sum(within.stalls_s[len(within.stalls_s) - run.updates :]) / run.wall_s)
        return run.tokens_per_s

    with ThreadPoolExecutor(1, thread_name_prefix="bench-update") as lane:
        between, within = (_Updates(engine, weights, lane) for _ in range(2))
        between()()  # the first one is whole
        pairs = in_turn(
            size.pairs,
            partially,
            synchronously,
            lambda text: say(f"tokens a second, partial and not: {text}"),
        )
    return {
        "partial_tokens_per_s": median(pairs.ours),
        "synchronous_tokens_per_s": median(pairs.theirs),
        "partial_speedup": pairs.ratio,
        "partial_speedups": pairs.ratios,
        "update_stall_s": median(within.stalls_s),
        "update_stalls_s": within.stalls_s,
        "update_share": median(shares),
    }


def _lost_s(engine: Engine, weights: Weights, policy: Policy, size: Size, say: Say) -> float:
    """Seconds that an update halfway costs, in the median of pairs."""
    say("measuring what an update costs rollouts under way")

    def run(pair: int, update: Callable[[], None] | None) -> float:
        prompts = [prompt(policy, 10_000 * pair + place) for place in range(size.concurrency)]
        return seconds_with_update(engine, prompts, size.tokens, update)

    lost: list[float] = []
    for pair in range(1, 3):
        undisturbed_s = run(2 * pair, None)
        lost.append(run(2 * pair + 1, lambda: weights.update(engine)) - undisturbed_s)
    return median(lost)


def _open_bare(config: NodeConfig, policy: Policy, say: Say) -> BareVllm | None:
    if config.rollout.engine != "vllm":
        return None
    say("starting bare vLLM")
    context = min(policy.max_positions, config.vllm.max_context)
    return BareVllm(policy.path, config.vllm, max_model_len=context)


def _open(config: NodeConfig, policy: Policy, say: Say) -> VllmEngine | TransformersEngine:
    say(f"starting the {config.rollout.engine} engine")
    if config.rollout.engine == "vllm":
        return VllmEngine(
            policy,
            config.vllm,
            seed=config.seed,
            notice=lambda level, text: say(f"{level}: {text}"),
        )
    return TransformersEngine(policy, device=device_of(config), max_rows=config.vllm.max_concurrent)

"""`swarm bench codec`: how small a real policy update becomes, and how fast.

The update is one AdamW step of the policy (`_codec_updates`): `fresh`, the twelfth step after loading, when
FP32 masters still sit near the middle of their bf16 cells, and `late`, with masters anywhere in their cells,
as deep in a run. Both at the learning rate 1e-6; larger ones, under `learning_rates`, change more weights.

`bytes` of the delta are held against a full bf16 copy (tied tensors once), the entropy it conditions on and a
PULSE-like layout (`_codec_yardsticks`). `encode_gb_s` and `decode_gb_s`: GB (1e9 bytes) of full weights in
one second of one core by the thread's own clock, best of some rounds, hashing the result and copying the base
included. `parallel`: gain in wall time from all cores. `apply_s`: a copy in place, all cores, all hashing;
`engine_s`: all of it into a transformers engine of this process. `extra_bytes`: the most memory beyond the
two weight sets that numpy takes on one thread. Not measured: the network (`swarm bench broadcast`).
"""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from node.rollout.engine.transformers import TransformersEngine
from node.rollout.policy import Policy
from node.weights.chain.bf16 import U16, to_tensors
from protocol import delta
from swarm_cli.bench._codec_updates import STEPS, Update, UpdateKind, make_update
from swarm_cli.bench._codec_yardsticks import bound_bytes, need_zstandard, pulse_like_bytes
from swarm_cli.bench.measure import Say, envelope

__all__ = ["FULL", "QUICK", "Size", "bench_codec"]

LEARNING_RATE = 1e-6


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    steps: int
    rounds: int
    """Of each speed."""
    learning_rates: tuple[float, ...]
    """Reported beside the states."""


FULL = Size(steps=STEPS, rounds=5, learning_rates=(1e-5, 1e-4))
"""With SmolLM2-135M on two cores ten minutes for the updates, once, and one for the codec."""
QUICK = Size(steps=3, rounds=2, learning_rates=(1e-5,))
"""Shows that all of it runs; its numbers mean little."""


def bench_codec(policy: Policy, cache: Path, size: Size, say: Say) -> dict[str, Any]:
    """The report. Updates are kept in `cache`. Raises ConfigError, EngineError, ModelError."""
    need_zstandard()
    states = {
        "fresh": UpdateKind(False, LEARNING_RATE, size.steps),
        "late": UpdateKind(True, LEARNING_RATE, size.steps),
    }
    rates = {f"{rate:g}": UpdateKind(True, rate, size.steps) for rate in size.learning_rates}
    for kind in (*states.values(), *rates.values()):  # before the engine, which would take their memory
        make_update(policy, kind, cache, say)
    engine = TransformersEngine(policy)
    try:

        def measured(kind: UpdateKind) -> dict[str, Any]:
            say(f"{kind.name}: coding")
            return _measure(make_update(policy, kind, cache, say), engine, size.rounds)

        results = {
            "model": str(policy.path),
            "step": size.steps,
            "learning_rate": LEARNING_RATE,
            "states": {name: measured(kind) for name, kind in states.items()},
            "learning_rates": {name: measured(kind) for name, kind in rates.items()},
        }
    finally:
        engine.close()
    return envelope("codec", results)


def _measure(update: Update, engine: TransformersEngine, rounds: int) -> dict[str, Any]:
    base, new = update.base, update.new
    base_digest = delta.weights_digest(base)
    cores = len(os.sched_getaffinity(0))
    data = delta.encode(base, new, base_digest=base_digest)
    got = delta.decode(base, data, base_digest=base_digest)
    lossless = all(np.array_equal(got[name], new[name]) for name in new)
    mine = {name: array.copy() for name, array in base.items()}

    def encode(threads: int) -> Callable[[], object]:
        return lambda: delta.encode(base, new, base_digest=base_digest, threads=threads)

    def decode(threads: int) -> Callable[[], object]:
        return lambda: delta.decode(base, data, base_digest=base_digest, threads=threads)

    def apply() -> None:
        delta.apply(mine, data, base_digest=base_digest, threads=cores)

    apply_s = _best(apply, time.perf_counter, rounds, lambda: _copy(base, mine))
    lossless &= all(np.array_equal(mine[name], new[name]) for name in new)
    tensors = to_tensors(mine)
    full = sum(array.nbytes for array in base.values())
    pairs = [(base[name], new[name]) for name in base]
    bound, pulse = bound_bytes(pairs), pulse_like_bytes(pairs)
    changed = sum(int(np.count_nonzero(old != fresh)) for old, fresh in pairs)
    return {
        "params": full // 2,
        "density": 2 * changed / full,
        "full_bytes": full,
        "bytes": len(data),
        "bound_bytes": round(bound),
        "pulse_like_bytes": pulse,
        "ratio_full": full / len(data),
        "ratio_pulse": pulse / len(data),
        "ratio_bound": len(data) / bound,
        "encode_gb_s": full / 1e9 / _best(encode(1), time.thread_time, rounds),
        "decode_gb_s": full / 1e9 / _best(decode(1), time.thread_time, rounds),
        "lossless": lossless,
        "parallel": {
            "encode": _gain(encode, cores, rounds),
            "decode": _gain(decode, cores, rounds),
        },
        "apply_s": apply_s,
        "engine_s": _best(lambda: engine.update(tensors, 1), time.perf_counter, rounds),
        "extra_bytes": {"encode": _peak(encode(1)), "apply": _peak_of_apply(base, data, base_digest)},
    }


def _best(
    run: Callable[[], object],
    clock: Callable[[], float],
    rounds: int,
    prepare: Callable[[], None] = lambda: None,
) -> float:
    """Seconds of the fastest round."""
    took_s: list[float] = []
    for _ in range(rounds):
        prepare()
        began_s = clock()
        run()
        took_s.append(clock() - began_s)
    return min(took_s)


def _gain(run: Callable[[int], Callable[[], object]], cores: int, rounds: int) -> float:
    """How many times faster all cores are than one."""
    return _best(run(1), time.perf_counter, rounds) / _best(run(cores), time.perf_counter, rounds)


def _peak(run: Callable[[], object]) -> int:
    """Bytes that `run` takes at most beyond what was there."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _peak_of_apply(base: dict[str, U16], data: bytes, base_digest: str) -> int:
    mine = {name: array.copy() for name, array in base.items()}
    return _peak(lambda: delta.apply(mine, data, base_digest=base_digest))


def _copy(source: dict[str, U16], target: dict[str, U16]) -> None:
    for name, array in source.items():
        np.copyto(target[name], array)

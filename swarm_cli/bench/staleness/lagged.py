"""One run with stale rollouts: a tiny policy learns the demo's tasks from what older versions generated.

For: `run_lagged`, a pure function of its settings on one machine: same settings, same numbers. Trainer, batch
and objectives are the product's own. Rollouts come from `answers.py` through a `Buffer`, which decides the
version, and what some objectives need besides (log pi_old of that version, a moving average) is provided.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.rollout.engine.base import TokenSequence
from node.rollout.policy import Policy
from node.state.paths import bundled
from node.train.ewma import Ewma
from node.train.settings import TrainSettings
from node.train.step import StepReport, Trainer
from node.weight.batch import TrainingBatch, collate
from node.weight.by_group import ByGroup
from node.weight.groups import OWN_SOURCE, TrainingGroup
from swarm_cli.bench.staleness.answers import Answered, Answers
from swarm_cli.bench.staleness.buffer import Buffer, Place, Schedule
from swarm_cli.bench.staleness.ledger import Job
from swarm_cli.bench.staleness.mismatch import Mismatch
from swarm_cli.bench.staleness.objective import Method, open_method
from swarm_cli.bench.staleness.tasks import open_tasks

__all__ = ["LAGGED", "Lagged", "RunResult", "run_lagged"]


class Lagged(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is. Two runs with equal settings are the same run."""

    preset: str
    """See `objective.py`."""
    lags: tuple[int, ...]
    """One, or several to draw each group's from."""
    seed: int
    learning_rate: float
    steps: int
    mismatch: Mismatch = Mismatch.NONE
    policy: str = "wren"
    groups: int = 8
    group_size: int = 8
    evaluate_every: int = 16
    warmup_steps: int = 5


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    curve: tuple[tuple[int, float], ...]
    """Held-out reward by steps made, beginning with 0."""
    skipped: int
    """Steps whose loss or gradient was not finite."""
    kept: float
    """Share of tokens whose gradient counted, mean over steps."""
    ess: float
    gap: float
    """Mean |log pi - log mu|, nats per token."""
    seconds: dict[str, float]
    """Wall time by kind of work."""
    cpu_s: float
    """Of the process, which a busy machine prolongs less."""


@contextmanager
def _timed(seconds: dict[str, float], work: str) -> Iterator[None]:
    began_s = time.perf_counter()
    yield
    seconds[work] = seconds.get(work, 0.0) + time.perf_counter() - began_s


def run_lagged(settings: Lagged, heard: Callable[[int, Sequence[Answered]], None] | None = None) -> RunResult:
    """One run. `heard` is told what each version trains on. Raises ConfigError for an unknown preset,
    ModelError for a policy of another kind."""
    began_s = time.process_time()
    learner = _Learner(settings)
    answers = learner.answers
    schedule = Schedule(settings.lags, steps=settings.steps, groups=settings.groups, seed=settings.seed)
    version = 0

    def generate(places: Sequence[Place]) -> list[Answered]:
        weights, mismatch = learner.weights(), settings.mismatch
        return answers.answer(weights, places, version, mismatch=mismatch, old=learner.method.snapshot)

    buffer: Buffer[Answered] = Buffer(schedule, settings.groups, generate)
    seconds: dict[str, float] = {}
    curve: list[tuple[int, float]] = []
    reports: list[StepReport] = []
    for version in range(settings.steps):
        if version % settings.evaluate_every == 0:
            with _timed(seconds, "evaluate"):
                curve.append((version, answers.held_out(learner.weights())))
        with _timed(seconds, "generate"):
            answered = buffer.take(version)
        if heard is not None:
            heard(version, answered)
        with _timed(seconds, "train"):
            reports.append(learner.step(version, answered))
    with _timed(seconds, "evaluate"):
        curve.append((settings.steps, answers.held_out(learner.weights())))
    own = [each for report in reports for each in report.sources if each.source == OWN_SOURCE]
    return RunResult(
        curve=tuple(curve),
        skipped=sum(report.skipped for report in reports),
        kept=_mean([each.kept for each in own]),
        ess=_mean([each.ess for each in own]),
        gap=_mean([each.gap for each in own]),
        seconds=seconds,
        cpu_s=time.process_time() - began_s,
    )


class _Learner:
    """The trainer of a run and what it is fed with."""

    def __init__(self, settings: Lagged) -> None:
        self.method: Method = open_method(settings.preset)
        self._policy = Policy.open(bundled(f"models/{settings.policy}"))
        self._settings = TrainSettings(
            learning_rate=settings.learning_rate,
            warmup_steps=settings.warmup_steps,
            measure_start_kl=False,
            own=self.method.objective,
            ess_scaling=self.method.ess_scaling,
        )
        self._trainer = Trainer(self._policy, self._settings)
        self._treatments = ByGroup(self._settings.weight)
        self.answers = Answers(self._policy, open_tasks(), seed=settings.seed, group_size=settings.group_size)
        self._ewma = Ewma(self.weights()) if self.method.ewma else None

    def weights(self) -> Mapping[str, Tensor]:
        """As they lie now."""
        return self._trainer.learning()

    def step(self, version: int, answered: Sequence[Answered]) -> StepReport:
        """Train on some groups once."""
        groups = [self._group(each, version, number) for number, each in enumerate(answered)]
        groups = self._treatments.treat(groups)
        batch = collate(groups, self._settings.weight, self._policy)
        if self.method.snapshot:
            batch = replace(batch, snapshot_BT=_padded(batch, [row for each in answered for row in each.old]))
        if self._ewma is not None:
            batch = replace(batch, ewma_BT=_padded(batch, self._average(self._ewma, answered)))
        self._trainer.policy_version = version  # a skipped step counts, too
        report = self._trainer.step(batch)
        if self._ewma is not None:
            self._ewma.add(self.weights())
        return report

    def _average(self, ewma: Ewma, answered: Sequence[Answered]) -> list[NDArray[np.float32]]:
        def compute(_: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
            return self.answers.plain.logprobs(self.weights(), _sequences(answered))

        return ewma.logprobs([], self.weights, compute)

    def _group(self, answered: Answered, version: int, number: int) -> TrainingGroup:
        return TrainingGroup(
            source=OWN_SOURCE,
            group=f"{version}/{number}",
            prompt_ids=tuple(answered.prompt),
            rollouts=answered.rollouts(),
            rewards=answered.rewards,
            lag=version - answered.born,
        )


def _mean(values: Sequence[float]) -> float:
    """Over the steps whose numbers are some; 0 without any."""
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else 0.0


def _sequences(answered: Sequence[Answered]) -> list[tuple[list[int], list[int]]]:
    return [(each.prompt, drawn.tokens.tolist()) for each in answered for drawn in each.drawn]


def _padded(batch: TrainingBatch, rows: Sequence[NDArray[np.float32]]) -> Tensor:
    """One array for each row of the batch, as a tensor of its width."""
    padded = torch.zeros(batch.mask_BT.shape)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = torch.from_numpy(row)
    return padded


LAGGED = Job("lagged", run_lagged, Lagged, RunResult)

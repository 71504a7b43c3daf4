"""The stability supervisor: after each step, and each probe, the weights are good or they go back.

    good state --step--> signs --Watch--> no alarm: what the next step may go back to
                                     |
                                     +--> alarm: weights, moments and updates go back, as a new version

Decisions are `stability.py`'s, copies `good_state.py`'s; this measures the signs and joins the two. A state
is kept before every step, and another one at every good probe, since what a probe finds is older than a step.
A version that was rolled back stays a version: the old weights come back under the next number. A step's bad
version is never seen by anybody if its caller brings only the result to the engine; the versions that a probe
finds bad were. After too many in a row `RollBack.error` says so, with the good weights in place, so that they
can be saved before it is raised. Whoever gives the trainer other weights (a merge) has judged them: they
count as good.

Costs a forward pass over `KL_ROWS` own rollouts a step (2 to 6 % of the demo's steps), and a copy of weights
and moments in RAM, two with probes (1.5 GiB beside the 8.6 that are planned for SmolLM2-135M). Measured on
the demo's smallest policy, one step in 160 at a hundred times the learning rate: rewards ended at 0.81 to
0.83 over three seeds, without supervision at 0.38 to 0.48. Blocking; on the thread that trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from node.config import SuperviseConfig
from node.train.good_state import GoodState
from node.train.metrics import gap
from node.train.old_policy import sequences_of
from node.train.stability import Alarm, RollBack, StepSigns, Watch
from node.train.step import StepReport, Trainer
from node.weight.batch import TrainingBatch
from node.weight.groups import Kind
from protocol.errors import UnstableError

__all__ = ["KL_ROWS", "Supervisor"]

KL_ROWS = 8
"""Own rollouts that are looked at again after a step, to say how far it moved the policy."""


class Supervisor:
    """Steps `trainer` and takes back what was bad."""

    def __init__(self, trainer: Trainer, config: SuperviseConfig, *, kl_rows: int = KL_ROWS) -> None:
        """`kl_rows` 0: how far a step moves the policy is not measured."""
        self._trainer = trainer
        self._watch = Watch(config)
        self._kl_rows = kl_rows
        self._good = GoodState()
        self._proven = GoodState() if config.probe_every else None
        self.rolled_back = 0
        """Roll-backs of this run."""

    @property
    def nbytes(self) -> int:
        """Of the states that are held."""
        return self._good.nbytes + (self._proven.nbytes if self._proven is not None else 0)

    def step(self, batch: TrainingBatch) -> StepReport:
        """`Trainer.step`, undone if it was bad. Raises what that raises."""
        if self._good.policy_version != self._trainer.policy_version:
            self._good.keep(self._trainer)
        report = self._trainer.step(batch)
        if report.skipped:
            return report
        kl_step = self._kl_step(batch, report)
        own = (share.ess for share in report.kinds if share.source == Kind.OWN)
        alarm = self._watch.step(StepSigns(report.grad_norm, next(own, None), kl_step))
        undone = self._back(alarm, self._good) if alarm is not None else None
        return replace(report, kl_step=kl_step, rolled_back=undone)

    def probe(self, rewards: Sequence[float]) -> RollBack | None:
        """Judge the trainer's weights by these rewards of the probe's prompts, in the same order at every
        call; the first are what the next are held against. Bad: back to those of the last good probe."""
        if self._proven is None:
            raise ValueError("this supervisor was made without probing")
        alarm = self._watch.probe(rewards)
        if alarm is not None:
            return self._back(alarm, self._proven)
        self._proven.keep(self._trainer)
        return None

    def _back(self, alarm: Alarm, good: GoodState) -> RollBack:
        bad_version = self._trainer.policy_version
        good_version = good.policy_version
        if good_version is None:
            raise ValueError("nothing was kept to go back to")
        good.restore(self._trainer, bad_version + 1)
        self.rolled_back += 1
        return RollBack(
            alarm=alarm,
            bad_version=bad_version,
            good_version=good_version,
            policy_version=bad_version + 1,
            total=self.rolled_back,
            error=_error(alarm, good_version) if self._watch.ends_run(alarm) else None,
        )

    def _kl_step(self, batch: TrainingBatch, report: StepReport) -> float | None:
        own = batch.own_B.nonzero().squeeze(-1).tolist()
        if not own or not self._kl_rows:
            return None
        rows = own[:: -(-len(own) // self._kl_rows)]  # of all prompts, not many of one
        after = self._trainer.logprobs(sequences_of(batch, rows))
        before = [report.logprobs_BT[row, : len(new)] for row, new in zip(rows, after, strict=True)]
        return gap(torch.cat(before), torch.from_numpy(np.concatenate(after))).k3


def _error(alarm: Alarm, good_version: int) -> UnstableError:
    return UnstableError(
        f"{alarm.in_a_row} times in a row an update had to be rolled back, now because {alarm.text}; the "
        f"weights are those of version {good_version}. Lower train.learning_rate, look at what the last "
        "groups were rewarded for, or allow more in [supervise]"
    )

"""Log-probabilities of a batch by earlier weights, for objectives that ask how far the policy has come.

    batch --fill--> the same with snapshot_BT, ewma_BT --step--> new weights --> newest snapshot, average

Which of the two an objective asks for is its option `old`: "snapshot" is the exact route, the weights of the
generating version (`snapshots.py`); "ewma" a moving average (`ewma.py`); "ingestion" needs nothing of this,
it is the start of the step. The approximate ones entangle staleness with engine mismatch: from the start of
the step all staleness counts as mismatch, and thresholds that are meant for one cut the other (arXiv
2605.12070; problem EXACT, the average RECONSTRUCTED). Letters: B rollouts, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.rollout.engine.base import TokenSequence
from node.train.ewma import Ewma
from node.train.snapshots import Snapshots
from node.train.step import StepReport, Trainer
from node.weight.batch import TrainingBatch

__all__ = ["OldPolicy", "Steps", "sequences_of"]


class Steps(Protocol):
    """A trainer, or something around one."""

    def step(self, batch: TrainingBatch) -> StepReport:
        """Train on `batch` once. Blocking."""
        ...


class OldPolicy:
    """Wraps `steps`, which train `trainer` on a batch, and keeps what it was given up to date. Weights that
    came in another way since (a merge, a roll-back) are noticed by their version, and a new average begins
    there; a step that was rolled back is not in it. Raises ConfigError when no snapshot fits."""

    def __init__(
        self,
        trainer: Trainer,
        steps: Steps,
        *,
        snapshots: Snapshots | None,
        ewma: Ewma | None,
    ) -> None:
        self._trainer = trainer
        self._steps = steps
        self._snapshots = snapshots
        self._ewma = ewma
        self._seen = -1
        """Version of the weights that were looked at last."""
        self._look()

    def step(self, batch: TrainingBatch) -> StepReport:
        """One step, with old log-probabilities. Raises what `steps` raise."""
        if self._look() and self._ewma is not None:
            self._ewma.restart(self._trainer.learning())
        report = self._steps.step(self.fill(batch))
        if self._look() and self._ewma is not None and report.rolled_back is None:
            self._ewma.add(self._trainer.learning())
        return report

    def fill(self, batch: TrainingBatch) -> TrainingBatch:
        """`batch` with what there is: snapshots for rows with versions, NaN in others, and the average for
        all. Between steps, at the newest version looked at. Raises what `Trainer.logprobs` raises."""
        trainer = self._trainer
        if self._snapshots is not None:
            rows = (batch.versions_BT[:, 0] >= 0).nonzero().squeeze(-1).tolist()
            sequences = sequences_of(batch, rows)
            versions = [
                batch.versions_BT[row, : len(sequence.token_ids)].numpy()
                for row, sequence in zip(rows, sequences, strict=True)
            ]
            found = self._snapshots.logprobs(sequences, versions, trainer.learning, trainer.logprobs)
            exact_BT = torch.zeros_like(batch.mask_BT)
            for row, exact_T in zip(rows, found.exact, strict=True):
                exact_BT[row, : len(exact_T)] = torch.from_numpy(exact_T)
            batch = replace(batch, snapshot_BT=_padded(batch, rows, found.logprobs), exact_BT=exact_BT)
        if self._ewma is not None:
            rows = list(range(len(batch.treatments)))
            values = self._ewma.logprobs(sequences_of(batch, rows), trainer.learning, trainer.logprobs)
            batch = replace(batch, ewma_BT=_padded(batch, rows, values))
        return batch

    def _look(self) -> bool:
        """Whether the weights are another version than when they were looked at last."""
        version = self._trainer.policy_version
        if version == self._seen:
            return False
        self._seen = version
        if self._snapshots is not None:
            self._snapshots.keep(version, self._trainer.learning())
        return True


def sequences_of(batch: TrainingBatch, rows: Sequence[int]) -> list[TokenSequence]:
    """These rows without padding."""
    lengths = batch.mask_BT.sum(-1).tolist()
    sequences = []
    for row in rows:
        start = int(batch.starts_B[row])
        ids = batch.tokens_BL[row, : start + lengths[row]].tolist()
        sequences.append(
            TokenSequence(tuple(ids[:start]), tuple(ids[start:]), float(batch.temperature_B[row]))
        )
    return sequences


def _padded(batch: TrainingBatch, rows: Sequence[int], values: Sequence[NDArray[np.float32]]) -> Tensor:
    padded_BT = torch.full(batch.mask_BT.shape, torch.nan)
    for row, values_T in zip(rows, values, strict=True):
        padded_BT[row, : len(values_T)] = torch.from_numpy(values_T)
    return padded_BT

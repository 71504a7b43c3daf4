"""The last versions of the weights, to say what log pi_old was at the version that generated a token.

    each new version --keep--> a copy, and differences to older ones
    sequences, version of each token --logprobs--> the model's weights walk back by versions, and return

Why: a token's ratio is (pi_old^v / mu^v) (pi / pi_old^v), both factors at its generating version v. The first
is engine mismatch, the second staleness, and masks and clips are meant for one of them (arXiv 2605.12070).
With delayed updates and rollouts of several versions pi_old^v is gone unless weights are kept. Evidence:
EXACT, these are the weights of v bit for bit (`differences.py`).

Why not in bfloat16, which is half the size and at hand in the chain: on SmolLM2-135M it moves log pi by 0.017
nats per token on average, where a step at learning rate 1e-6 moves it by 0.016 on the very tokens that it
trained on and by 0.0014 on others. It would drown the staleness that this is for. Half the size it is not
either: exact differences take 2.05 bytes a weight at that rate.

Memory, all in RAM: a copy of what learns (the newest version, to take the next difference from), and for each
older version half a copy or, at learning rates far above 1e-5, up to a whole one. Of an adapter only its own
tensors. Time: 0.4 s a version for 135 million weights on one core; then a forward pass for the tokens of each
version, and most rollouts have one. A token older than all that is kept gets log pi of the oldest one, which
is nearer than the newest, and is marked as not exact. In a rollout of several versions the engine may have
gone on with keys and values that earlier ones cached (`rollout.in_flight = "continue"`); what that changes
counts as engine mismatch, as it should.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from node.rollout.engine.base import TokenSequence
from node.train.differences import Difference, difference, walk
from protocol.errors import ConfigError, LocalProtocolError

__all__ = ["OldRows", "Snapshots"]

Weights = Mapping[str, Tensor]
Logprobs = Callable[[Sequence[TokenSequence]], list[NDArray[np.float32]]]


@dataclass(frozen=True, eq=False)
class OldRows:
    """log pi_old, one array for each sequence."""

    logprobs: tuple[NDArray[np.float32], ...]
    exact: tuple[NDArray[np.bool_], ...]
    """True where it is that of the very version that generated the token."""


@dataclass(frozen=True, eq=False)
class _Older:
    """A kept version, and what makes the next newer one of it."""

    policy_version: int
    changes: dict[str, Difference]

    @property
    def nbytes(self) -> int:
        return sum(change.nbytes for change in self.changes.values())


class Snapshots:
    """Keeps up to `versions` versions, the newest among them, in at most `max_bytes`. One thread at a
    time."""

    def __init__(self, *, versions: int, max_bytes: int) -> None:
        if versions < 1:
            raise ConfigError(f"train.snapshots is {versions}; at least 1 version can be kept")
        self._versions = versions
        self._max_bytes = max_bytes
        self._newest = -1
        self._copy: dict[str, Tensor] = {}
        self._older: deque[_Older] = deque()
        """Newest first."""

    @property
    def held(self) -> tuple[int, ...]:
        """Versions, newest first."""
        return (self._newest, *(older.policy_version for older in self._older)) if self._copy else ()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._copy.values()) + sum(o.nbytes for o in self._older)

    def keep(self, policy_version: int, weights: Weights) -> None:
        """Take note that `weights` are now this version; old ones make room. Raises LocalProtocolError unless
        it is newer than all that is kept, ConfigError when not even one copy fits."""
        if self._copy and policy_version <= self._newest:
            raise LocalProtocolError(f"version {policy_version} follows {self._newest} in the snapshots")
        if not self._copy:
            needed = sum(tensor.nbytes for tensor in weights.values())
            if needed > self._max_bytes:
                raise ConfigError(
                    f"train.snapshot_bytes is {self._max_bytes} and one copy of the weights takes {needed}; "
                    "allow twice as much, or choose another old policy in train.objective_options"
                )
            self._copy = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights.items()}
        elif self._versions > 1:
            changes = {name: difference(copy, weights[name]) for name, copy in self._copy.items()}
            self._older.appendleft(_Older(self._newest, changes))
            self._take(weights)
        else:
            self._take(weights)
        self._newest = policy_version
        while self._older and (len(self._older) >= self._versions or self.nbytes > self._max_bytes):
            self._older.pop()

    def logprobs(
        self,
        sequences: Sequence[TokenSequence],
        versions: Sequence[NDArray[np.integer]],
        weights: Callable[[], Weights],
        compute: Logprobs,
    ) -> OldRows:
        """log pi_old of each token at the version that generated it. `weights()` are the tensors that learn,
        as they lie now, at the newest kept version; `compute` uses whatever is in them (`Trainer.learning`,
        `Trainer.logprobs`). They walk through older versions meanwhile and are the same bits again
        afterwards, whatever happens. Raises LocalProtocolError for unequal lengths."""
        wanted = [self._nearest(rows) for rows in versions]
        if [len(rows) for rows in wanted] != [len(sequence.token_ids) for sequence in sequences]:
            raise LocalProtocolError("old log-probabilities need one version for each token")
        found = [np.zeros(len(rows), np.float32) for rows in wanted]
        left = sorted({int(version) for rows in wanted for version in np.unique(rows)}, reverse=True)
        walked: list[_Older] = []
        try:
            for version in left:
                while version < self._at(walked):
                    self._step(weights(), self._older[len(walked)], back=True, walked=walked)
                self._fill(version, sequences, wanted, found, compute)
        finally:
            while walked:
                self._step(weights(), walked[-1], back=False, walked=walked)
        exact = tuple(np.equal(rows, near) for rows, near in zip(versions, wanted, strict=True))
        return OldRows(tuple(found), exact)

    def _nearest(self, versions_T: NDArray[np.integer]) -> NDArray[np.int64]:
        """The newest kept version that is not newer; the oldest one for what is older than all."""
        ascending = np.array(self.held[::-1], np.int64)
        places = np.searchsorted(ascending, versions_T, side="right") - 1
        nearest: NDArray[np.int64] = ascending[places.clip(min=0)]
        return nearest

    def _at(self, walked: Sequence[_Older]) -> int:
        return walked[-1].policy_version if walked else self._newest

    @staticmethod
    def _step(weights: Weights, older: _Older, *, back: bool, walked: list[_Older]) -> None:
        for name, change in older.changes.items():
            walk(weights[name], change, back=back)
        if back:
            walked.append(older)
        else:
            walked.pop()

    @staticmethod
    def _fill(
        version: int,
        sequences: Sequence[TokenSequence],
        wanted: Sequence[NDArray[np.int64]],
        found: Sequence[NDArray[np.float32]],
        compute: Logprobs,
    ) -> None:
        """Of all tokens of this version; what comes behind the last one of a sequence need not be
        computed."""
        rows = [row for row, versions_T in enumerate(wanted) if (versions_T == version).any()]
        cut = []
        for row in rows:
            end = int(np.flatnonzero(wanted[row] == version)[-1]) + 1
            cut.append(replace(sequences[row], token_ids=sequences[row].token_ids[:end]))
        for row, logprobs_T in zip(rows, compute(cut), strict=True):
            own = wanted[row][: len(logprobs_T)] == version
            found[row][: len(logprobs_T)][own] = logprobs_T[own]

    @torch.no_grad()
    def _take(self, weights: Weights) -> None:
        for name, copy in self._copy.items():
            copy.copy_(weights[name])

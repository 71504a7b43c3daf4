"""Groups as the trainer sees them: tokens of this policy, re-scored rewards, an advantage each, a treatment.

    Accepted --training_group--> tokens, rewards --treat--> advantages --check_group--> batch

For: turning an accepted group, perhaps of another tokenizer, into a `TrainingGroup`, and refusing whatever
must not come near the optimiser: NaN, infinities, absurd sizes, wrong lengths, tokens outside the vocabulary.
Not for treatments and advantages (`treatment.py`), verification against the network's rules (`node/verify`)
or drawing groups (`stage.py`). Claimed rewards are not read here. All errors are `TrainingDataError`, per
group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from node.rollout.policy import Policy
from node.share.accepted import Accepted
from node.weight.settings import Treatment, WeightSettings
from protocol.errors import RemoteProtocolError
from protocol.messages import FinishReason, Rollout
from protocol.rollouts import TokenArrays

__all__ = [
    "OWN_SOURCE",
    "Kind",
    "TrainingDataError",
    "TrainingGroup",
    "TrainingRollout",
    "check_group",
    "mean_logprob",
    "training_group",
    "training_rollouts",
]

OWN_SOURCE = "own"
"""Source name of this node; every other source is a peer id."""

MAX_REWARD_ABS = 1e3
MAX_ADVANTAGE_ABS = 1e2
MIN_LOGPROB = -1e3
MAX_LOGPROB = 1e-3
"""Rounding may push the logarithm of a probability of one slightly above zero."""


class Kind(StrEnum):
    """Who generated a group."""

    OWN = "own"
    FOLLOWER = "follower"
    """Another node, with this node's policy."""
    FOREIGN = "foreign"
    """Another policy."""


class TrainingDataError(RemoteProtocolError):
    """A group holds values that must not reach the optimiser. `group` names it: drop that one."""

    reason = "training_data"

    def __init__(self, group: str, message: str) -> None:
        super().__init__(f"group {group[:12]}: {message}")
        self.group = group


@dataclass(frozen=True, eq=False)
class TrainingRollout:
    """One completion in this policy's tokens (T of them, the end token included if the author finished)."""

    tokens_T: NDArray[np.int64]
    behaviour_sum: float
    """log mu of the whole completion under its author, in the author's tokens."""
    behaviour_T: NDArray[np.float32] | None = None
    """log mu of each token; None when the text was re-tokenised."""
    ingestion_T: NDArray[np.float32] | None = None
    """log pi when first trained on; None on first use, or to start again at ratio one."""
    versions_T: NDArray[np.int64] | None = None
    """Version of the author's lineage that generated each token; None when the text was re-tokenised."""


@dataclass(frozen=True, eq=False)
class TrainingGroup:
    """weight -> batch. The rollouts of one prompt in this policy's tokens. Without advantages until it was
    treated (`treatment.py`)."""

    source: str
    """`OWN_SOURCE` or the author's peer id."""
    group: str
    """Digest of the accepted group, or another name."""
    prompt_ids: tuple[int, ...]
    rollouts: tuple[TrainingRollout, ...]
    rewards: tuple[float, ...]
    """As scored on this node."""
    advantages: tuple[float, ...] = ()
    treatment: Treatment = Treatment.OWN
    prompt: int = -1
    """Index of the prompt in the swarm's universe: equal for all groups that answer it."""
    temperature: float = 1.0
    trust: float = 1.0
    """Trust in the author. Scales the numerators of this group, never a denominator."""
    lag: int = 0
    """Versions behind the newest one of its lineage."""
    age_windows: float = 0.0
    uses: int = 0
    """How often it was trained on before."""
    prompt_shared: bool = False
    """External: this node has answered the prompt lately."""
    own_lineage: bool = False
    """External: a follower's, which this node's policy generated."""
    left_out: int | None = None
    """Place, among the rollouts as they came, of the one that its advantages leave out (`drops_pivot`)."""
    accepted: Accepted | None = None
    """What it was made of; None in the lab and in tests."""

    @property
    def kind(self) -> Kind:
        """Who generated it."""
        if self.source == OWN_SOURCE:
            return Kind.OWN
        return Kind.FOLLOWER if self.own_lineage else Kind.FOREIGN

    @property
    def same_tokenizer(self) -> bool:
        """Whether each token has its behaviour log-probability."""
        return all(rollout.behaviour_T is not None for rollout in self.rollouts)


def training_group(accepted: Accepted, policy: Policy, *, follower: bool = False) -> TrainingGroup:
    """`accepted` in this policy's tokens, without treatment and advantages. `follower`: its author is
    believed to generate with the policy that is trained here. The prompt is encoded by this policy's own
    template."""
    group = accepted.group
    return TrainingGroup(
        source=OWN_SOURCE if accepted.own else group.author,
        group=accepted.digest,
        prompt=group.prompt.index,
        prompt_ids=tuple(policy.encode_prompt(group.question, group.environment)),
        rollouts=training_rollouts(
            group.rollouts,
            accepted.tokens,
            policy,
            same_tokenizer=group.lineage.tokenizer == policy.tokenizer_digest,
        ),
        rewards=accepted.rewards,
        temperature=group.sampling.temperature,
        own_lineage=follower,
        accepted=accepted,
    )


def training_rollouts(
    rollouts: Sequence[Rollout], tokens: Sequence[TokenArrays], policy: Policy, *, same_tokenizer: bool
) -> tuple[TrainingRollout, ...]:
    """Rollouts with their parsed `tokens`; with another tokenizer, the text is tokenised again instead.

    log mu of the author covers the end token exactly if the rollout finished, and so do the re-made tokens.
    """
    made = []
    for rollout, arrays in zip(rollouts, tokens, strict=True):
        behaviour_sum = float(arrays.logprobs_T.sum(dtype=np.float64))
        if same_tokenizer:
            made.append(
                TrainingRollout(
                    tokens_T=arrays.token_ids_T.astype(np.int64),
                    behaviour_sum=behaviour_sum,
                    behaviour_T=arrays.logprobs_T.astype(np.float32),
                    versions_T=arrays.versions_T.astype(np.int64),
                )
            )
        else:
            ids = policy.encode_completion(rollout.text, rollout.finish is FinishReason.STOP)
            made.append(TrainingRollout(np.asarray(ids, dtype=np.int64), behaviour_sum))
    return tuple(made)


def check_group(group: TrainingGroup, settings: WeightSettings, policy: Policy) -> None:
    """Raise TrainingDataError unless all numbers are finite and in range and all lengths fit."""

    def refuse(message: str) -> TrainingDataError:
        return TrainingDataError(group.group, message)

    count = len(group.rollouts)
    if count == 0 or len(group.rewards) != count or len(group.advantages) != count:
        raise refuse(f"{count} rollouts, {len(group.rewards)} rewards, {len(group.advantages)} advantages")
    _check_range(group.group, "reward", np.asarray(group.rewards), -MAX_REWARD_ABS, MAX_REWARD_ABS)
    _check_range(
        group.group, "advantage", np.asarray(group.advantages), -MAX_ADVANTAGE_ABS, MAX_ADVANTAGE_ABS
    )
    _check_range(group.group, "trust", np.asarray([group.trust]), 0.0, 1.0)
    _check_range(group.group, "temperature", np.asarray([group.temperature]), 1e-3, 10.0)
    _check_range(group.group, "lag", np.asarray([group.lag]), 0, 2**31)
    _check_range(group.group, "age", np.asarray([group.age_windows]), 0, 2**31)
    _check_range(group.group, "uses", np.asarray([group.uses]), 0, 2**15)
    if not group.prompt_ids:
        raise refuse("the prompt is empty")
    _check_range(group.group, "prompt token id", np.asarray(group.prompt_ids), 0, policy.vocab_size - 1)
    for rollout in group.rollouts:
        length = rollout.tokens_T.shape[0] if rollout.tokens_T.ndim == 1 else -1
        if not 0 < length <= settings.max_completion_tokens:
            raise refuse(f"{length} tokens; allowed are 1 to {settings.max_completion_tokens}")
        if len(group.prompt_ids) + length > policy.max_positions:
            raise refuse(f"prompt and completion exceed the {policy.max_positions} positions of the policy")
        if rollout.tokens_T.dtype != np.int64:
            raise refuse(f"token ids are {rollout.tokens_T.dtype}, not int64")
        _check_range(group.group, "token id", rollout.tokens_T, 0, policy.vocab_size - 1)
        _check_range(
            group.group,
            "log-probability of the completion",
            np.asarray([rollout.behaviour_sum]),
            MIN_LOGPROB * settings.max_completion_tokens,
            MAX_LOGPROB * settings.max_completion_tokens,
        )
        if group.treatment is Treatment.OWN and rollout.behaviour_T is None:
            raise refuse(f"treatment {group.treatment} needs log-probabilities of each token; use compat")
        for name, values, low, high in (
            ("log-probability", rollout.behaviour_T, MIN_LOGPROB, MAX_LOGPROB),
            ("stored log-probability", rollout.ingestion_T, MIN_LOGPROB, MAX_LOGPROB),
            ("version", rollout.versions_T, 0, 2**32),
        ):
            if values is not None:
                if values.shape != (length,):
                    raise refuse(f"{values.shape} {name} values for {length} tokens")
                _check_range(group.group, name, values, low, high)


def mean_logprob(rollout: TrainingRollout) -> float:
    """Mean log mu per token of this policy."""
    return rollout.behaviour_sum / max(len(rollout.tokens_T), 1)


def _check_range(group: str, name: str, values: NDArray[Any], low: float, high: float) -> None:
    inside = (values >= low) & (values <= high)  # False for NaN
    if not bool(np.all(inside)):
        bad = values[~inside].flat[0]
        raise TrainingDataError(group, f"{name} {bad} is outside {low:g} to {high:g}")

"""Groups as the trainer sees them: tokens of this policy, re-scored rewards, an advantage each, a treatment.

For: turning a verified `RolloutGroup` (raw bytes, perhaps of another tokenizer) into a `TrainingGroup`,
choosing how an external group is treated, and refusing whatever must not come near the optimiser: NaN,
infinities, absurd sizes, wrong lengths, tokens outside the vocabulary. Not for: verification against the
network's rules (`node.verify`) or drawing groups (`node.share.pool`). Claimed rewards are not read here. All
errors are `TrainingDataError`, per group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from node.rollout.policy import Policy
from node.train.objectives import Need
from node.train.settings import TrainSettings, Treatment, TreatmentSettings
from node.weight.advantage import ADVANTAGES, capability_aware, has_signal, pivot
from protocol.errors import RemoteProtocolError
from protocol.messages import FinishReason, Rollout

__all__ = [
    "OWN_SOURCE",
    "Kind",
    "TrainingDataError",
    "TrainingGroup",
    "TrainingRollout",
    "check_group",
    "choose_treatment",
    "external_group",
    "mean_logprob",
    "own_group",
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
    """Of a source: who generated a group."""

    OWN = "own"
    FOLLOWER = "follower"
    """Another node, with this node's policy."""
    FOREIGN = "foreign"
    """Another policy."""


class TrainingDataError(RemoteProtocolError):
    """A group holds values that must not reach the optimiser. `group` names it: drop that one."""

    reason = "training_data"

    def __init__(self, group: str, message: str) -> None:
        super().__init__(f"group {group}: {message}")
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
    """pool -> batch. The rollouts of one prompt, ready to be trained on."""

    source: str
    """`OWN_SOURCE` or the author's peer id."""
    group: str
    """Short digest of the body, for messages."""
    prompt_ids: tuple[int, ...]
    rollouts: tuple[TrainingRollout, ...]
    rewards: tuple[float, ...]
    """As scored on this node."""
    advantages: tuple[float, ...]
    treatment: Treatment
    temperature: float = 1.0
    trust: float = 1.0
    """Scales the numerators of this group, never a denominator."""
    lag: int = 0
    age_windows: float = 0.0
    uses: int = 0
    """How often it was trained on before."""
    prompt_shared: bool = False
    """External: this node has answered the prompt too."""
    own_lineage: bool = False
    """External: a follower's, which this node's policy generated."""
    left_out: int | None = None
    """Place, among the rollouts as they came, of the one that its advantages leave out (`drops_pivot`)."""

    @property
    def kind(self) -> Kind:
        """Who generated it."""
        if self.source == OWN_SOURCE:
            return Kind.OWN
        return Kind.FOLLOWER if self.own_lineage else Kind.FOREIGN


def training_rollouts(
    group: str, rollouts: Sequence[Rollout], policy: Policy, *, same_tokenizer: bool
) -> tuple[TrainingRollout, ...]:
    """Decode the arrays of verified rollouts; with another tokenizer, re-tokenise the text instead.

    log mu of the author covers the end token exactly if the rollout finished, and so do the re-made tokens.
    """
    made = []
    for rollout in rollouts:
        tokens = _array(group, rollout.answer.token_ids, "<u4", "token_ids").astype(np.int64)
        behaviour = _array(group, rollout.answer.logprobs, "<f4", "logprobs").astype(np.float32)
        versions = _array(group, rollout.answer.versions, "<u4", "versions").astype(np.int64)
        if not len(tokens) == len(behaviour) == len(versions):
            raise TrainingDataError(
                group,
                f"{len(tokens)} token ids but {len(behaviour)} log-probabilities, {len(versions)} versions",
            )
        behaviour_sum = float(behaviour.sum(dtype=np.float64))
        if same_tokenizer:
            made.append(TrainingRollout(tokens, behaviour_sum, behaviour, versions_T=versions))
        else:
            ids = policy.encode_completion(rollout.text, rollout.finish is FinishReason.STOP)
            made.append(TrainingRollout(np.asarray(ids, dtype=np.int64), behaviour_sum))
    return tuple(made)


def choose_treatment(
    peer_rewards: Sequence[float],
    own_rewards: Sequence[float] | None,
    settings: TreatmentSettings,
    *,
    same_tokenizer: bool,
    own_lineage: bool = False,
) -> Treatment:
    """OWN for a follower's group; else GRAFT's gate, else HACPO, where this node has a recent group on the
    prompt; `compat` where it has none.

    A follower's tokens were drawn by an earlier version of this very policy: ratios of single tokens are
    right, and a treatment forced on *other* models' groups is not meant for them. A forced treatment falls
    back to `compat` where it needs an own group and there is none, or log-probabilities of each token and the
    text was re-tokenised.
    """
    if own_lineage:
        return Treatment.OWN
    if settings.force is not None:
        possible = {Treatment.HACPO: own_rewards is not None, Treatment.OWN: same_tokenizer}
        return settings.force if possible.get(settings.force, True) else Treatment.COMPAT
    if own_rewards is None:
        return Treatment.COMPAT
    if max(own_rewards) <= settings.failure_reward and has_signal(peer_rewards):
        return Treatment.GRAFT
    return Treatment.HACPO


def own_group(
    group: str,
    prompt_ids: Sequence[int],
    rollouts: tuple[TrainingRollout, ...],
    rewards: Sequence[float],
    settings: TreatmentSettings,
    *,
    temperature: float = 1.0,
    lag: int = 0,
    age_windows: float = 0.0,
    uses: int = 0,
) -> TrainingGroup:
    """A group of the own lineage, with advantages from its own statistics."""
    whole = TrainingGroup(
        source=OWN_SOURCE,
        group=group,
        prompt_ids=tuple(prompt_ids),
        rollouts=rollouts,
        rewards=tuple(rewards),
        advantages=_advantages(rewards, settings),
        treatment=Treatment.OWN,
        temperature=temperature,
        lag=lag,
        age_windows=age_windows,
        uses=uses,
    )
    return _without_pivot(whole, settings)


def external_group(
    source: str,
    group: str,
    prompt_ids: Sequence[int],
    rollouts: tuple[TrainingRollout, ...],
    rewards: Sequence[float],
    settings: TreatmentSettings,
    *,
    own_rewards: Sequence[float] | None,
    other_rewards: Mapping[str, Sequence[float]] | None = None,
    capability: Mapping[str, float],
    trust: float,
    temperature: float = 1.0,
    lag: int = 0,
    age_windows: float = 0.0,
    uses: int = 0,
    own_lineage: bool = False,
) -> TrainingGroup:
    """A peer's group with its treatment and advantages; a follower's (`own_lineage`) has them from its own
    statistics, like an own group.

    `own_rewards`: rewards of a recent own group on the same prompt, else None. `other_rewards`: further
    peers' rewards on that prompt, which enter HACPO's joint mean and std. `capability`: P of all these
    agents. The prompt is encoded by this policy's own template.
    """
    same_tokenizer = all(rollout.behaviour_T is not None for rollout in rollouts)
    treatment = choose_treatment(
        rewards, own_rewards, settings, same_tokenizer=same_tokenizer, own_lineage=own_lineage
    )
    whole = TrainingGroup(
        source=source,
        group=group,
        prompt_ids=tuple(prompt_ids),
        rollouts=rollouts,
        rewards=tuple(rewards),
        advantages=_advantages(rewards, settings),
        treatment=treatment,
        temperature=temperature,
        trust=trust,
        lag=lag,
        age_windows=age_windows,
        uses=uses,
        prompt_shared=own_rewards is not None,
        own_lineage=own_lineage,
    )
    if treatment is Treatment.HACPO and own_rewards is not None:
        by_agent = {**(other_rewards or {}), OWN_SOURCE: own_rewards, source: rewards}
        return replace(whole, advantages=capability_aware(by_agent, capability, OWN_SOURCE)[source])
    return _without_pivot(whole, settings)


def check_group(group: TrainingGroup, settings: TrainSettings, policy: Policy) -> None:
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
    needs_tokens = Need.BEHAVIOUR in settings.objective(group.treatment).needs
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
        if needs_tokens and rollout.behaviour_T is None:
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


def _advantages(rewards: Sequence[float], settings: TreatmentSettings) -> tuple[float, ...]:
    if not has_signal(rewards):
        return (0.0,) * len(rewards)
    return ADVANTAGES[settings.advantage](rewards)


def _without_pivot(group: TrainingGroup, settings: TreatmentSettings) -> TrainingGroup:
    """Without the rollout that the estimator leaves out, if it does and another one is left."""
    if not ADVANTAGES[settings.advantage].drops_pivot or len(group.rewards) < 2:
        return group
    place = pivot(group.rewards) if has_signal(group.rewards) else 0
    return replace(
        group,
        rollouts=group.rollouts[:place] + group.rollouts[place + 1 :],
        rewards=group.rewards[:place] + group.rewards[place + 1 :],
        advantages=group.advantages[:place] + group.advantages[place + 1 :],
        left_out=place,
    )


def _array(group: str, data: bytes, dtype: str, name: str) -> NDArray[Any]:
    if len(data) == 0 or len(data) % 4:
        raise TrainingDataError(group, f"{name} has {len(data)} bytes, no positive multiple of 4")
    return np.frombuffer(data, dtype=dtype)


def _check_range(group: str, name: str, values: NDArray[Any], low: float, high: float) -> None:
    inside = (values >= low) & (values <= high)  # False for NaN
    if not bool(np.all(inside)):
        bad = values[~inside].flat[0]
        raise TrainingDataError(group, f"{name} {bad} is outside {low:g} to {high:g}")

"""Whether an update was bad: numbers in, an alarm or none out. No tensors, no clock, nothing is changed here.

Four signs. `kl_step`: how far one step moved the policy on what it trained on, nats per token, against a
limit. `ess`: effective sample size of the importance weights, as a share of the tokens; below a limit few of
them made the step. `grad_norm`: before clipping, against a multiple of the median of the last good ones, once
there are enough. `probe_reward`: the same held-out prompts as at the last good probe, worse by more than a
tolerance at the bound of confidence of the paired differences (the statistics of a merge's gate).

Evidence: ours. Limits from the demo's policies: in 1,140 healthy steps at learning rates 1.5e-4 and 3e-4
kl_step stayed below 0.25, the norm below 5 times its median and, at lag 1, ess above 0.98; one step at a
hundred times the rate gave 1.7 to 2.6 nats. Data of a large lag has a small ess by nature: lower that limit
for it. Single updates are what this finds. A learning rate that is too high everywhere ruins a policy by
steps within every limit, and a decline of which no single probe is sure passes.

A norm is measured before its step, at weights that are good. So norms that stay large in a row, each of
another batch at the same weights, are no sign of bad weights but usual there: what is usual is learnt anew,
and the run goes on. (A policy that has learnt its tasks has batches almost without a gradient, and then one
with: of six nodes with one own group a step, one was ended so within 700 steps.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from node.config import SuperviseConfig
from node.train.gate import judge
from protocol.errors import UnstableError

__all__ = ["Alarm", "RollBack", "Sign", "StepSigns", "Watch"]

NORMS = 50
"""The usual gradient norm is the median of so many good steps."""
NORMS_NEEDED = 20
"""With fewer of them no norm is too large."""
PROBE_CONFIDENCE = 0.99
"""With which a probe must be worse than the last good one to be bad."""


class Sign(StrEnum):
    """What gave a bad update away."""

    KL_STEP = "kl_step"
    ESS = "ess"
    GRAD_NORM = "grad_norm"
    PROBE_REWARD = "probe_reward"


@dataclass(frozen=True)
class StepSigns:
    """Of one step that changed the weights. None: not measured."""

    grad_norm: float
    ess: float | None = None
    kl_step: float | None = None


@dataclass(frozen=True)
class Alarm:
    """A bad update, with the number that says so."""

    sign: Sign
    value: float
    limit: float
    what: str
    """A clause for the operator, without the limit."""
    in_a_row: int
    """This one among them."""

    @property
    def text(self) -> str:
        """The clause."""
        return f"{self.what} (limit {self.limit:.3g})"


@dataclass(frozen=True)
class RollBack:
    """supervisor -> stage, events. What was undone."""

    alarm: Alarm
    bad_version: int
    """The newest of the versions that were undone."""
    good_version: int
    """Whose weights came back."""
    policy_version: int
    """As this version."""
    total: int
    """Roll-backs of this run, this one among them."""
    error: UnstableError | None
    """To be raised once the weights are saved, when it was one too many in a row."""

    @property
    def text(self) -> str:
        """One sentence for the operator."""
        return (
            f"version {self.bad_version} was rolled back: {self.alarm.text}; version "
            f"{self.policy_version} has the weights of {self.good_version}"
        )


class Watch:
    """Remembers what good steps look like."""

    def __init__(self, limits: SuperviseConfig) -> None:
        self.limits = limits
        self._norms: deque[float] = deque(maxlen=NORMS)
        self._bad_steps = 0
        self._bad_probes = 0
        self._reference: tuple[float, ...] | None = None

    def step(self, signs: StepSigns) -> Alarm | None:
        """Judge a step; a good one is remembered."""
        alarm = self._kl_step(signs) or self._ess(signs) or self._grad_norm(signs)
        if alarm is not None:
            self._bad_steps += 1
            found = Alarm(*alarm, in_a_row=self._bad_steps)
            if found.sign is Sign.GRAD_NORM and self._bad_steps >= self.limits.in_a_row:
                self._norms.clear()
                self._bad_steps = 0
            return found
        self._bad_steps = 0
        if signs.grad_norm > 0:  # steps without any signal say nothing of what is usual
            self._norms.append(signs.grad_norm)
        return None

    def probe(self, rewards: Sequence[float]) -> Alarm | None:
        """Judge the rewards of the probe's prompts, always in the same order; good ones are what the next are
        held against. Too few prompts (`gate.MIN_PROMPTS`) say nothing. Raises LocalProtocolError for
        another number of prompts or rewards that are not finite."""
        limits = self.limits
        reference = self._reference if self._reference is not None else tuple(rewards)
        loss = judge(rewards, reference, confidence=PROBE_CONFIDENCE)
        if loss.lower_bound > limits.probe_tolerance:
            self._bad_probes += 1
            text = (
                f"the probe's mean reward fell by {loss.gain:.4f} over {loss.prompts} prompts, at least "
                f"{loss.lower_bound:.4f} with {PROBE_CONFIDENCE:.0%} confidence"
            )
            return Alarm(Sign.PROBE_REWARD, loss.lower_bound, limits.probe_tolerance, text, self._bad_probes)
        self._bad_probes = 0
        self._reference = tuple(rewards)
        return None

    def ends_run(self, alarm: Alarm) -> bool:
        """Whether it is one too many in a row, and says something of the weights."""
        return alarm.sign is not Sign.GRAD_NORM and alarm.in_a_row >= self.limits.in_a_row

    def _kl_step(self, signs: StepSigns) -> tuple[Sign, float, float, str] | None:
        value, limit = signs.kl_step, self.limits.kl_step
        if value is None or not limit or value <= limit:  # NaN is not
            return None
        return Sign.KL_STEP, value, limit, f"one step moved the policy by {value:.3g} nats per token"

    def _ess(self, signs: StepSigns) -> tuple[Sign, float, float, str] | None:
        value, limit = signs.ess, self.limits.ess
        if value is None or value >= limit or value == 0:  # 0: no token had a weight, so none made the step
            return None
        return Sign.ESS, value, limit, f"the effective sample size was {value:.3g} of the tokens"

    def _grad_norm(self, signs: StepSigns) -> tuple[Sign, float, float, str] | None:
        if not self.limits.grad_norm or len(self._norms) < NORMS_NEEDED:
            return None
        value, usual = signs.grad_norm, median(self._norms)
        limit = self.limits.grad_norm * usual
        if value <= limit:
            return None
        return Sign.GRAD_NORM, value, limit, f"the gradient norm was {value:.3g} where {usual:.3g} is usual"

"""Everything tunable about training, as one frozen value. The config builds it; batch and trainer read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from node.rollout.adapter import AdapterSpec
from node.train.objectives import Need, Objective
from node.train.objectives.presets.foreign import compat, graft, hacpo
from node.train.objectives.presets.sequence import topr
from node.weight.settings import Treatment, WeightSettings

__all__ = ["TrainSettings"]


@dataclass(frozen=True)
class TrainSettings:
    """Optimiser, batch and objectives."""

    learning_rate: float = 3e-4
    warmup_steps: int = 5
    """Optimiser steps over which the learning rate rises linearly; 0 for none."""
    betas: tuple[float, float] = (0.9, 0.95)
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    optimiser: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit keeps the moments of large tensors in 8 bits, by blocks of 256 values."""
    micro_batch_tokens: int = 16_384
    """Padded tokens per forward pass; does not change the gradient."""
    length_norm_tokens: int = 16
    """The constant length of the aggregation seq_mean_token_sum_norm."""
    measure_start_kl: bool = True
    """Report the divergence from the first weights on own tokens. Costs a frozen copy of them, which an
    adapter does not need."""
    own: Objective = field(default_factory=topr)
    compat: Objective = field(default_factory=compat)
    hacpo: Objective = field(default_factory=hacpo)
    graft: Objective = field(default_factory=graft)
    weight: WeightSettings = field(default_factory=WeightSettings)
    """What batches are made of."""
    ess_scaling: bool = False
    """Shrink the learning rate of steps that few rollouts decide."""
    slow_fast: bool = False
    """Several updates a step while it helps."""
    device: str = "cpu"
    dtype: str = "float32"
    """Of the policy's weights; an adapter is float32."""
    recompute: bool = False
    """Keep only each layer's input for the way back: a third more time for a fraction of the memory."""
    by_turns: bool = False
    """Leave the device to the engine between steps; weights and moments then lie in RAM."""
    adapter: AdapterSpec | None = None
    """Train this and leave the policy's weights as they are; None: train all weights."""

    @property
    def needs(self) -> frozenset[Need]:
        """Inputs that some objective asks for."""
        return self.own.needs | self.compat.needs | self.hacpo.needs | self.graft.needs

    def objective(self, treatment: Treatment) -> Objective:
        """The objective of rows with this treatment."""
        if treatment is Treatment.OWN:
            return self.own
        if treatment is Treatment.COMPAT:
            return self.compat
        return self.hacpo if treatment is Treatment.HACPO else self.graft

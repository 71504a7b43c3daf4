"""Names of what a run trains with: a preset of the library, perhaps with options, as one word.

`dppo_tv`; `opsm:delta=0.5` for options (JSON where it is JSON, else text); `vcpo+ess` for a learning rate
that shrinks with the effective sample size of the step's rollouts (`node.train.ess_scaling`), which goes with
any.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from node.config import TrainConfig
from node.train.objectives import EVERY_TRAINER, Need, Objective, open_objective, require
from protocol.errors import ConfigError

__all__ = ["DEFAULT", "Method", "open_method"]

DEFAULT: str = TrainConfig.model_fields["objective"].default
"""The objective of own groups in a node that was told nothing."""

_ESS = "+ess"


@dataclass(frozen=True)
class Method:
    """What a run trains with."""

    objective: Objective
    ess_scaling: bool

    @property
    def snapshot(self) -> bool:
        """Whether it needs log pi_old by the very version that generated a rollout."""
        return Need.SNAPSHOT in self.objective.needs

    @property
    def ewma(self) -> bool:
        """Whether it needs log pi by a moving average of the weights."""
        return Need.EWMA in self.objective.needs


def open_method(spelled: str) -> Method:
    """Raises ConfigError for an unknown one, and for one that the lab cannot feed."""
    name, _, rest = spelled.removesuffix(_ESS).partition(":")
    options: dict[str, Any] = {}
    for option in rest.split(",") if rest else []:
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"{spelled!r}: {option!r} is not of the form key=value")
        try:
            options[key.strip()] = json.loads(value)
        except ValueError:
            options[key.strip()] = value
    objective = open_objective(name, options)
    require(objective, EVERY_TRAINER | {Need.SNAPSHOT, Need.EWMA})
    return Method(objective, spelled.endswith(_ESS))

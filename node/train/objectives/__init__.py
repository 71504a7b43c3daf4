"""Training objectives, one file each: what the rows of a batch minimise. `open_objective` makes one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from node.train.objectives.aggregation import Aggregation
from node.train.objectives.base import LossInputs, Objective, TokenLoss
from node.train.objectives.compat import Compat
from node.train.objectives.dppo_tv import DppoTv
from node.train.objectives.graft import Graft
from node.train.objectives.hacpo import Hacpo
from node.train.objectives.ppo_clip import PpoClip
from node.train.objectives.tis import Tis
from protocol.errors import ConfigError

__all__ = [
    "Aggregation",
    "Compat",
    "DppoTv",
    "Graft",
    "Hacpo",
    "LossInputs",
    "Objective",
    "PpoClip",
    "Tis",
    "TokenLoss",
    "open_objective",
]

_OBJECTIVES = (Compat, DppoTv, Graft, Hacpo, PpoClip, Tis)


def open_objective(name: str, options: Mapping[str, Any] | None = None) -> Objective:
    """The objective of that name with `options` in place of its defaults. Raises ConfigError."""
    chosen = next((objective for objective in _OBJECTIVES if objective.name == name), None)
    if chosen is None:
        raise ConfigError(
            f"objective {name!r} is unknown; choose one of {', '.join(o.name for o in _OBJECTIVES)}"
        )
    known = {field.name for field in dataclasses.fields(chosen)}
    values = dict(options or {})
    unknown = sorted(set(values) - known)
    if unknown:
        raise ConfigError(f"objective {name} has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
    if "aggregation" in values:
        try:
            values["aggregation"] = Aggregation(values["aggregation"])
        except ValueError:
            raise ConfigError(
                f"aggregation {values['aggregation']!r} is unknown; choose one of {', '.join(Aggregation)}"
            ) from None
    return chosen(**values)

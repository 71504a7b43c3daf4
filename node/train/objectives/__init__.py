"""Training objectives: what the rows of a batch minimise, as compositions of three choices.

    ratio        whose probabilities are compared, at which level        ratio.py
    controls     what bounds, corrects or drops a token, in order        controls/
    aggregation  what the sum is divided by                              aggregation.py

`open_objective` makes one from a preset's name and options; `all_presets` lists the published methods.
"""

from node.train.objectives import presets  # noqa: F401  importing registers them
from node.train.objectives.aggregation import Aggregation
from node.train.objectives.base import MAX_CLAIM_FACTOR, LossInputs, Need, TokenLoss
from node.train.objectives.objective import Objective, Plan
from node.train.objectives.ratio import Level, Ratio, Reference
from node.train.objectives.registry import (
    EVERY_TRAINER,
    Evidence,
    Preset,
    all_presets,
    open_objective,
    require,
    require_disbelief,
)

__all__ = [
    "EVERY_TRAINER",
    "MAX_CLAIM_FACTOR",
    "Aggregation",
    "Evidence",
    "Level",
    "LossInputs",
    "Need",
    "Objective",
    "Plan",
    "Preset",
    "Ratio",
    "Reference",
    "TokenLoss",
    "all_presets",
    "open_objective",
    "require",
    "require_disbelief",
]

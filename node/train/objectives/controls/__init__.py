"""What bounds an update, corrects it or drops a token: small frozen dataclasses, applied in order."""

from node.train.objectives.controls.base import Control, Draft
from node.train.objectives.controls.clip import AdaptiveRegion, Clamp, Clip, SecondMomentClip
from node.train.objectives.controls.drop import (
    Band,
    BinaryKl,
    Metric,
    SecondMomentMask,
    SuffixVeto,
    TotalVariation,
)
from node.train.objectives.controls.foreign import AgentProduct, LengthBand, SourceAdvantage, Usual
from node.train.objectives.controls.shape import Penalty, Score, SoftGate
from node.train.objectives.controls.weigh import AdaptiveMixing, Freshness, Gamma, Normalise, Truncate

__all__ = [
    "AdaptiveMixing",
    "AdaptiveRegion",
    "AgentProduct",
    "Band",
    "BinaryKl",
    "Clamp",
    "Clip",
    "Control",
    "Draft",
    "Freshness",
    "Gamma",
    "LengthBand",
    "Metric",
    "Normalise",
    "Penalty",
    "Score",
    "SecondMomentClip",
    "SecondMomentMask",
    "SoftGate",
    "SourceAdvantage",
    "SuffixVeto",
    "TotalVariation",
    "Truncate",
    "Usual",
]

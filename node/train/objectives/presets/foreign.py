"""For rollouts of other models, whose log mu of single tokens means little here, or is not there at all."""

from __future__ import annotations

from node.train.objectives.aggregation import Aggregation
from node.train.objectives.controls.clip import Clamp, Clip
from node.train.objectives.controls.foreign import AgentProduct, LengthBand, SourceAdvantage, Usual
from node.train.objectives.controls.weigh import Truncate
from node.train.objectives.objective import Objective
from node.train.objectives.ratio import Level, Ratio, Reference
from node.train.objectives.registry import Evidence, preset

__all__ = ["compat", "erils", "graft", "hacpo"]


@preset("ours, on HACPO's s (arXiv 2603.02604)", Evidence.RECONSTRUCTED, foreign=True)
def compat(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """Compatibility: other models' text counts as far as this model would write it, never more than once.

    L_t = -c min(r A, clip(r, 0.8, 1.2) A), c = sg(min(1, s)), s = exp((log pi_old(y) - log mu(y)) / T), r =
    pi / pi_old, so that r = 1 at ingestion. Advantages are those of the sender's group. Needs the author's
    log mu of the whole completion. Measured in small paired trials.
    """
    alike = Ratio(Reference.AUTHOR, of=Reference.INGESTION, level=Level.SEQUENCE_MEAN)
    controls = (Clip(clip_low, clip_high), Truncate(alike, high=1.0, report_raw=False))
    return Objective(Ratio(Reference.INGESTION), controls, aggregation)


@preset("arXiv 2603.02604, zzx-peter/hacrl", Evidence.EXACT, foreign=True)
def hacpo(
    *,
    alpha: float = 1.0,
    delta: float = 0.8,
    delta_step: float = 0.025,
    discard_below: bool = False,
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN,
) -> Objective:
    """HACPO's cross-agent term: what one agent learns from another's rollouts on the same prompt.

    s = exp((log pi(y) - log mu(y)) / T), L = -clip(s, 1 - delta + u delta_step, 1) sg(min(s, 1))^alpha A, a
    plain product without minimum; u = uses before. The upper bound is exactly 1: foreign rollouts are only
    ever weighted down, and those above it, as those below the lower bound, carry no gradient. A includes
    omega(j, k), see `node.weight.advantage`. The paper is inconsistent about delta (0.8 in the appendix, 0.2
    with discarding in section 3.4): `discard_below` chooses, which changes the reported loss only.
    """
    ratio = Ratio(Reference.AUTHOR, level=Level.SEQUENCE_MEAN)
    return Objective(ratio, (AgentProduct(alpha, delta, delta_step, discard_below),), aggregation)


@preset("arXiv 2609.37868, from a short summary", Evidence.RECONSTRUCTED, foreign=True)
def graft(
    *,
    clip_low: float = 0.2,
    clip_high: float = 5.0,
    quantile_low: float = 0.05,
    quantile_high: float = 0.5,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """GRAFT: a peer's mixed group replaces the own group that all failed on the same prompt.

    L_t = -c A clip(r, 0.2, 5), r = pi / pi_old, A the source group's. c = clip((l - lo) / (hi - lo), 0, 1): l
    is this model's mean log-probability of the text at ingestion, lo and hi are quantiles of the same over
    its own rollouts. The gate is `node.weight.groups.choose_treatment`. No public code: quantiles are ours,
    the clip is a third party's.
    """
    controls = (Clamp(clip_low, clip_high), Usual(quantile_low, quantile_high))
    return Objective(Ratio(Reference.INGESTION), controls, aggregation)


@preset("ERILS, from an abstract, no arXiv id known", Evidence.RECONSTRUCTED, foreign=True)
def erils(
    *,
    tolerance: float = 16.0,
    baseline: float = 0.5,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """ERILS: external rollouts about as long as the own ones, judged against their own source.

    Kept if |tokens - median own tokens| <= tolerance; A = (R - mean) / (std + 1e-6) over the rollouts of the
    same source, R - baseline where they are all alike; L_t = -min(r A, clip(r, 0.8, 1.2) A), r = pi / pi_old
    at ingestion. lambda is train's weight of external sources. Tolerance, baseline and clip are ours.
    """
    controls = (SourceAdvantage(baseline), Clip(clip_low, clip_high), LengthBand(tolerance))
    return Objective(Ratio(Reference.INGESTION), controls, aggregation)

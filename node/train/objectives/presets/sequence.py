"""One ratio for a whole completion, or for all of it so far."""

from __future__ import annotations

from node.train.objectives.aggregation import Aggregation
from node.train.objectives.controls.clip import Clip
from node.train.objectives.controls.drop import Band
from node.train.objectives.controls.shape import Score
from node.train.objectives.controls.weigh import Gamma, Truncate
from node.train.objectives.objective import Objective
from node.train.objectives.ratio import ON_POLICY, Level, Ratio, Reference
from node.train.objectives.registry import Evidence, preset

__all__ = ["gspo", "luspo", "pnpo", "tbpo", "topr", "topr_token", "vcpo", "vespo"]


@preset("arXiv 2507.18071", Evidence.EXACT)
def gspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    denominator: Reference = Reference.BEHAVIOUR,
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN,
) -> Objective:
    """GSPO: the clip decides on whole completions, by their length-normalised ratio.

    L = -min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A), s = exp(mean log r), clamped at exp(10). The widths are
    those of large models; small policies need some 0.2.
    """
    ratio = Ratio(denominator, level=Level.SEQUENCE_MEAN, limit=10.0)
    return Objective(ratio, (Clip(clip_low, clip_high),), aggregation)


@preset("arXiv 2602.05261", Evidence.EXACT)
def luspo(
    *,
    clip_low: float = 2e-3,
    clip_high: float = 2.5e-3,
    denominator: Reference = Reference.BEHAVIOUR,
) -> Objective:
    """LUSPO: GSPO times the length, so that long completions count for each of their tokens.

    L = -|y| min(s A, clip(s, 1 - 2e-3, 1 + 2.5e-3) A), mean over completions.
    """
    return gspo(
        clip_low=clip_low,
        clip_high=clip_high,
        denominator=denominator,
        aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM,
    )


@preset("arXiv 2608.01418", Evidence.CORE)
def pnpo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    denominator: Reference = Reference.BEHAVIOUR,
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN,
) -> Objective:
    """PNPO: each token by the geometric mean of the ratios so far, GSPO's s at the last.

    w_t = exp(mean of log r_1..r_t), L_t = -min(w A, clip(w, 1 - 3e-4, 1 + 4e-4) A). The widths are GSPO's,
    the paper's are unknown; the gradient of w_t goes to token t alone, as in GSPO's token form: ours.
    """
    ratio = Ratio(denominator, level=Level.PREFIX_MEAN)
    return Objective(ratio, (Clip(clip_low, clip_high),), aggregation)


@preset("QaRL, arXiv 2604.07853, from a summary", Evidence.RECONSTRUCTED)
def tbpo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual: float = 1.1,
    band_low: float = 0.9,
    band_high: float = 1.1,
    denominator: Reference = Reference.BEHAVIOUR,
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN,
) -> Objective:
    """Trust band: GSPO, with failures clipped from two sides and dropped outside a band.

    A >= 0: GSPO; A < 0: L = -max(min(s A, clip(s) A), dual A), and nothing outside [band_low, band_high].
    Made for quantised rollouts, whose trainer computes with the engine's quantisation, which ours does not.
    All bounds are ours, and so is the band.
    """
    ratio = Ratio(denominator, level=Level.SEQUENCE_MEAN, limit=10.0)
    band = Band(ratio, band_low, band_high, negative_only=True)
    return Objective(ratio, (Clip(clip_low, clip_high, dual), band), aggregation)


@preset("arXiv 2602.17616, mit-han-lab/vcpo", Evidence.EXACT)
def vcpo(
    *,
    cap: float = 8.0,
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN,
) -> Objective:
    """VCPO's loss: REINFORCE with the true ratio of the whole completion, capped.

    L_t = -min(W, 8) A, W = exp(sum of log pi - log mu), detached; reported is W before the cap. Its learning
    rate by effective sample size and its baseline are parts of their own.
    """
    whole = Ratio(Reference.BEHAVIOUR, level=Level.SEQUENCE)
    return Objective(ON_POLICY, (Truncate(whole, high=cap),), aggregation)


@preset("arXiv 2503.14286", Evidence.EXACT)
def topr(
    *,
    cap: float = 1.0,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """TOPR: successes as they are, failures by their ratio, which only ever weighs them down.

    A >= 0: L_t = -A log pi; A < 0: -sg(clip(W, 0, 1)) A log pi, W = pi(y) / mu(y). The paper asks for the
    sign of the reward, which with rewards of +-1 is that of the advantage. Reported are the weights as they
    act, so a failure that became much likelier does not look like a step of one rollout.
    """
    return _tapered(Level.SEQUENCE, cap, aggregation)


@preset("arXiv 2503.14286 in alibaba/ROLL's actor_pg_worker", Evidence.EXACT)
def topr_token(
    *,
    cap: float = 1.0,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """TOPR as ROLL has it: the ratio of failures is that of each token.

    A >= 0: L_t = -A log pi; A < 0: -sg(clip(rho_t, 0, 1)) A log pi.
    """
    return _tapered(Level.TOKEN, cap, aggregation)


def _tapered(level: Level, cap: float, aggregation: Aggregation) -> Objective:
    taper = Truncate(Ratio(Reference.BEHAVIOUR, level=level), high=cap, negative_only=True, report_raw=False)
    return Objective(ON_POLICY, (Score(), taper), aggregation)


@preset("arXiv 2602.10693, TRL", Evidence.EXACT)
def vespo(
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
    denominator: Reference = Reference.BEHAVIOUR,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """VESPO: a smooth weight of the whole completion's ratio, one at one and fading on both sides.

    L_t = -sg(W^k exp(lambda (1 - W))) A log pi, (k, lambda) = (2, 3) for A >= 0, (3, 2) for A < 0.
    """
    gamma = Gamma(
        Ratio(denominator, level=Level.SEQUENCE), k_positive, lambda_positive, k_negative, lambda_negative
    )
    return Objective(ON_POLICY, (Score(), gamma), aggregation)

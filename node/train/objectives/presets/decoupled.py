"""Two factors: w = pi_old / mu, detached, for whoever sampled, and r = pi / pi_old, clipped, for the update.

pi_old is `old`: "ingestion" is recomputed when a rollout is first trained on, where r = 1 and w covers engine
mismatch and lag alike; "snapshot" is exact, w is then engine mismatch alone and r staleness alone (the
missing-old-logit problem, arXiv 2605.12070); "ewma" approximates it.
"""

from __future__ import annotations

from node.train.objectives.aggregation import Aggregation
from node.train.objectives.controls.base import Control
from node.train.objectives.controls.clip import Clip
from node.train.objectives.controls.drop import Band, Metric
from node.train.objectives.controls.weigh import AdaptiveMixing, Normalise, Truncate
from node.train.objectives.objective import Objective
from node.train.objectives.ratio import Level, Ratio, Reference
from node.train.objectives.registry import Evidence, preset

__all__ = ["a3po", "ais", "decoupled_ppo", "icepop", "mis", "ppo_ewma", "sparse_rl", "tis"]


def _mismatch(old: Reference, level: Level = Level.TOKEN) -> Ratio:
    return Ratio(Reference.BEHAVIOUR, of=old, level=level)


@preset("AReaL, arXiv 2505.24298, inclusionAI/AReaL", Evidence.EXACT)
def decoupled_ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    mask_above: float | None = None,
    old: Reference = Reference.INGESTION,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """AReaL's decoupled PPO: the clip is centred on recent weights, not on those that sampled.

    L_t = -w min(r A, clip(r, 0.8, 1.2) A), w = pi_prox / mu unbounded, r = pi / pi_prox. `mask_above` drops
    tokens whose w is larger (a former default was 5; today's filters nothing). old = "snapshot" is the exact
    route.
    """
    controls: list[Control] = [Clip(clip_low, clip_high), Truncate(_mismatch(old))]
    if mask_above is not None:
        controls.append(Band(_mismatch(old), high=mask_above))
    return Objective(Ratio(old), tuple(controls), aggregation)


@preset("A-3PO, arXiv 2512.06547, AReaL's loglinear", Evidence.EXACT)
def a3po(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """A-3PO: decoupled PPO without a pass of its own for the proximal policy.

    L_t = -w min(r A, clip(r, 0.8, 1.2) A), log pi_prox = log mu + a (log pi - log mu), a = (d - 1) / d at lag
    d, in [0, 1], detached; w = pi_prox / mu, r = pi / pi_prox.
    """
    return decoupled_ppo(
        clip_low=clip_low, clip_high=clip_high, old=Reference.INTERPOLATED, aggregation=aggregation
    )


@preset("Yao et al.; verl, slime, TRL", Evidence.EXACT)
def tis(
    *,
    cap: float = 2.0,
    floor: float = 0.0,
    level: Level = Level.TOKEN,
    normalise: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    old: Reference = Reference.INGESTION,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """Truncated importance sampling: a capped weight beside PPO's clip.

    L_t = -min(w, 2) min(r A, clip(r, 0.8, 1.2) A). Level token: biased, low variance; sequence: unbiased but
    for the cap. `normalise`: mean weight 1 over the batch (off in verl).
    """
    correct = Truncate(_mismatch(old, level), floor, cap)
    controls = (Clip(clip_low, clip_high), correct, *((Normalise(),) if normalise else ()))
    return Objective(Ratio(old), controls, aggregation)


@preset("verl's rollout correction, THUDM/slime's MIS", Evidence.EXACT)
def mis(
    *,
    low: float = 0.5,
    high: float = 2.0,
    level: Level = Level.TOKEN,
    metric: Metric = Metric.RATIO,
    veto: float = 1e-4,
    normalise: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    old: Reference = Reference.INGESTION,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """Masked importance sampling: what mismatches too much is rejected, and leaves the denominator too.

    L_t = -w M min(r A, clip(r, 0.8, 1.2) A), M = 1 if low <= metric <= high at its level, and no token of the
    rollout has w < veto. Metrics k2 and k3 have an upper bound only. slime: [0.5, 2], veto 1e-4,
    normalised; verl leaves weights as they are.
    """
    controls: tuple[Control, ...] = (
        Clip(clip_low, clip_high),
        Truncate(_mismatch(old)),
        Band(_mismatch(old, level), low if metric is Metric.RATIO else 0.0, high, metric),
        Band(_mismatch(old, Level.SEQUENCE_MIN), low=veto),
        *((Normalise(),) if normalise else ()),
    )
    return Objective(Ratio(old), controls, aggregation, kept_only=True)


@preset("Ring-1T, arXiv 2510.18855", Evidence.EXACT)
def icepop(
    *,
    low: float = 0.5,
    high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    old: Reference = Reference.INGESTION,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """IcePop: tokens on which engine and trainer disagree get no gradient.

    L_t = -w 1[0.5 <= w <= 5] min(r A, clip(r, 0.8, 1.2) A); dropped tokens stay in the denominator.
    """
    controls = (Clip(clip_low, clip_high), Truncate(_mismatch(old)), Band(_mismatch(old), low, high))
    return Objective(Ratio(old), controls, aggregation)


@preset("revised PPO-EWMA, arXiv 2605.12070, from its abstract", Evidence.RECONSTRUCTED)
def ppo_ewma(
    *,
    cap: float = 2.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """PPO-EWMA: a moving average of the weights stands in for old log-probabilities that nobody has.

    L_t = -min(w, 2) min(r A, clip(r, 0.8, 1.2) A), w = pi_ewma / mu, r = pi / pi_ewma: TIS against the
    average. beta, cap and clip are ours.
    """
    return tis(cap=cap, clip_low=clip_low, clip_high=clip_high, old=Reference.EWMA, aggregation=aggregation)


@preset("arXiv 2605.13907, from its abstract", Evidence.RECONSTRUCTED)
def ais(
    *,
    kappa: float = 0.01,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    old: Reference = Reference.INGESTION,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """Adaptive importance sampling: as much correction as weights are reliable and needed.

    L_t = -(1 + lambda (w - 1)) min(r A, clip(r, 0.8, 1.2) A), lambda = clip(ess (1 - exp(-k3 / kappa)) /
    max(1, Var(w A) / Var(A)), 0, 1) over the batch. lambda's form and kappa are ours.
    """
    controls = (Clip(clip_low, clip_high), AdaptiveMixing(_mismatch(old), kappa))
    return Objective(Ratio(old), controls, aggregation)


@preset("Sparse-RL, arXiv 2601.10079, from a summary", Evidence.RECONSTRUCTED)
def sparse_rl(
    *,
    cap: float = 2.0,
    veto: float = 1e-4,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    old: Reference = Reference.INGESTION,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """Sparse-RL: rollouts damaged by a compressed KV cache are rejected, others reweighted.

    xi = pi_old,dense / mu_sparse: a rollout with any xi < 1e-4 is dropped; L_t = -min(xi, 2) min(r A, clip(r,
    0.8, 1.2) A). Thresholds are ours.
    """
    controls = (
        Clip(clip_low, clip_high),
        Truncate(_mismatch(old), high=cap),
        Band(_mismatch(old, Level.SEQUENCE_MIN), low=veto),
    )
    return Objective(Ratio(old), controls, aggregation)

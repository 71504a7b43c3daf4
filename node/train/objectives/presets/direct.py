"""One ratio straight against the engine, pi / mu, as a trust region, a mask or a detached weight on
tokens."""

from __future__ import annotations

from node.train.objectives.aggregation import Aggregation
from node.train.objectives.controls.base import Control
from node.train.objectives.controls.clip import AdaptiveRegion, Clip, SecondMomentClip
from node.train.objectives.controls.drop import Band, BinaryKl, SecondMomentMask, TotalVariation
from node.train.objectives.controls.shape import Penalty, Score
from node.train.objectives.controls.weigh import Freshness, Truncate
from node.train.objectives.objective import Objective
from node.train.objectives.ratio import ON_POLICY, Level, Ratio, Reference
from node.train.objectives.registry import Evidence, preset

__all__ = ["cispo", "dis", "dppo_kl", "dppo_tv", "f_opd", "m2po_clip", "m2po_mask", "minpro", "sat"]

_DIRECT = Ratio(Reference.BEHAVIOUR)


@preset("DPPO, arXiv 2602.04879; verl's dppo_tv, prime-rl", Evidence.EXACT)
def dppo_tv(
    *,
    delta_low: float = 0.2,
    delta_high: float = 0.2,
    cap: float = 20.0,
    kl_tau: float = 0.0,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """DPPO: a token is left out once its probability has moved too far, anchored at the engine.

    D = pi - mu: dropped if A > 0 and D > 0.2, or A < 0 and D < -0.2; else L_t = -sg(min(rho, 20)) A log pi,
    rho = pi / mu. Dropped tokens stay in the denominator. `kl_tau` adds kl_tau (log rho)^2 on all tokens
    (prime-rl: 1e-3).
    """
    return _dppo(TotalVariation(_DIRECT, delta_low, delta_high), cap, kl_tau, aggregation)


@preset("DPPO, arXiv 2602.04879; verl's dppo_kl", Evidence.CORE)
def dppo_kl(
    *,
    delta_low: float = 0.05,
    delta_high: float = 0.05,
    cap: float = 20.0,
    kl_tau: float = 0.0,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """DPPO with a binary KL divergence in place of total variation.

    D = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)): dropped if D > 0.05 and pi has moved in the
    direction of A; else L_t = -sg(min(rho, 20)) A log pi. delta is a third party's, not checked against the
    paper.
    """
    return _dppo(BinaryKl(_DIRECT, delta_low, delta_high), cap, kl_tau, aggregation)


def _dppo(trust: Control, cap: float, kl_tau: float, aggregation: Aggregation) -> Objective:
    pull = (Penalty(_DIRECT, kl_tau),) if kl_tau else ()
    return Objective(ON_POLICY, (Score(), Truncate(_DIRECT, high=cap), trust, *pull), aggregation)


@preset("MiniMax-M1, arXiv 2506.13585; ScaleRL; TRL", Evidence.EXACT)
def cispo(
    *,
    cap: float = 5.0,
    floor: float = 0.0,
    denominator: Reference = Reference.BEHAVIOUR,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """CISPO: the ratio is a capped, detached weight, so that no token ever loses its gradient.

    L_t = -sg(clip(r, 0, cap)) A log pi. The paper writes the bound as 1 + eps_high without a value; 5 is
    ScaleRL's, which TRL takes as the bound itself.
    """
    return Objective(ON_POLICY, (Score(), Truncate(Ratio(denominator), floor, cap)), aggregation)


@preset("DIS of SAO (GLM-5.2), arXiv 2607.07508", Evidence.CORE)
def dis(
    *,
    eps_low: float = 0.3,
    eps_high: float = 5.0,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """Double-sided importance sampling: tokens whose ratio leaves a band are dropped, whatever the advantage.

    L_t = -f(rho) A, f = rho if 0.7 < rho < 6, else 0. The loss of SAO alone: its critic is not here, and
    nothing is claimed for it without. Mean over tokens is ours.
    """
    return Objective(_DIRECT, (Band(_DIRECT, 1.0 - eps_low, 1.0 + eps_high),), aggregation)


@preset("arXiv 2510.01161, as published", Evidence.EXACT)
def m2po_mask(
    *,
    budget: float = 0.04,
    denominator: Reference = Reference.BEHAVIOUR,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """M2PO of the paper: the most extreme harmful tokens are masked until their second moment fits.

    H = {A > 0, r > 1} or {A < 0, r < 1}: the largest log(r)^2 in H over the batch are dropped until the mean
    of the rest is <= 0.04; L_t = -r A without clip, masked tokens stay in the denominator.
    """
    return Objective(Ratio(denominator), (SecondMomentMask(budget),), aggregation)


@preset("arXiv 2510.01161, Infini-AI-Lab/M2PO compute_m2po_policy_loss", Evidence.EXACT)
def m2po_clip(
    *,
    budget: float = 0.04,
    floor_low: float = 0.3,
    floor_high: float = 0.5,
    denominator: Reference = Reference.BEHAVIOUR,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """M2PO of the repository: PPO's clip with bounds from the second moment, and floors under them.

    tau so that the mean of min(log(r)^2, tau^2) over H is 0.04; L_t = -min(r A, clip(r, min(exp(-tau), 0.7),
    max(exp(tau), 1.5)) A), or -r A if H is within the budget. The repository rounds tau down to the next |log
    r| in H.
    """
    return Objective(Ratio(denominator), (SecondMomentClip(budget, floor_low, floor_high),), aggregation)


@preset("SAT, arXiv 2607.18722", Evidence.CORE)
def sat(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    quantile: float = 0.9,
    continuous: bool = False,
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN,
) -> Objective:
    """Staleness-adaptive trust region: the clip closes in on a batch's most stale tokens.

    L_t = -min(r A, clip(r, 1 - 0.2 c-, 1 + 0.2 c+) A), r = pi / mu. x = |log r|, q its 0.9-quantile over the
    batch; beyond q the c on the token's side is q^2 / (q^2 + x^2), else 1. The form of that factor, one half
    at q, is ours; `continuous` makes it one there.
    """
    region = AdaptiveRegion(clip_low, clip_high, quantile, continuous)
    return Objective(_DIRECT, (region,), aggregation)


@preset("arXiv 2601.22718", Evidence.CORE)
def minpro(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """MinPRO: the least likely token before stands for the product of all ratios before.

    L_t = -min(1, min_(i<t) rho_i) min(rho_t A, clip(rho_t, 0.8, 1.28) A), the prefix detached. Detaching,
    capping at 1 and clipping the token's ratio alone are ours.
    """
    before = Ratio(Reference.BEHAVIOUR, level=Level.PREFIX_MIN)
    controls = (Clip(clip_low, clip_high), Truncate(before, high=1.0, report_raw=False))
    return Objective(_DIRECT, controls, aggregation)


@preset("f-OPD, arXiv 2605.17862, from its abstract", Evidence.RECONSTRUCTED)
def f_opd(
    *,
    decay: float = 1.0,
    lag_decay: float = 0.1,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """Freshness: stale rollouts count less, by how far and how long ago they were generated.

    L_t = -f min(r A, clip(r, 0.8, 1.2) A), f = exp(-decay mean|log pi - log mu| - lag_decay lag), r = pi /
    pi_old at ingestion. Of on-policy distillation only this weight is here; form and rates are ours, and the
    bound on accumulated drift is not included.
    """
    controls = (Clip(clip_low, clip_high), Freshness(_DIRECT, decay, lag_decay))
    return Objective(Ratio(Reference.INGESTION), controls, aggregation)

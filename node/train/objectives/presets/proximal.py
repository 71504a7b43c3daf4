"""One ratio against the policy that generated, and a clip: PPO's family, and none at all.

pi_old is `denominator`: "behaviour" takes the engine's log mu for it (verl's bypass), so that one ratio
covers engine mismatch and lag; "snapshot" is exact; "ingestion" is recomputed when a rollout is first trained
on, where the ratio is one. No preset has a KL term to a reference model.
"""

from __future__ import annotations

import math

from node.train.objectives.aggregation import Aggregation
from node.train.objectives.controls.clip import Clip
from node.train.objectives.controls.drop import Band, SuffixVeto
from node.train.objectives.controls.shape import Penalty, Score, SoftGate
from node.train.objectives.objective import Objective
from node.train.objectives.ratio import MAX_LOG_RATIO, ON_POLICY, Level, Ratio, Reference
from node.train.objectives.registry import Evidence, preset

__all__ = [
    "copris",
    "dapo",
    "dr_grpo",
    "dro",
    "grpo",
    "intellect2",
    "mu_grpo",
    "opsm",
    "ppo_clip",
    "soft_sapo",
    "swarm_sapo",
    "uncorrected",
]


@preset("GRPO, arXiv 2402.03300, with ratio 1", Evidence.EXACT)
def uncorrected(*, aggregation: Aggregation = Aggregation.TOKEN_MEAN) -> Objective:
    """The plain policy gradient, whoever sampled: the yardstick of what correction is worth.

    L_t = -r A, r = pi / sg(pi) = 1. What GRPO becomes when old log-probabilities are recomputed by the
    weights that learn, with one update a batch.
    """
    return Objective(ON_POLICY, aggregation=aggregation)


@preset("Gensyn's swarm sampling, arXiv 2509.08721, gensyn-ai/genrl", Evidence.CORE)
def swarm_sapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """SAPO of swarms: other nodes' rollouts as if they were the own ones, without any correction.

    L_t = -min(r A, clip(r, 0.8, 1.28) A), r = pi / pi_old, pi_old recomputed at ingestion, so that r = 1 on
    first use. The released trainer's upper bound lacks parentheses and becomes 0.2 when it is not set: not
    copied. Not soft-SAPO.
    """
    return Objective(Ratio(Reference.INGESTION), (Clip(clip_low, clip_high),), aggregation)


@preset("PPO, arXiv 1707.06347; bypass as in verl", Evidence.EXACT)
def ppo_clip(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    denominator: Reference = Reference.BEHAVIOUR,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """PPO's clip with group advantages, run asynchronously.

    L_t = -min(r A, clip(r, 0.8, 1.2) A), r = pi / pi_old.
    """
    return Objective(Ratio(denominator), (Clip(clip_low, clip_high),), aggregation)


@preset("arXiv 2402.03300", Evidence.EXACT)
def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    denominator: Reference = Reference.BEHAVIOUR,
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN,
) -> Objective:
    """GRPO: PPO's clip, mean inside each rollout, then over rollouts.

    L_t = -min(r A, clip(r, 0.8, 1.2) A), r = pi / pi_old. Advantages: weight.advantage.
    """
    return ppo_clip(clip_low=clip_low, clip_high=clip_high, denominator=denominator, aggregation=aggregation)


@preset("arXiv 2503.20783", Evidence.EXACT)
def dr_grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    denominator: Reference = Reference.BEHAVIOUR,
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_SUM_NORM,
) -> Objective:
    """Dr.GRPO: GRPO divided by a constant length, so that long failures are not diluted.

    L = sum of -min(r A, clip(r, 0.8, 1.2) A) / (rollouts x maximal length). Its advantage r - mean is
    weight.advantage = "dr_grpo".
    """
    return ppo_clip(clip_low=clip_low, clip_high=clip_high, denominator=denominator, aggregation=aggregation)


@preset("arXiv 2503.14476", Evidence.EXACT)
def dapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual: float = 10.0,
    denominator: Reference = Reference.BEHAVIOUR,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """DAPO: a higher upper clip, dual clip 10, mean over tokens.

    L_t = -min(r A, clip(r, 0.8, 1.28) A), for A < 0 not above -10 A. Overlong filter and dynamic sampling are
    not the loss's.
    """
    return Objective(Ratio(denominator), (Clip(clip_low, clip_high, dual),), aggregation)


@preset("arXiv 2511.05589, 777pomingzi/CoPRIS", Evidence.EXACT)
def copris(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual: float = 10.0,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """CoPRIS: DAPO's clip against the weights that generated each token, stage by stage.

    L_t = -min(r A, clip(r, 0.8, 1.28) A), r = pi / pi_old^v, v the version of token t; dual clip 10. The
    paper recomputes at the end of each stage; here snapshots do. Engine mismatch stays uncorrected.
    """
    return dapo(
        clip_low=clip_low,
        clip_high=clip_high,
        dual=dual,
        denominator=Reference.SNAPSHOT,
        aggregation=aggregation,
    )


@preset("INTELLECT-2, arXiv 2505.07291; TRL's delta", Evidence.EXACT)
def intellect2(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float = 4.0,
    denominator: Reference = Reference.BEHAVIOUR,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """INTELLECT-2's two-sided clip: negative advantages are bounded from above, too.

    L_t = -min(min(r, 4) A, clip(r, 0.8, 1.2) A): delta bites for A < 0 only, where it is a dual clip. Its KL
    term (1e-3) is left out.
    """
    return Objective(Ratio(denominator), (Clip(clip_low, clip_high, delta),), aggregation)


@preset("arXiv 2605.17570, from its abstract", Evidence.RECONSTRUCTED)
def mu_grpo(
    *,
    clip_low: float = 0.5,
    clip_high: float = 1.0,
    relax: float = 0.5,
    denominator: Reference = Reference.BEHAVIOUR,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """Mu-GRPO: a wide clip, and a veto on what follows the first unlikely token of a failure.

    L_t = -min(r A, clip(r, 0.5, 2) A); if A < 0, tokens after the first with r < 1 - relax are dropped. All
    thresholds are ours.
    """
    return Objective(Ratio(denominator), (Clip(clip_low, clip_high), SuffixVeto(relax)), aggregation)


@preset("Soft Adaptive Policy Optimization, arXiv 2511.20347; verl, TRL", Evidence.EXACT)
def soft_sapo(
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    denominator: Reference = Reference.BEHAVIOUR,
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN,
) -> Objective:
    """Soft-SAPO: a sigmoid gate in place of the clip.

    L_t = -(4 / tau) sigmoid(tau (r - 1)) A: gradient A at r = 1, fading on both sides. Not Gensyn's SAPO.
    """
    return Objective(Ratio(denominator), (SoftGate(tau_positive, tau_negative),), aggregation)


@preset("DeepSeek-V3.2, arXiv 2512.02556; slime, TRL", Evidence.EXACT)
def opsm(
    *,
    delta: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    denominator: Reference = Reference.BEHAVIOUR,
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN,
) -> Objective:
    """Off-policy sequence mask: failures that have become too unlikely are dropped whole.

    L_t = -min(r A, clip(r, 0.8, 1.2) A), or 0 for all of a rollout with A < 0 and mean(log pi_old - log pi) >
    delta. The paper names no delta;
    slime has 1e-4 and TRL 0.5, so it must be given.
    """
    far = Band(
        Ratio(Reference.CURRENT, of=denominator, level=Level.SEQUENCE_MEAN),
        high=math.exp(min(delta, MAX_LOG_RATIO)),
        negative_only=True,
    )
    return Objective(Ratio(denominator), (Clip(clip_low, clip_high), far), aggregation)


@preset("DRO, arXiv 2405.19107, as in verl", Evidence.CORE)
def dro(
    *,
    beta: float = 0.1,
    denominator: Reference = Reference.BEHAVIOUR,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
) -> Objective:
    """DRO: REINFORCE with a square penalty on the log ratio.

    L_t = -(A log pi - beta / 2 (log r)^2). beta is ours.
    """
    ratio = Ratio(denominator)
    return Objective(ON_POLICY, (Score(), Penalty(ratio, beta / 2)), aggregation)

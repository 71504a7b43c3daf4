"""PPO's family on the 2 x 4 tensor of `golden.py`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from node.train.objectives import Aggregation, Reference, open_objective
from node.train.objectives.presets.proximal import (
    copris,
    dapo,
    dr_grpo,
    dro,
    grpo,
    intellect2,
    mu_grpo,
    opsm,
    soft_sapo,
    swarm_sapo,
    uncorrected,
)
from protocol.errors import ConfigError
from tests.node.train.golden import NAN, logs, near, run

PI = logs([[0.50, 0.45, 0.55, 0.30], [0.10, 0.35, 0.45, NAN]])
MU = logs([[0.25, 0.50, 0.50, 0.50], [0.40, 0.25, 0.50, NAN]])
# r = 2, 0.9, 1.1, 0.6 | 0.25, 1.4, 0.9
RATIOS = [[2.0, 0.9, 1.1, 0.6], [0.25, 1.4, 0.9]]


def test_uncorrected() -> None:
    result, gradient = run(uncorrected(), PI)
    assert result.loss_BT.tolist() == near([[-1.0] * 4, [1.0, 1.0, 1.0, 0.0]])
    assert gradient == near([[-1.0] * 4, [1.0, 1.0, 1.0, 0.0]])


@pytest.mark.parametrize(
    ("objective", "aggregation"),
    [
        (grpo(), Aggregation.SEQ_MEAN_TOKEN_MEAN),
        (dr_grpo(), Aggregation.SEQ_MEAN_TOKEN_SUM_NORM),
    ],
    ids=["grpo", "dr_grpo"],
)
def test_grpo_differs_from_dr_grpo_in_the_denominator_only(objective: Any, aggregation: Aggregation) -> None:
    result, gradient = run(objective, PI, behaviour=MU)
    assert result.loss_BT.tolist() == near([[-1.2, -0.9, -1.1, -0.6], [0.8, 1.4, 0.9, 0.0]])
    assert gradient == near([[0.0, -0.9, -1.1, -0.6], [0.0, 1.4, 0.9, 0.0]])
    assert objective.aggregation is aggregation


def test_dapo_has_a_higher_and_a_dual_clip() -> None:
    pi = logs([[0.50, 0.45, 0.55, 0.63], [0.60, 0.35, 0.45, NAN]])
    mu = logs([[0.25, 0.50, 0.50, 0.50], [0.05, 0.25, 0.50, NAN]])
    # r = 2, 0.9, 1.1, 1.26 (below 1.28) | 12 (above the dual bound), 1.4, 0.9
    result, gradient = run(dapo(), pi, behaviour=mu)
    assert result.loss_BT.tolist() == near([[-1.28, -0.9, -1.1, -1.26], [10.0, 1.4, 0.9, 0.0]])
    assert gradient == near([[0.0, -0.9, -1.1, -1.26], [0.0, 1.4, 0.9, 0.0]])
    assert result.kept_BT.tolist() == [[False, True, True, True], [False, True, True, False]]
    assert not result.dropped_BT.any()  # clipped, not dropped


def test_copris_uses_the_generating_versions_log_probabilities() -> None:
    # the engine's and the recomputed ones say something else; one snapshot is gone: ingestion there, r = 1
    snapshot = MU.clone()
    snapshot[0, 3] = NAN
    result, gradient = run(copris(), PI, snapshot=snapshot, behaviour=PI - 3.0)
    assert result.loss_BT.tolist() == near([[-1.28, -0.9, -1.1, -1.0], [0.8, 1.4, 0.9, 0.0]])
    assert gradient == near([[0.0, -0.9, -1.1, -1.0], [0.0, 1.4, 0.9, 0.0]])


def test_intellect2_bounds_failures_from_above() -> None:
    pi = logs([[0.50, 0.45, 0.55, 0.30], [0.60, 0.35, 0.45, NAN]])
    mu = logs([[0.10, 0.50, 0.50, 0.50], [0.12, 0.25, 0.50, NAN]])
    # r = 5: A > 0 clipped at 1.2; r = 5: A < 0 is 4 A
    result, gradient = run(intellect2(), pi, behaviour=mu)
    assert result.loss_BT.tolist() == near([[-1.2, -0.9, -1.1, -0.6], [4.0, 1.4, 0.9, 0.0]])
    assert gradient == near([[0.0, -0.9, -1.1, -0.6], [0.0, 1.4, 0.9, 0.0]])


def test_swarm_sapo_is_a_clip_against_ingestion() -> None:
    result, gradient = run(swarm_sapo(), PI, ingestion=MU)
    assert result.loss_BT.tolist() == near([[-1.28, -0.9, -1.1, -0.6], [0.8, 1.4, 0.9, 0.0]])
    assert gradient == near([[0.0, -0.9, -1.1, -0.6], [0.0, 1.4, 0.9, 0.0]])
    _, first = run(swarm_sapo(), PI, behaviour=MU)  # first use: no correction at all
    assert first == near([[-1.0] * 4, [1.0, 1.0, 1.0, 0.0]])


def test_mu_grpo_vetoes_what_follows_an_unlikely_token_of_a_failure() -> None:
    pi = logs([[0.50, 0.10, 0.55, 0.30], [0.35, 0.10, 0.45, NAN]])
    mu = logs([[0.20, 0.40, 0.50, 0.50], [0.25, 0.40, 0.50, NAN]])
    # r = 2.5, 0.25 (no veto: A > 0), 1.1, 0.6 | 1.4, 0.25 (trigger), 0.9 (after it)
    result, gradient = run(mu_grpo(), pi, behaviour=mu)
    assert result.loss_BT.tolist() == near([[-2.0, -0.25, -1.1, -0.6], [1.4, 0.5, 0.0, 0.0]])
    assert gradient == near([[0.0, -0.25, -1.1, -0.6], [1.4, 0.0, 0.0, 0.0]])
    assert result.dropped_BT.tolist() == [[False] * 4, [False, False, True, False]]


def test_soft_sapo() -> None:
    result, gradient = run(soft_sapo(), PI, behaviour=MU)
    loss, slope = [], []
    for row, tau, advantage in ((RATIOS[0], 1.0, 1.0), (RATIOS[1], 1.05, -1.0)):
        gates = [1 / (1 + math.exp(-tau * (r - 1))) for r in row]
        loss.append([-advantage * 4 / tau * gate for gate in gates])
        slope.append([-advantage * 4 * gate * (1 - gate) * r for gate, r in zip(gates, row, strict=True)])
    loss[1].append(0.0)
    slope[1].append(0.0)
    assert result.loss_BT.tolist() == near(loss)
    assert gradient == near(slope)
    assert gradient[0][2] == pytest.approx(-1.1 * 4 * 0.52497918747894 * 0.47502081252106)


def test_opsm_drops_failures_that_became_unlikely() -> None:
    # mean(log old - log pi): row 1: (ln 4 - ln 1.4 + ln(1/0.9)) / 3 = 0.385; row 0, below zero, is no failure
    result, gradient = run(opsm(delta=0.4), PI, behaviour=MU)
    assert result.loss_BT.tolist() == near([[-1.2, -0.9, -1.1, -0.6], [0.8, 1.4, 0.9, 0.0]])
    result, gradient = run(opsm(delta=0.38), PI, behaviour=MU)
    assert result.loss_BT.tolist() == near([[-1.2, -0.9, -1.1, -0.6], [0.0] * 4])
    assert gradient == near([[0.0, -0.9, -1.1, -0.6], [0.0] * 4])
    assert result.dropped_BT.tolist() == [[False] * 4, [True, True, True, False]]
    _, gradient = run(opsm(delta=0.0), PI.clone(), behaviour=PI + 1.0)  # successes may be far
    assert gradient[0] == pytest.approx([-math.exp(-1)] * 4)


def test_opsm_needs_its_delta() -> None:
    with pytest.raises(ConfigError, match="opsm needs the option 'delta'"):
        open_objective("opsm")
    assert open_objective("opsm", {"delta": 0.5}) == opsm(delta=0.5)


def test_dro() -> None:
    result, gradient = run(dro(beta=0.2), PI, behaviour=MU)
    pi = [[0.50, 0.45, 0.55, 0.30], [0.10, 0.35, 0.45]]
    loss = [
        [-(advantage * math.log(p) - 0.1 * math.log(r) ** 2) for p, r in zip(ps, rs, strict=True)]
        for advantage, ps, rs in zip((1.0, -1.0), pi, RATIOS, strict=True)
    ]
    slope = [
        [-advantage + 0.2 * math.log(r) for r in rs]
        for advantage, rs in zip((1.0, -1.0), RATIOS, strict=True)
    ]
    assert result.loss_BT.tolist() == near([loss[0], [*loss[1], 0.0]])
    assert gradient == near([slope[0], [*slope[1], 0.0]])


def test_the_denominator_can_be_any_old_policy() -> None:
    for reference, given in (
        (Reference.BEHAVIOUR, {"behaviour": MU}),
        (Reference.INGESTION, {"ingestion": MU}),
        (Reference.SNAPSHOT, {"snapshot": MU}),
        (Reference.EWMA, {"ewma": MU}),
    ):
        _, gradient = run(grpo(denominator=reference), PI, **given)
        assert gradient == near([[0.0, -0.9, -1.1, -0.6], [0.0, 1.4, 0.9, 0.0]])
    with pytest.raises(ValueError, match="gave no snapshot"):
        run(grpo(denominator=Reference.SNAPSHOT), PI)


def test_log_ratios_are_clamped_and_have_no_gradient_beyond() -> None:
    pi = logs([[0.5] * 4, [0.5] * 3 + [NAN]])
    mu = pi.clone()
    mu[1, :2] -= torch.tensor([30.0, 10.0])  # r = e^30 and e^10, A < 0: the clip does not bound them
    result, gradient = run(grpo(), pi, behaviour=mu)
    assert result.loss_BT[1].tolist() == pytest.approx([math.exp(20), math.exp(10), 1.0, 0.0])
    assert gradient[1] == pytest.approx([0.0, math.exp(10), 1.0, 0.0])
    assert result.log_ratio_BT[1].tolist() == pytest.approx([20.0, 10.0, 0.0, 0.0])


ATTACHED = ("ppo_clip", "grpo", "dapo", "intellect2", "soft_sapo", "dis", "dro", "decoupled_ppo", "icepop")


@pytest.mark.parametrize("name", ATTACHED)
def test_gradients_are_those_of_the_reported_loss_where_only_weights_are_detached(name: str) -> None:
    """By central differences of single log-probabilities, away from kinks."""
    old = logs([[0.52, 0.41, 0.33, 0.21], [0.13, 0.29, 0.44, NAN]])
    given = {"behaviour": old if name in ATTACHED[:7] else MU, "ingestion": old}
    _, gradient = run(open_objective(name), PI, **given)
    step = 1e-5
    for row, column in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]:
        losses = []
        for sign in (1, -1):
            moved = PI.clone()
            moved[row, column] += sign * step
            losses.append(float(run(open_objective(name), moved, **given)[0].loss_BT.detach().sum()))
        assert gradient[row][column] == pytest.approx((losses[0] - losses[1]) / (2 * step), abs=1e-6)

"""The objectives of the product's defaults on the 2 x 4 tensor of `golden.py`, and how they are opened."""

from __future__ import annotations

import math

import pytest
import torch

from node.train.objectives import Aggregation, Reference, open_objective
from node.train.objectives.aggregation import row_scale
from node.train.objectives.presets.decoupled import tis
from node.train.objectives.presets.direct import dppo_tv
from node.train.objectives.presets.foreign import compat, graft, hacpo
from node.train.objectives.presets.proximal import ppo_clip
from protocol.errors import ConfigError
from tests.node.train.golden import NAN, logs, near, run


def test_dppo_tv() -> None:
    pi = logs([[0.50, 0.40, 0.20, 0.60], [0.10, 0.30, 0.50, NAN]])
    mu = logs([[0.25, 0.50, 0.20, 0.50], [0.40, 0.25, 0.50, NAN]])
    result, gradient = run(dppo_tv(), pi, behaviour=mu)
    # D = +0.25 (dropped: A > 0), -0.1, 0, +0.1 | -0.3 (dropped: A < 0), +0.05, 0
    # rho = 2, 0.8, 1, 1.2 | 0.25, 1.2, 1
    assert result.kept_BT.tolist() == [[False, True, True, True], [False, True, True, False]]
    assert gradient == near([[0.0, -0.8, -1.0, -1.2], [0.0, 1.2, 1.0, 0.0]])  # rho is detached
    assert result.loss_BT.tolist() == near(
        [
            [0.0, -0.8 * math.log(0.4), -math.log(0.2), -1.2 * math.log(0.6)],
            [0.0, 1.2 * math.log(0.3), math.log(0.5), 0.0],
        ]
    )
    assert result.weights_BT.tolist() == near([[2.0, 0.8, 1.0, 1.2], [0.25, 1.2, 1.0, 0.0]])
    assert result.log_ratio_BT[0, 0].item() == pytest.approx(math.log(2))
    assert not result.weights_BT.requires_grad
    assert not result.log_ratio_BT.requires_grad


def test_dppo_tv_asymmetric_and_capped() -> None:
    pi = logs([[0.50, 0.30, 0.20, 0.60], [0.63, 0.30, 0.50, NAN]])
    mu = logs([[0.25, 0.50, 0.20, 0.50], [0.02, 0.45, 0.50, NAN]])
    result, gradient = run(dppo_tv(delta_low=0.1, delta_high=0.3, cap=20.0), pi, behaviour=mu)
    # +0.25 is below delta_high; row 1: rho = 31.5 is capped at 20, D = -0.15 is below -delta_low and A < 0
    assert result.kept_BT.tolist() == [[True, True, True, True], [True, False, True, False]]
    assert gradient == near([[-2.0, -0.6, -1.0, -1.2], [20.0, 0.0, 1.0, 0.0]])


def test_ppo_clip_against_behaviour() -> None:
    pi = logs([[0.50, 0.45, 0.55, 0.30], [0.10, 0.35, 0.45, NAN]])
    mu = logs([[0.25, 0.50, 0.50, 0.50], [0.40, 0.25, 0.50, NAN]])
    result, gradient = run(ppo_clip(), pi, behaviour=mu)
    # r = 2 (clipped), 0.9, 1.1, 0.6 (pull back: kept) | 0.25 (clipped), 1.4 (pull back: kept), 0.9
    assert result.loss_BT.tolist() == near([[-1.2, -0.9, -1.1, -0.6], [0.8, 1.4, 0.9, 0.0]])
    assert gradient == near([[0.0, -0.9, -1.1, -0.6], [0.0, 1.4, 0.9, 0.0]])
    assert result.kept_BT.tolist() == [[False, True, True, True], [False, True, True, False]]


def test_ppo_clip_against_ingestion() -> None:
    pi = logs([[0.50, 0.45, 0.55, 0.30], [0.10, 0.35, 0.45, NAN]])
    mu = logs([[0.10, 0.10, 0.10, 0.10], [0.10, 0.10, 0.10, NAN]])
    old = logs([[0.25, 0.50, 0.50, 0.50], [0.40, 0.25, 0.50, NAN]])
    _, gradient = run(
        ppo_clip(denominator=Reference.INGESTION, clip_high=0.05), pi, behaviour=mu, ingestion=old
    )
    assert gradient == near([[0.0, -0.9, 0.0, -0.6], [0.0, 1.4, 0.9, 0.0]])


def test_tis() -> None:
    pi = logs([[0.55, 0.45, 0.20, 0.30], [0.36, 0.50, 0.22, NAN]])
    old = logs([[0.50, 0.50, 0.20, 0.20], [0.40, 0.25, 0.20, NAN]])
    mu = logs([[0.10, 0.50, 0.40, 0.20], [0.20, 0.10, 0.40, NAN]])
    result, gradient = run(tis(), pi, behaviour=mu, ingestion=old)
    # w = 5 -> 2, 1, 0.5, 1 | 2, 2.5 -> 2, 0.5;  r = 1.1, 0.9, 1, 1.5 (clipped at 1.2) | 0.9, 2 (kept), 1.1
    assert result.loss_BT.tolist() == near([[-2.2, -0.9, -0.5, -1.2], [1.8, 4.0, 0.55, 0.0]])
    assert gradient == near([[-2.2, -0.9, -0.5, 0.0], [1.8, 4.0, 0.55, 0.0]])
    assert result.weights_BT.tolist() == near([[5.0, 1.0, 0.5, 1.0], [2.0, 2.5, 0.5, 0.0]])


def test_compat_at_ingestion() -> None:
    pi = torch.tensor([[-1.0, -2.0, -0.5, -0.5], [-1.0, -1.0, -1.0, NAN]], dtype=torch.float64)
    result, gradient = run(compat(), pi, behaviour_sum=[-2.0, -6.0])
    # log s = (-4 + 2) / 4 = -0.5 | (-3 + 6) / 3 = 1, so c = e^-0.5 | 1;  gradient -c A
    c = math.exp(-0.5)
    assert gradient == near([[-c] * 4, [1.0, 1.0, 1.0, 0.0]])  # c is detached
    assert result.weights_BT.tolist() == near([[c] * 4, [1.0, 1.0, 1.0, 0.0]])
    assert result.log_ratio_BT.tolist() == near([[-0.5] * 4, [1.0, 1.0, 1.0, 0.0]])


def test_compat_on_second_use() -> None:
    old = torch.tensor([[-1.0, -2.0, -0.5, -0.5], [-1.0, -1.0, -1.0, NAN]], dtype=torch.float64)
    moved = torch.tensor([[0.3, 0.1, -0.3, 0.0], [-0.3, 0.1, 0.0, NAN]], dtype=torch.float64)
    result, gradient = run(compat(), old + moved, ingestion=old, behaviour_sum=[-2.0, -6.0])
    c = math.exp(-0.5)  # still from the log-probabilities at ingestion
    assert gradient == near(
        [[0.0, -c * math.exp(0.1), -c * math.exp(-0.3), -c], [0.0, math.exp(0.1), 1.0, 0.0]]
    )
    assert result.kept_BT.tolist() == [[False, True, True, True], [False, True, True, False]]


def test_hacpo() -> None:
    pi = torch.tensor([[-1.0, -2.0, -0.5, -0.5], [-1.0, -1.0, -1.0, NAN]], dtype=torch.float64)
    result, gradient = run(hacpo(), pi, behaviour_sum=[-2.0, -6.0])
    # s = e^-0.5 | e: value s sg(s) A = e^-1 | 1 x 1 x -1, above one without gradient
    s = math.exp(-0.5)
    assert result.loss_BT.tolist() == near([[-s * s] * 4, [1.0, 1.0, 1.0, 0.0]])
    assert gradient == near([[-s * s] * 4, [0.0, 0.0, 0.0, 0.0]])  # 2 s s without the detach
    assert result.kept_BT.tolist() == [[True] * 4, [False] * 4]


@pytest.mark.parametrize(("alpha", "power"), [(0.0, 1), (1.0, 2), (3.0, 4)])
def test_hacpo_alpha(alpha: float, power: int) -> None:
    pi = torch.tensor([[-1.0, -2.0, -0.5, -0.5], [-1.0, -1.0, -1.0, NAN]], dtype=torch.float64)
    _, gradient = run(hacpo(alpha=alpha), pi, behaviour_sum=[-2.0, -3.0], advantages=(2.0, -0.5))
    expected = -2.0 * math.exp(-0.5 * power)
    assert gradient == near([[expected] * 4, [0.5, 0.5, 0.5, 0.0]])


def test_hacpo_lower_bound_rises_with_uses() -> None:
    pi = torch.tensor([[-1.0, -2.0, -0.5, -0.5], [-2.0, -2.0, -2.0, NAN]], dtype=torch.float64)
    low = math.exp(-2.0)  # row 1: below 1 - 0.8
    result, gradient = run(hacpo(), pi, behaviour_sum=[-2.0, 0.0])
    assert gradient[1] == [0.0] * 4
    assert result.loss_BT[1].tolist() == pytest.approx([0.2 * low] * 3 + [0.0])
    discarded, _ = run(hacpo(discard_below=True), pi, behaviour_sum=[-2.0, 0.0])
    assert discarded.loss_BT[1].tolist() == [0.0] * 4
    # with 20 uses the bound is 0.2 + 20 x 0.025 = 0.7 > e^-0.5
    _, later = run(hacpo(), pi, behaviour_sum=[-2.0, 0.0], uses=20)
    assert later == near([[0.0] * 4, [0.0] * 4])


def test_graft() -> None:
    pi = torch.tensor([[-2.0, -3.0, -2.4, -2.4], [-1.0, -1.0, -1.0, NAN]], dtype=torch.float64)
    # own rollouts -3, -2, -1: quantile 0.05 is -2.9, 0.5 is -2; l = -2.45 | -1, so c = 0.5 | 1
    result, gradient = run(graft(), pi, own=[-3.0, -1.0, -2.0])
    assert gradient == near([[-0.5] * 4, [1.0, 1.0, 1.0, 0.0]])
    assert result.weights_BT.tolist() == near([[0.5] * 4, [1.0, 1.0, 1.0, 0.0]])


def test_graft_token_clip_has_no_minimum() -> None:
    old = torch.tensor([[-2.0, -2.0, -2.0, -2.0], [-1.0, -1.0, -1.0, NAN]], dtype=torch.float64)
    moved = torch.tensor([[1.7, 1.5, -1.7, 0.0], [-1.7, -1.5, 1.7, NAN]], dtype=torch.float64)
    result, gradient = run(graft(), old + moved, ingestion=old, own=[-3.0, -2.0, -1.0])
    # e^1.7 = 5.47 and e^-1.7 = 0.18 lie outside [0.2, 5], whatever the sign of A
    assert gradient == near([[0.0, -math.exp(1.5), 0.0, -1.0], [0.0, math.exp(-1.5), 0.0, 0.0]])
    assert result.loss_BT.tolist() == near(
        [[-5.0, -math.exp(1.5), -0.2, -1.0], [0.2, math.exp(-1.5), 5.0, 0.0]]
    )


def test_graft_without_own_rollouts_gives_nothing() -> None:
    pi = torch.full((2, 4), -1.0, dtype=torch.float64)
    result, gradient = run(graft(), pi)
    assert gradient == near([[0.0] * 4, [0.0] * 4])
    assert not result.kept_BT.any()


def test_row_scale() -> None:
    given = {"row_tokens": 5, "source_tokens": 40, "source_rows": 8, "norm_tokens": 16}
    assert row_scale(Aggregation.TOKEN_MEAN, **given) == 1 / 40
    assert row_scale(Aggregation.SEQ_MEAN_TOKEN_MEAN, **given) == 1 / 40
    assert row_scale(Aggregation.SEQ_MEAN_TOKEN_SUM_NORM, **given) == 1 / 128


def test_open_objective() -> None:
    assert open_objective("dppo_tv") == dppo_tv()
    assert open_objective("hacpo", {"alpha": 3.0, "aggregation": "token_mean"}) == hacpo(
        alpha=3.0, aggregation=Aggregation.TOKEN_MEAN
    )
    for name, options, message in (
        ("dpo", {}, "'dpo' is unknown"),
        ("tis", {"cup": 1}, "no option 'cup'"),
        ("tis", {"aggregation": "sum"}, "'sum' is unknown"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_objective(name, options)

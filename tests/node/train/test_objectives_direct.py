"""One ratio straight against the engine, on the 2 x 4 tensor of `golden.py`."""

from __future__ import annotations

import math

import pytest

from node.train.objectives.presets.direct import (
    cispo,
    dis,
    dppo_kl,
    dppo_tv,
    f_opd,
    m2po_clip,
    m2po_mask,
    minpro,
    sat,
)
from tests.node.train.golden import NAN, logs, near, run

PI = logs([[0.50, 0.45, 0.55, 0.30], [0.10, 0.35, 0.45, NAN]])
MU = logs([[0.25, 0.50, 0.50, 0.50], [0.40, 0.25, 0.50, NAN]])
# rho = 2, 0.9, 1.1, 0.6 | 0.25, 1.4, 0.9


def binary_kl(then: float, now: float) -> float:
    return then * math.log(then / now) + (1 - then) * math.log((1 - then) / (1 - now))


def test_dppo_kl() -> None:
    # 0.131 up, dropped; 0.005; 0.005; 0.087 down with A > 0, kept | 0.312 down, dropped; up, kept; 0.005
    assert [binary_kl(0.25, 0.5), binary_kl(0.5, 0.3)] == pytest.approx([0.1308120359, 0.0871766936])
    assert binary_kl(0.4, 0.1) == pytest.approx(0.3112386795)
    result, gradient = run(dppo_kl(), PI, behaviour=MU)
    assert gradient == near([[0.0, -0.9, -1.1, -0.6], [0.0, 1.4, 0.9, 0.0]])  # rho is detached
    assert result.loss_BT.tolist() == near(
        [
            [0.0, -0.9 * math.log(0.45), -1.1 * math.log(0.55), -0.6 * math.log(0.3)],
            [0.0, 1.4 * math.log(0.35), 0.9 * math.log(0.45), 0.0],
        ]
    )
    _, gradient = run(dppo_kl(delta_low=0.4, delta_high=0.15), PI, behaviour=MU)
    assert gradient == near([[-2.0, -0.9, -1.1, -0.6], [0.25, 1.4, 0.9, 0.0]])


def test_dppo_kl_of_certain_tokens_is_finite() -> None:
    sure = logs([[1.0, 1.0, 1e-30, 0.5], [1.0, 1e-30, 1.0, NAN]])
    result, gradient = run(dppo_kl(), sure, behaviour=MU)
    assert result.loss_BT.isfinite().all()
    assert all(math.isfinite(each) for row in gradient for each in row)


def test_prime_rl_pulls_dropped_tokens_back() -> None:
    _, plain = run(dppo_tv(), PI, behaviour=MU)
    result, pulled = run(dppo_tv(kl_tau=0.01), PI, behaviour=MU)
    rho = [[2.0, 0.9, 1.1, 0.6], [0.25, 1.4, 0.9, 1.0]]
    expected = [
        [slope + 0.02 * math.log(r) for slope, r in zip(row, rs, strict=True)]
        for row, rs in zip(plain, rho, strict=True)
    ]
    assert plain[0][0] == 0.0
    assert pulled == near(expected)
    assert result.loss_BT[0, 0].item() == pytest.approx(0.01 * math.log(2) ** 2)


def test_cispo_caps_the_weight_and_drops_nothing() -> None:
    result, gradient = run(cispo(cap=1.3), PI, behaviour=MU)
    assert gradient == near([[-1.3, -0.9, -1.1, -0.6], [0.25, 1.3, 0.9, 0.0]])
    assert result.loss_BT[0, 0].item() == pytest.approx(-1.3 * math.log(0.5))
    assert result.kept_BT.sum() == 7
    _, gradient = run(cispo(floor=0.5), PI, behaviour=MU)
    assert gradient == near([[-2.0, -0.9, -1.1, -0.6], [0.5, 1.4, 0.9, 0.0]])


def test_dis_drops_whatever_the_advantage() -> None:
    pi = logs([[0.70, 0.45, 0.55, 0.30], [0.10, 0.35, 0.45, NAN]])
    mu = logs([[0.10, 0.50, 0.50, 0.50], [0.40, 0.25, 0.50, NAN]])
    # rho = 7 (above 6), 0.9, 1.1, 0.6 (below 0.7, A > 0) | 0.25 (below), 1.4, 0.9
    result, gradient = run(dis(), pi, behaviour=mu)
    expected = [[0.0, -0.9, -1.1, 0.0], [0.0, 1.4, 0.9, 0.0]]
    assert gradient == near(expected)
    assert result.loss_BT.tolist() == near(expected)


# Harmful tokens: A > 0 and r > 1, A < 0 and r < 1. |log r| of them:
HARM_PI = [[0.10, 0.10, 0.10, 0.10], [0.10, 0.10, 0.10, NAN]]
LOG_R = [[0.1, 0.2, 0.9, -0.8], [-0.3, 0.6, -0.5, 0.0]]
HARM_MU = [[0.1 * math.exp(-step) for step in row] for row in LOG_R]
# d^2 over H: 0.01, 0.04, 0.81 | 0.09, 0.25


def test_m2po_mask_drops_the_most_extreme_harmful_tokens() -> None:
    pi, mu = logs(HARM_PI), logs(HARM_MU)
    # sorted: 0.01, 0.04, 0.09, 0.25, 0.81; means 0.01, 0.025, 0.0467 > 0.04: three are dropped
    result, gradient = run(m2po_mask(), pi, behaviour=mu)
    e = math.exp
    expected = [[-e(0.1), -e(0.2), 0.0, -e(-0.8)], [0.0, e(0.6), 0.0, 0.0]]
    assert gradient == near(expected)
    assert result.loss_BT.tolist() == near(expected)
    assert result.dropped_BT.sum() == 3
    # a budget of 0.1: mean of four is 0.0975, of five 0.24
    result, gradient = run(m2po_mask(budget=0.1), pi, behaviour=mu)
    assert gradient == near([[-e(0.1), -e(0.2), 0.0, -e(-0.8)], [e(-0.3), e(0.6), e(-0.5), 0.0]])


def test_m2po_clip_finds_the_bound_among_the_harmful_tokens() -> None:
    pi, mu = logs(HARM_PI), logs(HARM_MU)
    e = math.exp
    # tau^2 = 0.05: 0.01 + 0.04 + 3 x 0.05 = 5 x 0.04; e^+-0.2236 = 0.80, 1.25, floors make it [0.7, 1.5]
    result, gradient = run(m2po_clip(), pi, behaviour=mu)
    assert gradient == near([[-e(0.1), -e(0.2), 0.0, -e(-0.8)], [e(-0.3), e(0.6), 0.0, 0.0]])
    assert result.loss_BT.tolist() == near([[-e(0.1), -e(0.2), -1.5, -e(-0.8)], [e(-0.3), e(0.6), 0.7, 0.0]])
    # without floors the bounds bite
    tau = math.sqrt(0.05)
    result, gradient = run(m2po_clip(floor_low=0.0, floor_high=0.0), pi, behaviour=mu)
    assert result.loss_BT.tolist() == near(
        [[-e(0.1), -e(0.2), -e(tau), -e(-0.8)], [e(-tau), e(0.6), e(-tau), 0.0]]
    )
    assert gradient == near([[-e(0.1), -e(0.2), 0.0, -e(-0.8)], [0.0, e(0.6), 0.0, 0.0]])
    # budget 0.15, tau 0.6: 0.01 + 0.04 + 0.09 + 0.25 + 0.36 = 5 x 0.15: wider than the floors
    result, _ = run(m2po_clip(budget=0.15), pi, behaviour=mu)
    assert result.loss_BT[0, 2].item() == pytest.approx(-e(0.6))
    # 0.24 is within 0.25: no clip at all
    result, gradient = run(m2po_clip(budget=0.25), pi, behaviour=mu)
    assert result.loss_BT[0, 2].item() == pytest.approx(-e(0.9))
    assert gradient[0][2] == pytest.approx(-e(0.9))


def test_sat_closes_in_on_the_most_distant_tokens() -> None:
    steps = [[0.15, 0.10, 0.9, -0.8], [-0.1, 0.5, -0.6, 0.0]]
    pi, mu = logs(HARM_PI), logs([[0.1 * math.exp(-step) for step in row] for row in steps])
    # |d| sorted: 0.1, 0.1, 0.15, 0.5, 0.6, 0.8, 0.9; the median is 0.5
    result, gradient = run(sat(quantile=0.5), pi, behaviour=mu)
    e = math.exp
    up = 0.2 * 0.25 / (0.25 + 0.81)  # width of the upper side at d = 0.9
    down = 0.2 * 0.25 / (0.25 + 0.36)  # of the lower side at d = -0.6
    assert result.loss_BT.tolist() == near(
        [[-e(0.15), -e(0.1), -(1 + up), -e(-0.8)], [e(-0.1), e(0.5), 1 - down, 0.0]]
    )
    assert gradient == near([[-e(0.15), -e(0.1), 0.0, -e(-0.8)], [e(-0.1), e(0.5), 0.0, 0.0]])
    result, _ = run(sat(quantile=0.5, continuous=True), pi, behaviour=mu)
    assert result.loss_BT[0, 2].item() == pytest.approx(-(1 + 2 * up))
    # the bounds are those of the token: inside PPO's interval nothing is closed
    result, _ = run(sat(quantile=1.0), pi, behaviour=mu)
    assert result.loss_BT[0].tolist() == near([[-e(0.15), -e(0.1), -1.2, -e(-0.8)]])[0]


def test_minpro_weighs_by_the_least_likely_token_before() -> None:
    # rho = 2, 0.9, 1.1, 0.6 | 0.25, 1.4, 0.9; least before, at most 1: 1, 1, 0.9, 0.9 | 1, 0.25, 0.25
    result, gradient = run(minpro(), PI, behaviour=MU)
    assert result.loss_BT.tolist() == near(
        [[-1.28, -0.9, -0.9 * 1.1, -0.9 * 0.6], [0.8, 0.25 * 1.4, 0.25 * 0.9, 0.0]]
    )
    # the prefix is detached: token 2's gradient is its own
    assert gradient == near([[0.0, -0.9, -0.99, -0.54], [0.0, 0.35, 0.225, 0.0]])


def test_f_opd_weighs_by_distance_and_lag() -> None:
    lags = [[0.0, 0.0, 2.0, 2.0], [3.0, 3.0, 3.0, NAN]]
    result, gradient = run(f_opd(decay=0.5, lag_decay=0.2), PI, behaviour=MU, lags=lags)
    distance = [sum(abs(math.log(r)) for r in (2.0, 0.9, 1.1, 0.6)) / 4]
    distance.append(sum(abs(math.log(r)) for r in (0.25, 1.4, 0.9)) / 3)
    fresh = [math.exp(-0.5 * distance[0] - 0.2 * 1.0), math.exp(-0.5 * distance[1] - 0.2 * 3.0)]
    expected = [[-fresh[0]] * 4, [fresh[1]] * 3 + [0.0]]
    assert gradient == near(expected)
    assert result.loss_BT.tolist() == near(expected)

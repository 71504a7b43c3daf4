"""Ratios of whole completions, or of all so far, on the 2 x 4 tensor of `golden.py`."""

from __future__ import annotations

import math

import pytest

from node.train.objectives import Aggregation
from node.train.objectives.aggregation import row_scale
from node.train.objectives.presets.sequence import gspo, luspo, pnpo, tbpo, topr, topr_token, vcpo, vespo
from tests.node.train.golden import NAN, logs, near, run

PI = logs([[0.50, 0.45, 0.55, 0.30], [0.10, 0.35, 0.45, NAN]])
MU = logs([[0.25, 0.50, 0.50, 0.50], [0.40, 0.25, 0.50, NAN]])
# rho = 2, 0.9, 1.1, 0.6 | 0.25, 1.4, 0.9;  W = 1.188 | 0.315
W = [2.0 * 0.9 * 1.1 * 0.6, 0.25 * 1.4 * 0.9]
S = [W[0] ** (1 / 4), W[1] ** (1 / 3)]  # 1.044 | 0.680


def test_gspo_clips_whole_completions() -> None:
    result, gradient = run(gspo(), PI, behaviour=MU)
    assert result.loss_BT.tolist() == near([[-1.0004] * 4, [0.9997] * 3 + [0.0]])
    assert gradient == near([[0.0] * 4, [0.0] * 4])
    result, gradient = run(gspo(clip_low=0.4, clip_high=0.1), PI, behaviour=MU)
    expected = [[-S[0]] * 4, [S[1]] * 3 + [0.0]]
    assert result.loss_BT.tolist() == near(expected)
    # d/d log pi_t of the mean over tokens, -s A / T, is the mean of these
    assert gradient == near(expected)
    assert gspo().aggregation is Aggregation.SEQ_MEAN_TOKEN_MEAN


def test_luspo_is_gspo_times_the_length() -> None:
    _, plain = run(gspo(clip_low=0.4, clip_high=0.1), PI, behaviour=MU)
    longer = luspo(clip_low=0.4, clip_high=0.1)
    _, gradient = run(longer, PI, behaviour=MU)
    assert gradient == near(plain)
    given = {"source_tokens": 7, "source_rows": 2, "norm_tokens": 16}
    for tokens in (4, 3):
        ours = row_scale(longer.aggregation, row_tokens=tokens, **given)
        assert ours == pytest.approx(tokens * row_scale(gspo().aggregation, row_tokens=tokens, **given))


def test_pnpo_takes_the_mean_of_the_prefix() -> None:
    # w = 2, 1.8^(1/2), 1.98^(1/3), 1.188^(1/4) | 0.25, 0.35^(1/2), 0.315^(1/3)
    w = [[2.0, 1.8**0.5, 1.98 ** (1 / 3), S[0]], [0.25, 0.35**0.5, S[1]]]
    result, gradient = run(pnpo(clip_low=0.5, clip_high=0.4), PI, behaviour=MU)
    assert result.loss_BT.tolist() == near([[-1.4, *(-x for x in w[0][1:])], [0.5, *w[1][1:], 0.0]])
    # the gradient of w_t is token t's alone
    assert gradient == near([[0.0, *(-x for x in w[0][1:])], [0.0, *w[1][1:], 0.0]])
    result, _ = run(pnpo(), PI, behaviour=MU)
    assert result.loss_BT[0].tolist() == pytest.approx([-1.0004] * 4)


def test_tbpo_bounds_failures_on_two_sides() -> None:
    base = logs([[0.5] * 4, [0.5] * 3 + [NAN]])
    for step, value, slope, dropped in (
        (0.05, math.exp(0.05), math.exp(0.05), False),  # sA < clip(s)A: kept
        (0.08, math.exp(0.08), math.exp(0.08), False),
        (0.11, 0.0, 0.0, True),  # e^0.11 = 1.116 is outside the band
        (-0.05, 0.9997, 0.0, False),  # clipped as in GSPO
        (-0.11, 0.0, 0.0, True),  # e^-0.11 = 0.896 is outside the band
    ):
        result, gradient = run(tbpo(), base, behaviour=base - step)
        assert result.loss_BT[1].tolist() == pytest.approx([value] * 3 + [0.0])
        assert gradient[1] == pytest.approx([slope] * 3 + [0.0])
        assert result.dropped_BT[1, 0] == dropped
        assert not result.dropped_BT[0].any()  # A > 0
    result, gradient = run(tbpo(dual=1.02, band_high=9.0), base, behaviour=base - 0.05)
    assert result.loss_BT[1].tolist() == pytest.approx([1.02] * 3 + [0.0])
    assert gradient[1] == [0.0] * 4


def test_vcpo_caps_the_true_ratio() -> None:
    result, gradient = run(vcpo(), PI, behaviour=MU)
    expected = [[-W[0]] * 4, [W[1]] * 3 + [0.0]]
    assert gradient == near(expected)  # W is detached
    assert result.loss_BT.tolist() == near(expected)
    result, gradient = run(vcpo(), PI, behaviour=PI - 1.0)  # W = e^4 | e^3, capped at 8
    assert gradient == near([[-8.0] * 4, [8.0] * 3 + [0.0]])
    e4, e3 = math.exp(4), math.exp(3)
    assert result.weights_BT.tolist() == near([[e4] * 4, [e3] * 3 + [0.0]])  # reported unclipped


def test_topr_weighs_failures_down_only() -> None:
    result, gradient = run(topr(), PI, behaviour=MU)
    assert gradient == near([[-1.0] * 4, [W[1]] * 3 + [0.0]])
    assert result.loss_BT.tolist() == near(
        [
            [-math.log(p) for p in (0.50, 0.45, 0.55, 0.30)],
            [W[1] * math.log(p) for p in (0.10, 0.35, 0.45)] + [0.0],
        ]
    )
    result, gradient = run(topr(), PI, behaviour=PI - 1.0)
    assert gradient == near([[-1.0] * 4, [1.0] * 3 + [0.0]])
    assert result.weights_BT.tolist() == near([[1.0] * 4, [1.0] * 3 + [0.0]])  # as they act, and not e^3


def test_topr_token_tapers_each_token() -> None:
    result, gradient = run(topr_token(), PI, behaviour=MU)
    assert gradient == near([[-1.0] * 4, [0.25, 1.0, 0.9, 0.0]])
    assert result.loss_BT[1, 0].item() == pytest.approx(0.25 * math.log(0.1))


def test_vespo_fades_on_both_sides() -> None:
    result, gradient = run(vespo(), PI, behaviour=MU)
    weights = [W[0] ** 2 * math.exp(3 * (1 - W[0])), W[1] ** 3 * math.exp(2 * (1 - W[1]))]
    assert gradient == near([[-weights[0]] * 4, [weights[1]] * 3 + [0.0]])
    assert result.loss_BT[1, 2].item() == pytest.approx(weights[1] * math.log(0.45))
    assert result.weights_BT.tolist() == near([[W[0]] * 4, [W[1]] * 3 + [0.0]])
    for step in (1.0, -5.0):  # W = e^4 | e^3, and e^-20 | e^-15
        _, gradient = run(vespo(), PI, behaviour=PI - step)
        assert abs(gradient[0][0]) < 1e-12
        assert abs(gradient[1][0]) < 1e-12

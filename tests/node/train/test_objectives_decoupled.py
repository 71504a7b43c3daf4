"""Two factors, w = pi_old / mu and r = pi / pi_old, on the 2 x 4 tensor of `golden.py`."""

from __future__ import annotations

import math
from statistics import fmean, variance
from typing import Any

import pytest

from node.train.objectives import Level, Objective, Reference
from node.train.objectives.controls.drop import Metric
from node.train.objectives.presets.decoupled import (
    a3po,
    ais,
    decoupled_ppo,
    icepop,
    mis,
    ppo_ewma,
    sparse_rl,
    tis,
)
from tests.node.train.golden import NAN, logs, near, run

PI = logs([[0.55, 0.45, 0.20, 0.30], [0.36, 0.50, 0.22, NAN]])
OLD = logs([[0.50, 0.50, 0.20, 0.20], [0.40, 0.25, 0.20, NAN]])
MU = logs([[0.08, 0.50, 0.50, 0.20], [0.25, 0.10, 0.50, NAN]])
# r = 1.1, 0.9, 1, 1.5 | 0.9, 2, 1.1; clipped surrogates and their gradients:
SURROGATE = [[1.1, 0.9, 1.0, 1.2], [-0.9, -2.0, -1.1]]
SLOPE = [[1.1, 0.9, 1.0, 0.0], [-0.9, -2.0, -1.1]]
W = [[6.25, 1.0, 0.4, 1.0], [1.6, 2.5, 0.4]]


def expect(objective: Objective, weights: list[list[float]], **given: Any) -> None:
    """Loss and gradient are PPO's clip times these weights, negative."""
    result, gradient = run(objective, PI, behaviour=MU, **(given or {"ingestion": OLD}))
    for actual, plain in ((result.loss_BT.tolist(), SURROGATE), (gradient, SLOPE)):
        products = [
            [-w * s for w, s in zip(ws, row, strict=True)] for ws, row in zip(weights, plain, strict=True)
        ]
        assert actual == near([products[0], [*products[1], 0.0]])
    dropped = [[w == 0 for w in row] for row in weights]
    assert result.dropped_BT.tolist() == [dropped[0], [*dropped[1], False]]


def test_decoupled_ppo_weighs_without_bound() -> None:
    expect(decoupled_ppo(), W)
    expect(decoupled_ppo(mask_above=2.0), [[0.0, 1.0, 0.4, 1.0], [1.6, 0.0, 0.4]])


def test_the_exact_and_the_approximate_route_differ_in_who_old_is_only() -> None:
    expect(decoupled_ppo(old=Reference.SNAPSHOT), W, snapshot=OLD)
    expect(decoupled_ppo(old=Reference.EWMA), W, ewma=OLD)


def test_ppo_ewma_is_tis_against_the_average() -> None:
    expect(ppo_ewma(), [[2.0, 1.0, 0.4, 1.0], [1.6, 2.0, 0.4]], ewma=OLD)


def test_tis_levels_and_normalisation() -> None:
    expect(tis(), [[2.0, 1.0, 0.4, 1.0], [1.6, 2.0, 0.4]])
    expect(tis(floor=0.5), [[2.0, 1.0, 0.5, 1.0], [1.6, 2.0, 0.5]])
    # W = 6.25 x 0.4 = 2.5, capped | 1.6 x 2.5 x 0.4 = 1.6
    expect(tis(level=Level.SEQUENCE), [[2.0] * 4, [1.6] * 3])
    mean = (2.0 + 1.0 + 0.4 + 1.0 + 1.6 + 2.0 + 0.4) / 7
    expect(tis(normalise=True), [[w / mean for w in row] for row in [[2.0, 1.0, 0.4, 1.0], [1.6, 2.0, 0.4]]])


def test_icepop_drops_but_keeps_the_denominator() -> None:
    expect(icepop(), [[0.0, 1.0, 0.0, 1.0], [1.6, 2.5, 0.0]])  # 6.25 > 5, 0.4 < 0.5


def test_mis_takes_rejected_tokens_out_of_the_denominator() -> None:
    # 6.25, 0.4 | 2.5, 0.4 are outside [0.5, 2]: three of seven tokens are left
    expect(mis(), [[0.0, 7 / 3, 0.0, 7 / 3], [1.6 * 7 / 3, 0.0, 0.0]])


def test_mis_by_sequence_and_by_divergence() -> None:
    # geometric means: 2.5^(1/4) = 1.257 | 1.6^(1/3) = 1.170
    kept = {"level": Level.SEQUENCE_MEAN, "low": 0.8}
    expect(mis(high=1.2, **kept), [[0.0] * 4, [7 / 3 * w for w in W[1]]])
    expect(mis(high=1.3, **kept), W)
    # k3 = w - 1 - ln w: 3.417, 0, 0.316, 0 | 0.130, 0.584, 0.316; means 0.933 | 0.343, largest 3.417 | 0.584
    k3 = {"metric": Metric.K3}
    expect(mis(high=0.5, **k3), [[0.0, 7 / 5, 0.4 * 7 / 5, 7 / 5], [1.6 * 7 / 5, 0.0, 0.4 * 7 / 5]])
    expect(mis(high=0.9, level=Level.SEQUENCE_MEAN, **k3), [[0.0] * 4, [7 / 3 * w for w in W[1]]])
    expect(mis(high=0.6, level=Level.SEQUENCE_MAX, **k3), [[0.0] * 4, [7 / 3 * w for w in W[1]]])
    # k2 = ln(w)^2 / 2: 1.679, 0, 0.420, 0 | 0.110, 0.420, 0.420
    expect(mis(high=1.0, metric=Metric.K2), [[0.0, 7 / 6, 0.4 * 7 / 6, 7 / 6], [w * 7 / 6 for w in W[1]]])


@pytest.mark.parametrize(
    "objective", [mis(low=0.0, high=10.0), sparse_rl(cap=10.0)], ids=["mis", "sparse_rl"]
)
def test_one_token_that_the_trainer_never_writes_vetoes_its_rollout(objective: Objective) -> None:
    old = OLD.clone()
    old[1, 1] = MU[1, 1] + math.log(0.9e-4)
    result, gradient = run(objective, old, behaviour=MU, ingestion=old)
    assert gradient[1] == [0.0] * 4
    assert result.dropped_BT[1].tolist() == [True, True, True, False]
    old[1, 1] = MU[1, 1] + math.log(1.1e-4)
    result, gradient = run(objective, old, behaviour=MU, ingestion=old)
    assert gradient[1] == pytest.approx([1.6, 1.1e-4, 0.4, 0.0])


def test_sparse_rl() -> None:
    expect(sparse_rl(), [[2.0, 1.0, 0.4, 1.0], [1.6, 2.0, 0.4]])


def test_mis_with_rollout_means_rescales_inside_rollouts_and_over_them() -> None:
    from node.train.objectives import Aggregation

    # two of four tokens, one of three; both rollouts are left
    expect(
        mis(aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN),
        [[0.0, 2.0, 0.0, 2.0], [1.6 * 3.0, 0.0, 0.0]],
    )
    # 2.5 and 1.6 against a bound of 2: one of two rollouts is left, whole
    expect(
        mis(low=0.0, level=Level.SEQUENCE, aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN),
        [[0.0] * 4, [2.0 * w for w in W[1]]],
    )


def test_a3po_interpolates_by_lag() -> None:
    lags = [[0.0, 1.0, 2.0, 4.0], [2.0, 2.0, 1.0, NAN]]
    pi = logs([[0.50, 0.45, 0.32, 0.162], [0.36, 0.09, 0.22, NAN]])
    mu = logs([[0.40, 0.50, 0.50, 0.500], [0.25, 0.25, 0.20, NAN]])
    # a = 0, 0, 1/2, 3/4 | 1/2, 1/2, 0;  rho = 1.25, 0.9, 0.64, 0.324 | 1.44, 0.36, 1.1
    # w = rho^a = 1, 1, 0.8, ... | 1.2, 0.6, 1;  r = rho^(1-a) = 1.25, 0.9, 0.8, ... | 1.2, 0.6, 1.1
    w, r = 0.324**0.75, 0.324**0.25
    result, gradient = run(a3po(), pi, behaviour=mu, lags=lags)
    assert result.loss_BT.tolist() == near([[-1.2, -0.9, -0.64, -w * r], [1.2 * 1.2, 0.6 * 0.8, 1.1, 0.0]])
    assert gradient == near([[0.0, -0.9, -0.64, -w * r], [1.44, 0.0, 1.1, 0.0]])


def test_ais_mixes_by_what_the_batch_says() -> None:
    w, a = [6.25, 1.0, 0.4, 1.0, 1.6, 2.5, 0.4], [1.0] * 4 + [-1.0] * 3
    ess = sum(w) ** 2 / (7 * sum(each**2 for each in w))
    k3 = fmean(each - 1 - math.log(each) for each in w)
    inflation = variance([x * y for x, y in zip(w, a, strict=True)]) / variance(a)
    strength = ess * (1 - math.exp(-k3 / 0.5)) / max(1.0, inflation)
    assert 0 < strength < 1
    expect(ais(kappa=0.5), [[1 + strength * (each - 1) for each in row] for row in W])


def test_without_mismatch_ais_does_nothing() -> None:
    _, gradient = run(ais(), PI, behaviour=PI)
    assert gradient == near([[-1.0] * 4, [1.0, 1.0, 1.0, 0.0]])

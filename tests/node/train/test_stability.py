"""Verdicts on updates from numbers alone: each sign, its limit, and how often in a row."""

from __future__ import annotations

import math
from typing import Any

import pytest

from node.config import SuperviseConfig
from node.train import stability
from node.train.stability import Alarm, Sign, StepSigns, Watch
from protocol.errors import LocalProtocolError

LIMITS = SuperviseConfig(kl_step=0.5, ess=0.1, grad_norm=10.0, in_a_row=3)
"""With the usual norm being the median of five good steps, of three at least (`few_norms`)."""
GOOD = StepSigns(grad_norm=1.0, ess=0.9, kl_step=0.01)


@pytest.fixture(autouse=True)
def few_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stability, "NORMS", 5)
    monkeypatch.setattr(stability, "NORMS_NEEDED", 3)


def signs(**changed: Any) -> StepSigns:
    return StepSigns(**{"grad_norm": 1.0, "ess": 0.9, "kl_step": 0.01, **changed})


def alarm(found: Alarm | None) -> Alarm:
    assert found is not None
    return found


def test_a_step_that_moves_too_far_is_bad_and_says_by_how_much() -> None:
    found = alarm(Watch(LIMITS).step(signs(kl_step=0.75)))
    assert (found.sign, found.value, found.limit, found.in_a_row) == (Sign.KL_STEP, 0.75, 0.5, 1)
    assert found.text == "one step moved the policy by 0.75 nats per token (limit 0.5)"


@pytest.mark.parametrize(
    "fine",
    [
        signs(kl_step=0.5),
        signs(ess=0.1),
        signs(ess=0.0),  # nothing had a weight, so nothing made the step
        signs(kl_step=None, ess=None),
        signs(grad_norm=1e9),  # nothing is usual yet
    ],
)
def test_at_a_limit_or_without_a_measurement_nothing_is_bad(fine: StepSigns) -> None:
    assert Watch(LIMITS).step(fine) is None


def test_a_divergence_that_is_no_number_is_bad() -> None:
    assert alarm(Watch(LIMITS).step(signs(kl_step=math.nan))).sign is Sign.KL_STEP


def test_few_tokens_that_make_a_step_are_bad() -> None:
    found = alarm(Watch(LIMITS).step(signs(ess=0.04)))
    assert (found.sign, found.value, found.limit) == (Sign.ESS, 0.04, 0.1)
    assert found.text == "the effective sample size was 0.04 of the tokens (limit 0.1)"


def test_a_norm_far_above_the_usual_is_bad() -> None:
    """Of 1, 3, 2 the median is 2 and the limit 20."""
    watch = Watch(LIMITS)
    assert [watch.step(signs(grad_norm=norm)) for norm in (1.0, 3.0, 2.0, 20.0)] == [None] * 4
    found = alarm(watch.step(signs(grad_norm=26.0)))  # now of 1, 2, 3, 20: 2.5, and 25
    assert (found.sign, found.value, found.limit) == (Sign.GRAD_NORM, 26.0, 25.0)
    assert found.text == "the gradient norm was 26 where 2.5 is usual (limit 25)"


def test_bad_norms_and_zeros_do_not_become_usual() -> None:
    watch = Watch(LIMITS)
    for norm in (1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0):
        assert watch.step(signs(grad_norm=norm)) is None
    for _ in range(8):
        assert alarm(watch.step(signs(grad_norm=11.0))).limit == 10.0
        assert watch.step(signs(grad_norm=0.0)) is None


def test_old_norms_are_forgotten() -> None:
    """After five of 50 the first ones are gone, and 400 is less than ten times 50."""
    watch = Watch(LIMITS)
    for norm in (1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 50.0, 50.0, 50.0, 50.0, 50.0):
        assert watch.step(signs(grad_norm=norm)) is None
    assert watch.step(signs(grad_norm=400.0)) is None


def test_the_third_in_a_row_ends_the_run_and_a_good_step_starts_anew() -> None:
    watch = Watch(LIMITS)
    bad = signs(kl_step=9.0)
    ends = [watch.ends_run(alarm(watch.step(bad))) for _ in range(2)]
    assert watch.step(GOOD) is None
    ends += [watch.ends_run(alarm(watch.step(bad))) for _ in range(3)]
    assert ends == [False, False, False, False, True]


def test_norms_that_stay_large_at_the_same_weights_are_usual_there_and_end_nothing() -> None:
    watch = Watch(LIMITS)
    for _ in range(3):
        assert watch.step(GOOD) is None
    large = [watch.step(signs(grad_norm=27.0)) for _ in range(3)]
    assert [alarm(each).in_a_row for each in large] == [1, 2, 3]
    assert not any(watch.ends_run(alarm(each)) for each in large)
    assert [watch.step(signs(grad_norm=norm)) for norm in (27.0, 30.0, 25.0, 200.0)] == [None] * 4
    assert alarm(watch.step(signs(grad_norm=300.0))).limit == 285.0  # of 25, 27, 30, 200: 28.5


def test_a_probe_that_is_surely_worse_is_bad() -> None:
    """32 prompts, 16 of which go from 1 to 0: a mean loss of 0.5, deviation 0.508. One-sided 99 % with 31
    degrees of freedom: 2.4528 deviations of the mean, so at least 0.5 - 2.4528 x 0.0898 = 0.2797."""
    watch = Watch(SuperviseConfig(probe_tolerance=0.05))
    assert watch.probe([1.0] * 32) is None
    found = alarm(watch.probe([0.0, 1.0] * 16))
    assert (found.sign, found.limit) == (Sign.PROBE_REWARD, 0.05)
    assert found.value == pytest.approx(0.2797, abs=1e-3)
    assert found.text.startswith("the probe's mean reward fell by 0.5000 over 32 prompts, at least 0.27")


def test_a_probe_within_the_tolerance_or_the_noise_is_good() -> None:
    assert Watch(SuperviseConfig(probe_tolerance=0.3)).probe([1.0] * 32) is None
    watch = Watch(SuperviseConfig(probe_tolerance=0.3))
    assert [watch.probe([1.0] * 32), watch.probe([0.0, 1.0] * 16)] == [None, None]
    noisy = Watch(SuperviseConfig())
    assert noisy.probe([1.0] * 32) is None
    assert noisy.probe([0.0] * 2 + [1.0] * 30) is None  # 0.0625 - 2.4528 x 0.0435 is below 0


def test_a_probe_is_held_against_the_last_good_one() -> None:
    watch = Watch(SuperviseConfig())
    good, bad = [1.0] * 32, [0.0] * 32
    assert watch.probe(good) is None
    assert alarm(watch.probe(bad)).in_a_row == 1
    assert watch.step(GOOD) is None  # good steps between do not excuse it
    assert watch.ends_run(alarm(watch.probe(bad))) is False
    assert watch.ends_run(alarm(watch.probe(bad)))
    assert watch.probe(good) is None
    assert alarm(watch.probe(bad)).in_a_row == 1


def test_too_few_prompts_say_nothing_and_other_ones_are_our_mistake() -> None:
    watch = Watch(SuperviseConfig())
    assert [watch.probe([1.0] * 8), watch.probe([0.0] * 8)] == [None, None]
    with pytest.raises(LocalProtocolError, match="a probe of 9 prompts"):
        watch.probe([1.0] * 9)
    with pytest.raises(LocalProtocolError, match="not finite"):
        Watch(SuperviseConfig()).probe([math.nan] * 16)


def test_limits_can_be_turned_off() -> None:
    watch = Watch(SuperviseConfig(kl_step=0.0, ess=0.0, grad_norm=0.0))
    for _ in range(3):
        assert watch.step(signs(kl_step=1e9, ess=1e-9, grad_norm=1e9)) is None

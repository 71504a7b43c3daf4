"""Strength is what was measured, wall by wall, and the sentence says what is missing."""

from __future__ import annotations

import sys

import pytest

from node.environment.host import FailureReason, HostFailure, ScoredGroup
from node.environment.records import Completion
from node.sandbox.host import SandboxedHost
from node.sandbox.records import ForkResult, ForkStatus, Layer, ProbeRequest, Trial
from node.sandbox.strength import SandboxReport, SandboxStrength, describe, measure
from protocol.messages import EnvironmentSpec
from tests.asking import scored

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


def measured(breached: set[Trial], layers: tuple[Layer, ...] = tuple(Layer)) -> SandboxReport:
    def ask(request: ProbeRequest) -> ForkResult:
        payload = b"breached" if request.trial in breached else b"held: PermissionError"
        return ForkResult(0, 0, ForkStatus.DONE, "", payload)

    return measure(ask, layers, ())


def test_strong_needs_every_trial_and_both_walls() -> None:
    assert measured(set()).strength is SandboxStrength.STRONG
    assert measured(set(), (Layer.SECCOMP, Layer.LANDLOCK)).strength is SandboxStrength.PARTIAL
    assert measured({Trial.WRITE_FILE}).strength is SandboxStrength.PARTIAL


@pytest.mark.parametrize(
    "trial", [Trial.CONNECT, Trial.READ_SECRET, Trial.READ_ENVIRONMENT, Trial.SIGNAL_NODE]
)
def test_one_vital_breach_is_weak(trial: Trial) -> None:
    report = measured({trial})
    assert report.strength is SandboxStrength.WEAK
    assert not report.may_evaluate
    assert "refused" in describe(report)


@pytest.mark.parametrize(
    "result",
    [
        None,
        ForkResult(0, 0, ForkStatus.CRASHED, "exit status 1", b""),
        ForkResult(0, 0, ForkStatus.TIMEOUT, "", b""),
        ForkResult(0, 0, ForkStatus.DONE, "", b""),
    ],
)
def test_silence_is_not_a_wall(result: ForkResult | None) -> None:
    assert measure(lambda _: result, tuple(Layer), ()).holds == ()


@linux_only
@pytest.mark.slow
def test_this_machine() -> None:
    """A container without namespaces may be weaker, but never claims more than was measured."""
    with SandboxedHost(()) as scorer:
        report = scorer.report
    assert set(report.holds).isdisjoint(report.fails)
    if Layer.NAMESPACES in report.layers and Layer.SECCOMP in report.layers:
        assert report.strength is SandboxStrength.STRONG, describe(report)


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "strength"),
    [
        ((Layer.NAMESPACES,), SandboxStrength.PARTIAL),
        ((Layer.LANDLOCK, Layer.SECCOMP), SandboxStrength.PARTIAL),
        ((), SandboxStrength.WEAK),
    ],
)
def test_fewer_walls(layers: tuple[Layer, ...], strength: SandboxStrength) -> None:
    with SandboxedHost((), layers=layers) as scorer:
        report = scorer.report
    if absent := set(layers) - set(report.layers):
        pytest.skip(f"this machine does not offer {sorted(absent)}: {report.missing}")
    assert report.strength is strength, describe(report)


@linux_only
@pytest.mark.slow
def test_weak_scores_text_but_refuses_to_evaluate() -> None:
    specs = [EnvironmentSpec(f"reasoning_gym/{task}") for task in ("countdown", "spell_backward")]
    with SandboxedHost(specs, layers=()) as scorer:
        refused = scored(scorer, specs[0].name, 0, [Completion("1 + 1", True)])
        assert isinstance(refused, HostFailure)
        assert refused.reason is FailureReason.REFUSED
        assert not refused.reason.is_authors_fault
        assert isinstance(scored(scorer, specs[1].name, 0, [Completion("abc", True)]), ScoredGroup)

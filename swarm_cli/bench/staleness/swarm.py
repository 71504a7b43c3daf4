"""One run of a small swarm: unlike policies learn the same tasks, alone or also from each other's rollouts.

For: whether foreign rollouts help, and by which objective, against both baselines: alone with as many own
groups a step, and alone with as many own groups as a sharing node has in all, which costs twice the
generation. Every policy learns; held-out reward is the mean over them. Rollouts are fresh, so that only the
difference of the policies counts. Own groups are trained on with one objective throughout, the product's
default unless told otherwise; but a variant that is one preset on everything uses it for them, too.

Where a method needs both nodes' answers to one prompt (`hacpo`, `graft`), both answer the same prompts, as
they do for `compat_shared`, to be compared with those; else each has its own. GRAFT's gate decides for every
prompt whether the foreign group replaces the own one. A foreign group without any advantage is left out, as
in a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import msgspec
import numpy as np

from node.rollout.policy import Policy
from node.state.paths import bundled
from node.train.objectives import open_objective
from node.train.settings import TrainSettings
from node.train.step import Trainer
from node.weight.advantage.numbers import has_signal
from node.weight.batch import collate
from node.weight.groups import OWN_SOURCE, TrainingGroup, TrainingRollout
from node.weight.settings import Treatment, WeightSettings
from node.weight.treatment import open_treatments
from swarm_cli.bench.staleness.answers import Answered, Answers
from swarm_cli.bench.staleness.buffer import Place
from swarm_cli.bench.staleness.ledger import Job
from swarm_cli.bench.staleness.tasks import open_tasks

__all__ = ["BASELINES", "SWARM", "VARIANTS", "Swarm", "SwarmResult", "run_swarm"]


@dataclass(frozen=True)
class Variant:
    """How a node makes its batch."""

    own_groups: int
    foreign: str | None = None
    """The preset that foreign groups are trained on with."""
    shared: bool = False
    """All nodes answer the same prompts."""
    everything: bool = False
    """Own groups are trained on with that preset, too."""


VARIANTS: Mapping[str, Variant] = {
    "solo_4": Variant(4),
    "solo_8": Variant(8),
    "swarm_sapo": Variant(4, "swarm_sapo"),
    "dppo_tv": Variant(4, "dppo_tv", everything=True),
    "topr": Variant(4, "topr", everything=True),
    "compat": Variant(4, "compat"),
    "compat_shared": Variant(4, "compat", shared=True),
    "hacpo": Variant(4, "hacpo", shared=True),
    "graft": Variant(4, "graft", shared=True),
}
BASELINES = ("solo_4", "solo_8")

_MAX_PROMPTS = 1024
"""Prompts of one step, at most."""
_TREATMENTS = {"hacpo": Treatment.HACPO, "graft": Treatment.GRAFT}
"""Presets that a treatment has by default; any other takes the place of `compat`."""


class Swarm(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is."""

    variant: str
    seed: int
    learning_rate: float
    steps: int
    objective: str
    """Preset of the own groups."""
    policies: tuple[str, ...] = ("wren", "starling")
    group_size: int = 8
    evaluate_every: int = 16
    warmup_steps: int = 5


class SwarmResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    curve: tuple[tuple[int, float], ...]
    """Mean over the policies."""
    curves: tuple[tuple[float, ...], ...]
    """Heights of each policy's."""
    foreign_groups: float
    """That entered a batch, mean over steps and nodes."""
    kept: float
    """Share of foreign tokens whose gradient counted; 0 without any."""
    skipped: int


class _Node:
    """One policy of the swarm."""

    def __init__(self, number: int, settings: Swarm) -> None:
        variant = VARIANTS[settings.variant]
        self.name = settings.policies[number]
        self._first = 0 if variant.shared else number * variant.own_groups
        self._own_groups = variant.own_groups
        self.policy = Policy.open(bundled(f"models/{self.name}"))
        self.train = _train_settings(settings, variant)
        self.trainer = Trainer(self.policy, self.train)
        self.answers = Answers(
            self.policy,
            open_tasks(),
            seed=settings.seed,
            group_size=settings.group_size,
            salt=number,
        )
        self._treatments = open_treatments(self.train.weight)
        self._step = 0
        self.answered: list[Answered] = []

    def generate(self, step: int) -> None:
        """Answer this step's prompts."""
        places = [Place(step, self._first + number) for number in range(self._own_groups)]
        self.answered = self.answers.answer(self.trainer.learning(), places, step)
        self._step = step

    def groups(self, others: Sequence[_Node]) -> list[TrainingGroup]:
        """Own groups, then others' as this node trains on them. Prompts of a step are told apart by their
        place; all nodes have the same where they are shared."""
        groups = [
            TrainingGroup(
                source=OWN_SOURCE,
                group=f"own {number}",
                prompt=self._prompt(number),
                prompt_ids=tuple(each.prompt),
                rollouts=each.rollouts(),
                rewards=each.rewards,
            )
            for number, each in enumerate(self.answered)
        ]
        groups += [
            TrainingGroup(
                source=other.name,
                group=f"{other.name} {number}",
                prompt=other._prompt(number),
                prompt_ids=tuple(self.answers.prompt(theirs.question)),
                rollouts=self._read(theirs, other.policy),
                rewards=theirs.rewards,
            )
            for other in others
            for number, theirs in enumerate(other.answered)
        ]
        return self._treatments.treat(groups)

    def _prompt(self, number: int) -> int:
        return self._step * _MAX_PROMPTS + self._first + number

    def _read(self, answered: Answered, author: Policy) -> tuple[TrainingRollout, ...]:
        if author.tokenizer_digest == self.policy.tokenizer_digest:
            return answered.rollouts()
        return tuple(
            TrainingRollout(
                np.asarray(self.policy.encode_completion(author.decode(each.tokens.tolist()), each.finished)),
                float(each.logprobs.sum(dtype=np.float64)),
            )
            for each in answered.drawn
        )


def run_swarm(settings: Swarm) -> SwarmResult:
    """One run. Raises ConfigError, ModelError."""
    variant = VARIANTS[settings.variant]
    nodes = [_Node(number, settings) for number in range(len(settings.policies))]
    heights: list[list[float]] = []
    foreign_groups: list[int] = []
    kept: list[float] = []
    for step in range(settings.steps):
        if step % settings.evaluate_every == 0:
            heights.append([node.answers.held_out(node.trainer.learning()) for node in nodes])
        for node in nodes:
            node.generate(step)
        for node in nodes:
            others = [other for other in nodes if other is not node] if variant.foreign else []
            groups = _gated(node.groups(others), variant)
            report = node.trainer.step(collate(groups, node.train.weight, node.policy))
            foreign_groups.append(sum(group.source != OWN_SOURCE for group in groups))
            kept.extend(each.kept for each in report.sources if each.source != OWN_SOURCE)
    heights.append([node.answers.held_out(node.trainer.learning()) for node in nodes])
    marks = [*range(0, settings.steps, settings.evaluate_every), settings.steps]
    return SwarmResult(
        curve=tuple((at, fmean(each)) for at, each in zip(marks, heights, strict=True)),
        curves=tuple(zip(*heights, strict=True)),
        foreign_groups=fmean(foreign_groups),
        kept=fmean(kept) if kept else 0.0,
        skipped=sum(node.trainer.skipped_steps for node in nodes),
    )


def _gated(groups: Sequence[TrainingGroup], variant: Variant) -> list[TrainingGroup]:
    """Of all groups of a step those to train on: with GRAFT, foreign ones only in place of own ones that
    failed."""
    if variant.foreign != "graft":
        return list(groups)
    own = [group for group in groups if group.source == OWN_SOURCE]
    failed = {group.prompt for group in own if not any(group.rewards)}
    gated = [
        group
        for group in groups
        if group.source != OWN_SOURCE and group.prompt in failed and has_signal(group.rewards)
    ]
    replaced = {group.prompt for group in gated}
    # A node trains on something of its own, also where all of its groups have failed.
    return [*([group for group in own if group.prompt not in replaced] or own), *gated]


def _train_settings(settings: Swarm, variant: Variant) -> TrainSettings:
    """Each treatment has an objective of its own; without foreign groups none but the own one is used."""
    name = variant.foreign or "compat"
    force = Treatment.OWN if variant.everything else _TREATMENTS.get(name, Treatment.COMPAT)
    plain = TrainSettings(
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        measure_start_kl=False,
        own=open_objective(name if variant.everything else settings.objective),
        weight=WeightSettings(force=force, local_groups=variant.own_groups),
    )
    return replace(plain, compat=open_objective(name)) if force is Treatment.COMPAT else plain


SWARM = Job("swarm", run_swarm, Swarm, SwarmResult)

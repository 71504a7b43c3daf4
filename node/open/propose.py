"""Rules of a new swarm, proposed from what its policies did on a few questions of its tasks.

    Sample of each policy --propose--> value and reason of each key of the charter
                          --warnings-> what speaks against founding it at all

Pure: the figures come from `node/open/sample.py`, the text goes to `node/open/draft.py`. A proposal is where
to begin from, and the reasons say what it stands on, so that a founder can judge it. Not for the recipe of
one node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

__all__ = ["Choice", "Sample", "TaskSample", "percentile", "propose", "warnings"]

GROUP, LARGE_GROUP = 8, 16
FEW_ENDED = 0.5
"""With a smaller share of answers that ended, their lengths say little about the others."""
FEW_MIXED = 0.25
"""With a smaller share of mixed groups, groups get large."""
MARGIN = 1.25
"""Room above the 95th percentile: a policy that learns does not always get shorter."""
GROUPS_A_WINDOW = 32
"""Of the slowest policy here: about eight steps of four own groups."""
WINDOW_S = (8, 600)
"""Shortest and longest. Six of the longest are the hour that an envelope may live."""
SLOTS = (64, 256)
SPARE_SLOTS = 3
"""So many times what the fastest policy answers here in a window, for faster machines."""
UNMEASURED_TOKENS, UNMEASURED_WINDOW_S, UNMEASURED_SLOTS = 256, 60, 96
SKIPS, MOST_SKIPS = 0.5, 0.9


@dataclass(frozen=True)
class TaskSample:
    """Answers of one policy to questions of one task."""

    environment: str
    answers: int
    """Sampled, all groups together."""
    lengths: tuple[int, ...]
    """Tokens of those that ended by themselves, end token included."""
    groups: int
    """Questions whose answers have scores."""
    mixed: int
    """Groups whose rewards differ."""
    reward: float
    """Mean over all scored answers."""
    paid: tuple[int, ...] = ()
    """Tokens of those with a reward above 0."""
    lost: int = 0
    """Questions that gave no group: the task failed on them, or on an answer."""

    @property
    def finished(self) -> float:
        """Share of answers that ended by themselves."""
        return len(self.lengths) / self.answers if self.answers else 0.0


@dataclass(frozen=True)
class Sample:
    """What one policy did."""

    model: str
    tasks: tuple[TaskSample, ...]
    cap: int
    """Most tokens that an answer could have."""
    tokens_per_s: float
    """Of this machine's embedded engine, which did nothing else."""
    late: int = 0
    """Answers that were under way when time was up."""


@dataclass(frozen=True)
class Choice:
    """The value of one key of the charter, and why."""

    value: int | float
    why: str


def propose(samples: Sequence[Sample], max_tokens: int = UNMEASURED_TOKENS) -> Mapping[str, Choice]:
    """Sampling and windows by key of the charter, in its order; answers of `max_tokens` without samples."""
    tasks = [task for sample in samples for task in sample.tasks]
    tokens = _tokens(samples, max_tokens)
    size = _group_size(tasks)
    return {
        "group_size": size,
        "max_new_tokens": tokens,
        **_windows([_groups_per_s(sample, int(size.value), int(tokens.value)) for sample in samples]),
        "max_skip_share": _skips(tasks),
    }


def warnings(samples: Sequence[Sample]) -> list[str]:
    """A sentence for each policy and task that would learn nothing, as far as the sample can tell."""
    said = []
    for sample in samples:
        if sample.late:
            of = sum(task.answers for task in sample.tasks)
            said.append(
                f"time was up with {sample.late} of {of} answers of {sample.model} under way, which count as "
                "cut: give more with --within, or ask less with --sample and --max-tokens"
            )
        for task in sample.tasks:
            what = f"the answers of {sample.model} to {task.environment}"
            if not task.lengths:
                said.append(
                    f"none of {what} ended within {sample.cap} tokens, and answers that are cut are hardly "
                    "paid: take a model that ends its answers, or let them be longer with --max-tokens"
                )
            elif not task.mixed and task.reward <= 0:
                said.append(
                    f"none of {what} is worth anything, so nothing is learnt from them: set the task easier, "
                    'or say by its key "answer" ("last_number", "tags") where an answer stands in a text'
                )
            elif not task.mixed:
                said.append(
                    f"{what} are worth {task.reward:.2f}, all of a group alike, so nothing is learnt from "
                    "them: set the task harder"
                )
    return said


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest value that `share` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _tokens(samples: Sequence[Sample], max_tokens: int) -> Choice:
    if not samples:
        return Choice(max_tokens, "not measured")
    tasks = [task for sample in samples for task in sample.tasks]
    most = min(sample.cap for sample in samples)
    fewest = min(tasks, key=lambda task: task.finished)
    if fewest.finished < FEW_ENDED:
        told = (
            f"{len(fewest.lengths)} of {fewest.answers} answers to {fewest.environment} ended by themselves"
        )
        return Choice(most, f"only {told}")
    ended = [task.lengths for task in tasks]
    low = min(percentile(lengths, 0.05) for lengths in ended)
    high = max(percentile(lengths, 0.95) for lengths in ended)
    value = min(most, math.ceil(MARGIN * high))
    need = f"{low} to {high}" if low < high else str(high)
    paid = [each for task in tasks for each in task.paid]
    told = f"; half of those that were paid at most {percentile(paid, 0.5)}" if paid else ""
    return Choice(value, f"answers need {need} tokens, end token included{told}")


def _group_size(tasks: Sequence[TaskSample]) -> Choice:
    groups, mixed = sum(task.groups for task in tasks), sum(task.mixed for task in tasks)
    if not groups:
        return Choice(GROUP, "answers to one question; not measured")
    few = mixed < FEW_MIXED * groups
    told = f"{mixed} of {groups} questions are mixed with {GROUP} answers, and only mixed ones teach"
    return Choice(LARGE_GROUP, f"{told}; more answers mix more") if few else Choice(GROUP, told)


def _groups_per_s(sample: Sample, group_size: int, max_new_tokens: int) -> float:
    """How fast this policy would make groups of these rules: answers are cut earlier than in the sample."""
    lengths: list[int] = []
    for task in sample.tasks:
        lengths += [min(each, max_new_tokens) for each in task.lengths]
        lengths += [max_new_tokens] * (task.answers - len(task.lengths))
    return sample.tokens_per_s / (group_size * fmean(lengths)) if lengths else 0.0


def _windows(rates: Sequence[float]) -> dict[str, Choice]:
    """Length of a window by the slowest, slots by the fastest of `rates`, groups a second."""
    known = [rate for rate in rates if rate > 0]
    window_s, slots, told = UNMEASURED_WINDOW_S, UNMEASURED_SLOTS, "not measured"
    if known:
        window_s = _rounded(min(max(GROUPS_A_WINDOW / min(known), WINDOW_S[0]), WINDOW_S[1]))
        slots = min(max(32 * math.ceil(SPARE_SLOTS * max(known) * window_s / 32), SLOTS[0]), SLOTS[1])
        spread = f"{min(known):.3g}" + (f" to {max(known):.3g}" if len(known) > 1 else "")
        told = f"this machine makes {spread} groups a second while it does nothing else"
    return {
        "window_ms": Choice(1000 * window_s, told),
        "pool_size": Choice(
            2 * slots, "prompts of one window: twice the slots, so that peers often share one"
        ),
        "slots_per_window": Choice(
            slots, "prompts of one member in a window; whoever is through with them waits for the next"
        ),
    }


def _rounded(seconds: float) -> int:
    """Up, to whole seconds below a minute and to tens above."""
    return math.ceil(seconds) if seconds < 60 else 10 * math.ceil(seconds / 10)


def _skips(tasks: Sequence[TaskSample]) -> Choice:
    lost, asked = sum(task.lost for task in tasks), sum(task.lost + task.groups for task in tasks)
    told = "of the slots up to the highest that is answered, so many may be missing"
    if not lost:
        return Choice(SKIPS, told)
    value = min(MOST_SKIPS, round(SKIPS + lost / asked, 2))
    return Choice(value, f"{told}; {lost} of {asked} questions gave no scored answers here")

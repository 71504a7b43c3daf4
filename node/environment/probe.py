"""What a task pays for nothing: senseless texts, and one and the same answer to every question.

For whoever founds a swarm, before others train on it: a task whose scorer pays any text teaches nothing, and
one that a constant answers half of the time teaches little else. Questions are the task's own, answers a
fixed set; no policy takes part. Not for members: the charter was agreed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from node.environment.guard import guarded_score
from node.environment.tasks import Completion, Environment

__all__ = ["PAID", "Probe", "probe"]

QUESTIONS = 24
SENSELESS = ("zzz", "<think>", "lorem ipsum dolor", "?!")
CONSTANTS = ("0", "1", "2", "10", "True", "False", "Yes", "No", "A", "B", "[]", "[[0]]", "none", "impossible")
PAID = 0.5
"""Mean reward from which on it matters."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a task paid, means over QUESTIONS questions."""

    senseless: float
    """The least of all senseless texts: what any text gets."""
    constant: float
    """The most of all constant answers."""
    best: str
    """That answer."""

    @property
    def pays_anything(self) -> bool:
        return self.senseless >= PAID


def probe(environment: Environment) -> Probe:
    """Score the fixed answers on questions of seeds 0, 1, ...; those on which the task fails are left out.
    Blocking. Zeros where it has no question at all."""
    prompts = []
    for seed in range(QUESTIONS):
        try:
            prompts.append(environment.prompt(seed, 0))
        except Exception:  # noqa: S112  (of a third party's code; told where questions are derived)
            continue

    def paid(texts: Sequence[str]) -> dict[str, float]:
        return {
            text: fmean(
                guarded_score(environment, prompt, Completion(text, finished=True))[0].reward
                for prompt in prompts
            )
            for text in texts
        }

    if not prompts:
        return Probe(0.0, 0.0, "")
    constants = paid(CONSTANTS)
    best = max(constants, key=lambda text: constants[text])
    return Probe(min(paid(SENSELESS).values()), constants[best], best)

"""What a task pays for nothing: senseless texts, and one and the same answer to every question.

For whoever founds a swarm, before others train on it: a task whose scorer pays any text teaches nothing, and
one that a constant answers half of the time teaches little else. Questions are the task's own, answers a
fixed set; no policy takes part. Not for members: the charter was agreed on.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from node.environment.host import Answers, HostFailure, TaskHost
from node.environment.records import Completion

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


def probe(host: TaskHost, environment: str) -> Probe:
    """Score the fixed answers on questions of seeds 0, 1, ...; those on which the task fails are left out,
    and an answer that has no score is worth nothing. Blocking. Zeros where it has no question at all, or its
    answers may not be scored here."""
    questions = host.questions(environment, range(QUESTIONS))
    texts = (*SENSELESS, *CONSTANTS)
    answers = tuple(Completion(text, finished=True) for text in texts)
    asked = [seed for seed, text in enumerate(questions) if isinstance(text, str)]
    scored = host.score([Answers(environment, seed, answers) for seed in asked])
    rewards = [(0.0,) * len(texts) if isinstance(each, HostFailure) else each.rewards for each in scored]
    if not rewards:
        return Probe(0.0, 0.0, "")
    paid = dict(zip(texts, map(fmean, zip(*rewards, strict=True)), strict=True))
    best = max(CONSTANTS, key=lambda text: paid[text])
    return Probe(min(paid[text] for text in SENSELESS), paid[best], best)

"""A task's own failures stay its own: whatever scoring raises or returns is a score, and a fault at most.

Scorers are third parties' code on a policy's text; they raise, return None, NaN or text now and then. Such a
completion is worth nothing, the same on every machine, and the fault is told once with the task's name. Not
for what never returns: that has limits in the sandbox.
"""

from __future__ import annotations

import math

from node.environment.records import Completion, Environment, Prompt, Score

__all__ = ["MAX_REWARD", "guarded_question", "guarded_score"]

MAX_REWARD = 1e3
"""Far above what any task pays; advantages of larger ones would mean nothing."""
NOTHING = Score(reward=0.0, components=())


def guarded_question(environment: Environment, seed: int) -> str | None:
    """The question of a seed; None where the environment fails on it, which it does on every machine."""
    try:
        text = environment.prompt(seed, 0).text
        return text if isinstance(text, str) and text.encode() else None
    except Exception:  # of a third party's code, which is told where no seed has a question
        return None


def guarded_score(environment: Environment, prompt: Prompt, completion: Completion) -> tuple[Score, str]:
    """The score, and what was wrong with it, "" for nothing."""
    try:
        score = environment.score(prompt, completion)
        if not isinstance(score, Score):
            return NOTHING, f"it returned a {type(score).__name__} instead of a Score"
        if not _is_number(score.reward) or abs(score.reward) > MAX_REWARD:
            return NOTHING, f"it returned the reward {score.reward!r:.40}"
        components = tuple((str(name), float(value)) for name, value in score.components if _is_number(value))
        return Score(reward=float(score.reward), components=components), ""
    except Exception as error:  # of a third party's code, on a text that nobody has seen before
        return NOTHING, f"it raised {type(error).__name__}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

"""Where in a completion the answer stands: the reserved key `answer` of an environment's config.

A policy that was trained on nothing but the tasks says the answer and no more (`whole`). An instruct model
talks: it is told how to give the answer, and only that part of its completion is scored. The rule stands in
the charter, so every member asks the same question and scores the same part; own and strangers' completions
take this one path. Extraction is linear in the text, but for patterns that are not, and never judges: what it
finds goes to the scorer. It runs in the sandbox, which ends what takes too long.

MEASURED on SmolLM2-135M-Instruct, T=1, 48 new tokens: share of groups of 8 with mixed rewards, the ones that
teach something. Numbers of one digit; 32 prompts for the first two of the upper row, 6 to 16 for the others.

                                 chain_sum  products  gcd  letter_counting  basic_arithmetic  leg_counting
    last number, told to be brief   .47       .56     .38        .38              .25             .12
    last number, not told           .56       .56     .38        .25              .25              -
    tags                            0         0       0           -                -               -
    whole                           0         0       0          0                0               0

Told to be brief, it ends by itself more often (.80 of chain_sum, against .68), and only finished answers are
paid. Sums of two digits gave no mixed group, nor did words and lists (spelling backward, sorting) as a whole.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["ANSWER_KEY", "AnswerKind", "AnswerRule", "answer_rule"]

ANSWER_KEY = "answer"
"""Reserved in the config of every environment; the environment itself never sees it."""

MAX_PATTERN_CHARS = 200
_OPEN, _CLOSE = "<answer>", "</answer>"
_BOX = "\\boxed{"
_CHOICES = re.compile(r"(?<![A-Za-z0-9_'])[A-J](?![A-Za-z0-9_'])", re.ASCII)
_NUMBERS = re.compile(r"(?:(?<![\w.)])-)?\d+(?:,\d+)*(?:\.\d+)?", re.ASCII)
"""One number, or several with nothing but commas between them; the minus of `7-3` is no sign."""
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)


class AnswerKind(StrEnum):
    """How the answer is given."""

    WHOLE = "whole"
    """The completion is the answer; the question is left as it is."""
    LAST_NUMBER = "last_number"
    """The last number that is said. For small models, which do not keep to a format."""
    CHOICE = "choice"
    """The last capital letter that stands alone, A to J. For questions that list choices."""
    TAGS = "tags"
    """What stands in the last `<answer>...</answer>`. For models that keep to a format."""
    BOXED = "boxed"
    """What stands in the last `\\boxed{...}`. For models that write mathematics."""
    REGEX = "regex"
    """The first group, or else the whole, of the last match of a pattern: `regex:Answer: (.*)`. The question
    is left as it is."""


_TOLD = {
    AnswerKind.LAST_NUMBER: "Reply with the final answer only.",
    AnswerKind.CHOICE: "Reply with the letter of the right choice only.",
    AnswerKind.TAGS: f"Give the final answer between {_OPEN} and {_CLOSE}.",
    AnswerKind.BOXED: f"Give the final answer as {_BOX}answer}}.",
}


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """A kind, with the pattern of a `regex`."""

    kind: AnswerKind
    pattern: re.Pattern[str] | None = None

    def question(self, text: str) -> str:
        """The question with the instruction that belongs to this rule."""
        told = _TOLD.get(self.kind)
        return text if told is None else f"{text}\n{told}"

    def extract(self, completion: str) -> str | None:
        """The answer in `completion`, None where there is none."""
        match self.kind:
            case AnswerKind.WHOLE:
                return completion
            case AnswerKind.LAST_NUMBER:
                return _last_number(completion)
            case AnswerKind.CHOICE:
                letters = _CHOICES.findall(completion)
                return letters[-1] if letters else None
            case AnswerKind.TAGS:
                end = completion.rfind(_CLOSE)
                start = completion.rfind(_OPEN, 0, max(end, 0))
                return completion[start + len(_OPEN) : end].strip() if start >= 0 else None
            case AnswerKind.BOXED:
                return _boxed(completion)
            case AnswerKind.REGEX:
                return _last_match(self.pattern, completion)


def answer_rule(text: object) -> AnswerRule:
    """What the charter calls `text`. Raises ValueError that ends the sentence."""
    name, colon, pattern = str(text).partition(":")
    known = ", ".join(repr(str(kind)) for kind in AnswerKind)
    try:
        kind = AnswerKind(name)
    except ValueError:
        raise ValueError(f"is unknown; it is one of {known}") from None
    if kind is not AnswerKind.REGEX:
        if colon:
            raise ValueError(f"is unknown; it is one of {known}")
        return AnswerRule(kind)
    if not 0 < len(pattern) <= MAX_PATTERN_CHARS:
        raise ValueError(f"needs a pattern of 1 to {MAX_PATTERN_CHARS} characters, as 'regex:Answer: (.*)'")
    try:
        return AnswerRule(kind, re.compile(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"has no valid pattern: {error}") from None


def _last_match(pattern: re.Pattern[str] | None, text: str) -> str | None:
    if pattern is None:
        return None
    found = deque(pattern.finditer(text), maxlen=1)
    if not found:
        return None
    return found[0].group(1) if pattern.groups else found[0].group()


def _boxed(text: str) -> str | None:
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth = 1
    for place in range(start + len(_BOX), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len(_BOX) : place].strip()
    return None


def _last_number(text: str) -> str | None:
    last = ""
    for match in _NUMBERS.finditer(text):
        last = match.group()
    if _THOUSANDS.fullmatch(last):
        return last.replace(",", "")
    return last.rpartition(",")[2] or None

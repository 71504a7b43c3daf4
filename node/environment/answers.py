"""Where in a completion the answer stands: the reserved key `answer` of an environment's config.

A policy that was trained on nothing but the tasks says the answer and no more (`whole`). An instruct model
talks: it is told how to give the answer, and only that part of its completion is scored. The rule stands in
the charter, so every member asks the same question and scores the same part; own and strangers' completions
take this one path. Extraction is linear in the text, and never judges: what it finds goes to the scorer.

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
from enum import StrEnum

__all__ = ["ANSWER_KEY", "AnswerRule"]

ANSWER_KEY = "answer"
"""Reserved in the config of every environment; the environment itself never sees it."""

_OPEN, _CLOSE = "<answer>", "</answer>"
_NUMBERS = re.compile(r"(?:(?<![\w.)])-)?\d+(?:,\d+)*(?:\.\d+)?", re.ASCII)
"""One number, or several with nothing but commas between them; the minus of `7-3` is no sign."""
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)


class AnswerRule(StrEnum):
    """How the answer is given."""

    WHOLE = "whole"
    """The completion is the answer; the question is left as it is."""
    LAST_NUMBER = "last_number"
    """The last number that is said. For small models, which do not keep to a format."""
    TAGS = "tags"
    """What stands in the last `<answer>...</answer>`. For models that keep to a format."""

    def question(self, text: str) -> str:
        """The question with the instruction that belongs to this rule."""
        match self:
            case AnswerRule.WHOLE:
                return text
            case AnswerRule.LAST_NUMBER:
                return f"{text}\nReply with the final answer only."
            case AnswerRule.TAGS:
                return f"{text}\nGive the final answer between {_OPEN} and {_CLOSE}."

    def extract(self, completion: str) -> str | None:
        """The answer in `completion`, None where there is none."""
        match self:
            case AnswerRule.WHOLE:
                return completion
            case AnswerRule.LAST_NUMBER:
                return _last_number(completion)
            case AnswerRule.TAGS:
                end = completion.rfind(_CLOSE)
                start = completion.rfind(_OPEN, 0, max(end, 0))
                return completion[start + len(_OPEN) : end].strip() if start >= 0 else None


def _last_number(text: str) -> str | None:
    last = ""
    for match in _NUMBERS.finditer(text):
        last = match.group()
    if _THOUSANDS.fullmatch(last):
        return last.replace(",", "")
    return last.rpartition(",")[2] or None

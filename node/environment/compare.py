"""Whether an answer means what a row's does: `text`, `number` and `math`, for tasks that are rows alone.

Everything is linear in the answer but `math`, which runs the package `math-verify` (sympy) on it: in the
sandbox, one process an answer. Not where in a completion the answer stands (`answers.py`).
"""

from __future__ import annotations

import unicodedata
from decimal import Decimal, InvalidOperation
from enum import StrEnum

from protocol.errors import ConfigError

__all__ = ["Compare", "require_installed"]

_MAX_DIGITS = 400
_ROUND = str.maketrans({",": "", "$": "", "€": "", "£": "", "%": "", " ": "", "_": ""})


class Compare(StrEnum):
    """What makes two answers equal."""

    TEXT = "text"
    """The same words: case, width, and white space do not matter, nor a full stop at the end."""
    NUMBER = "number"
    """The same number, however it is written: 1,000 and 1e3, 50% and 50, $3 and 3.00."""
    MATH = "math"
    """The same value or expression, LaTeX included: 1/2 and \\frac{1}{2}."""

    @property
    def evaluates_answers(self) -> bool:
        """Whether the answer reaches code that may run it."""
        return self is Compare.MATH

    def equal(self, answer: str, solution: str) -> bool:
        """Whether they are."""
        match self:
            case Compare.TEXT:
                return _words(answer) == _words(solution)
            case Compare.NUMBER:
                number = _number(answer)
                return number is not None and number == _number(solution)
            case Compare.MATH:
                from math_verify import parse, verify

                # Without time limits of its own, which need signals: the sandbox has them.
                gold = parse(solution, parsing_timeout=None)
                return bool(gold and verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))


def require_installed(compare: Compare) -> None:
    """Raise ConfigError where the package behind it is absent."""
    if compare is Compare.MATH:
        try:
            import math_verify  # noqa: F401
        except ImportError:
            raise ConfigError(
                "compare = 'math' needs the package math-verify on every member: pip install math-verify"
            ) from None


def _words(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).removesuffix(".")


def _number(text: str) -> Decimal | None:
    written = unicodedata.normalize("NFKC", text).strip().translate(_ROUND).removesuffix(".")
    if len(written) > _MAX_DIGITS:
        return None
    try:
        number = Decimal(written)
    except InvalidOperation:
        return None
    return number if number.is_finite() and abs(number.adjusted()) <= _MAX_DIGITS else None

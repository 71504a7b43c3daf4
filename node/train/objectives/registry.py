"""Presets: published methods by name, each a function from options to an `Objective`.

For: one way from a name and options in a config to an objective (`open_objective`), what `swarm objectives
list` prints (`all_presets`), and the check that a trainer has the inputs (`require`). A preset's docstring
has a line of summary, then formula, source and what is ours. Evidence labels: EXACT, formula and constants
checked against the paper's text or the authors' code; CORE, the central formula is known, constants are ours;
RECONSTRUCTED, from an abstract or a summary, no claim of fidelity; UNVERIFIED, not checked.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ParamSpec, get_type_hints

import msgspec

from node.train.objectives.base import MAX_CLAIM_FACTOR, PROVIDERS, Need
from node.train.objectives.objective import Objective
from protocol.errors import ConfigError

__all__ = [
    "EVERY_TRAINER",
    "Evidence",
    "Preset",
    "all_presets",
    "open_objective",
    "preset",
    "require",
    "require_disbelief",
]

Options = ParamSpec("Options")

EVERY_TRAINER = frozenset({Need.BEHAVIOUR, Need.VERSIONS, Need.REWARDS, Need.OWN_ROLLOUTS})
"""What any trainer has for its own groups, without further copies of weights."""


class Evidence(StrEnum):
    """How well a method is known."""

    EXACT = "EXACT"
    CORE = "CORE"
    RECONSTRUCTED = "RECONSTRUCTED"
    UNVERIFIED = "UNVERIFIED"


@dataclass(frozen=True)
class Preset:
    """A published method."""

    name: str
    make: Callable[..., Objective]
    source: str
    evidence: Evidence
    foreign: bool
    """For other models' groups only."""

    @property
    def summary(self) -> str:
        """One line."""
        return self.description.partition("\n")[0]

    @property
    def description(self) -> str:
        """All that is said about it."""
        return inspect.getdoc(self.make) or ""

    @property
    def options(self) -> dict[str, Any]:
        """Names and defaults; None also where one must be given, see `required`."""
        return {
            name: None if each.default is each.empty else each.default
            for name, each in inspect.signature(self.make).parameters.items()
        }

    @property
    def required(self) -> tuple[str, ...]:
        """Options without a default."""
        parameters = inspect.signature(self.make).parameters.items()
        return tuple(name for name, each in parameters if each.default is each.empty)

    @property
    def needs(self) -> frozenset[Need]:
        """With default options."""
        return self._default.needs

    @property
    def for_peers(self) -> bool:
        """Whether, with default options, a lying author moves no gradient by more than a stated factor."""
        return not self._default.believes_claims

    @property
    def _default(self) -> Objective:
        return self.make(**dict.fromkeys(self.required, 1.0))


_PRESETS: dict[str, Preset] = {}


def preset(
    source: str, evidence: Evidence, *, foreign: bool = False
) -> Callable[[Callable[Options, Objective]], Callable[Options, Objective]]:
    """Registers a function as the preset of its own name."""

    def register(make: Callable[Options, Objective]) -> Callable[Options, Objective]:
        @functools.wraps(make)
        def named(*args: Options.args, **options: Options.kwargs) -> Objective:
            return dataclasses.replace(make(*args, **options), name=make.__name__)

        _PRESETS[make.__name__] = Preset(make.__name__, named, source, evidence, foreign)
        return named

    return register


def all_presets() -> tuple[Preset, ...]:
    """All, by name."""
    return tuple(sorted(_PRESETS.values(), key=lambda each: each.name))


def open_objective(name: str, options: Mapping[str, Any] | None = None) -> Objective:
    """The objective of that name with `options` in place of its defaults. Raises ConfigError."""
    chosen = _PRESETS.get(name)
    if chosen is None:
        raise ConfigError(f"objective {name!r} is unknown; choose one of {', '.join(sorted(_PRESETS))}")
    hints = get_type_hints(chosen.make)
    values = {key: _checked(chosen, key, value, hints) for key, value in (options or {}).items()}
    missing = [key for key in chosen.required if key not in values]
    if missing:
        raise ConfigError(f"objective {name} needs the option {missing[0]!r}; its papers name no default")
    return chosen.make(**values)


def require(objective: Objective, available: Iterable[Need] = EVERY_TRAINER) -> None:
    """Raises ConfigError, which names what is missing and who provides it, unless all inputs are there."""
    for need in sorted(objective.needs - frozenset(available)):
        raise ConfigError(f"objective {objective.name} needs {PROVIDERS[need]}")


def require_disbelief(objective: Objective) -> None:
    """Raises ConfigError, which names those that are, unless the objective is safe with authors that lie
    about their log-probabilities."""
    if objective.believes_claims:
        safe = ", ".join(each.name for each in all_presets() if each.for_peers and not each.foreign)
        raise ConfigError(
            f"objective {objective.name}, with these options, believes the log-probabilities that peers "
            f"claim: a lie moves its gradient by more than a factor of {MAX_CLAIM_FACTOR:g}; choose one of "
            f"{safe}, or set train.external_groups to 0"
        )


def _checked(chosen: Preset, key: str, value: Any, hints: Mapping[str, Any]) -> Any:
    if key not in chosen.options:
        known = ", ".join(sorted(chosen.options)) or "none"
        raise ConfigError(f"objective {chosen.name} has no option {key!r}; it has {known}")
    hint = hints[key]
    if isinstance(hint, type) and issubclass(hint, StrEnum) and value not in list(hint):
        raise ConfigError(f"{key} {value!r} is unknown; choose one of {', '.join(hint)}")
    try:
        converted = msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"option {key} = {value!r} of objective {chosen.name}: {error}") from None
    if isinstance(converted, float) and not 0 <= converted < math.inf:
        raise ConfigError(f"option {key} = {value!r} of objective {chosen.name} is no number of at least 0")
    return converted

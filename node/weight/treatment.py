"""How each group of a step is trained on: its treatment, which names an objective, and its advantages.

    TrainingGroup (tokens and rewards) --treat--> TrainingGroup (with treatment and advantages)

`ByGroup` looks at one group alone. `SharedPrompts` (HACPO and GRAFT) also compares what unlike policies
answered to one prompt; it is built only where the settings ask for it. Blocking, on one thread. Not for trust
and lambda (`batch.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from node.weight.by_group import ByGroup
from node.weight.groups import TrainingGroup
from node.weight.settings import Treatment, WeightSettings
from node.weight.shared_prompts import SharedPrompts

__all__ = ["Treatments", "open_treatments"]


class Treatments(Protocol):
    """Decides for the groups of a step, and may remember them."""

    def treat(self, groups: Sequence[TrainingGroup]) -> list[TrainingGroup]:
        """The same groups in the same order, with treatments and advantages. Once a step."""
        ...


def open_treatments(settings: WeightSettings) -> Treatments:
    """What the settings ask for."""
    by_group = settings.force in (Treatment.OWN, Treatment.COMPAT)
    return ByGroup(settings) if by_group else SharedPrompts(settings)

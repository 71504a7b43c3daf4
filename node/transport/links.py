"""Link conditions of the in-memory network, as data: what a simulation is parametrised over.

Not measurements: round numbers in the range of what such links show. All delays are one way.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LINKS", "LinkConditions"]


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """How bytes travel between any two connected peers: a lost piece is sent again and arrives later, never
    twice or out of order. `loss` is a probability per piece."""

    delay_min_ms: float = 0.0
    delay_max_ms: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.delay_min_ms <= self.delay_max_ms:
            raise ValueError(
                f"delays must satisfy 0 <= min <= max, not {self.delay_min_ms} and {self.delay_max_ms}"
            )
        if not 0 <= self.loss <= 1:
            raise ValueError(f"loss is a probability, not {self.loss}")


LINKS: dict[str, LinkConditions] = {
    "perfect": LinkConditions(),
    "lan": LinkConditions(0.2, 1.0),
    "home": LinkConditions(10.0, 40.0, loss=0.005),
    "mobile": LinkConditions(40.0, 200.0, loss=0.03),
    "satellite": LinkConditions(280.0, 350.0, loss=0.02),
    "lossy": LinkConditions(10.0, 100.0, loss=0.2),
}
"""Labelled conditions for simulations."""

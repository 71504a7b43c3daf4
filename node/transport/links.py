"""Link conditions of the in-memory network, as data: what a simulation is parametrised over.

Not measurements: round numbers in the range of what such links show. All delays are one way.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LINKS", "LinkConditions"]


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """How messages travel between any two connected peers. Probabilities are per message and hop.

    Streams are reliable: a lost piece is sent again and arrives later, never twice or out of order.
    """

    delay_min_ms: float = 0.0
    delay_max_ms: float = 0.0
    loss: float = 0.0
    reorder: float = 0.0
    """Share of messages that are held back so that later ones overtake them."""
    duplication: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.delay_min_ms <= self.delay_max_ms:
            raise ValueError(
                f"delays must satisfy 0 <= min <= max, not {self.delay_min_ms} and {self.delay_max_ms}"
            )
        for name in ("loss", "reorder", "duplication"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a probability, not {getattr(self, name)}")


LINKS: dict[str, LinkConditions] = {
    "perfect": LinkConditions(),
    "lan": LinkConditions(0.2, 1.0),
    "home": LinkConditions(10.0, 40.0, loss=0.005, reorder=0.01),
    "mobile": LinkConditions(40.0, 200.0, loss=0.03, reorder=0.05, duplication=0.005),
    "satellite": LinkConditions(280.0, 350.0, loss=0.02, reorder=0.01),
    "lossy": LinkConditions(10.0, 100.0, loss=0.2, reorder=0.2, duplication=0.05),
}
"""Labelled conditions for simulations."""

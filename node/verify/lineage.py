"""Groups that claim to come from this node's own policy: its followers', and whoever says so.

A follower generates for the owner of the policy it tracks. The owner checks what can be checked: the claim
names its base model and tokenizer, and no version that it has not made yet. Every other node treats such a
group like one of a foreign model. Not for: how old a claim may be (`freshness.py`).

An attacker who claims our lineage gains that its tokens are trained on with token-level ratios against the
log-probabilities it claims (`Treatment.OWN`). It gains no rewards (recomputed here), prompts (derived here),
copies (`coincidence.py` holds between equal weights too) or weight (trust is its own, and its source has its
own denominator); claims beyond the trust region of the objective carry no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from node.rollout.engine.base import Engine
from node.share.heard import Heard
from node.verify.base import ACCEPT, Verdict, reject
from protocol.messages import Lineage

if TYPE_CHECKING:  # a node that only observes needs no torch
    from node.rollout.policy import Policy

__all__ = ["LineageClaim", "OwnPolicy"]


@dataclass(frozen=True)
class OwnPolicy:
    """The policy that this node trains, and the engine that computes with it."""

    lineage: Lineage
    policy: Policy
    engine: Engine

    @property
    def version(self) -> int:
        """The version that the engine has now; no newer one was published."""
        return self.engine.policy_version


class LineageClaim:
    """`other_model`: our name on another base model or tokenizer. `future_version`: a version that this node
    has not made. Hard. Needs no body; without `own` (a node that trains nothing) everything passes."""

    name = "lineage"

    def __init__(self, own: OwnPolicy | None) -> None:
        self._own = own

    def check(self, item: Heard) -> Verdict:
        """See `Check.check`."""
        own, claimed = self._own, item.announcement
        if own is None or claimed.lineage.owner != own.lineage.owner:
            return ACCEPT
        if claimed.lineage != own.lineage:
            return reject("other_model")
        # Versions are made before anybody can have them: no honest follower is ahead of its owner.
        return ACCEPT if claimed.policy_version <= own.version else reject("future_version")

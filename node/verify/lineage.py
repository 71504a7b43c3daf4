"""Groups that claim to come from this node's own policy: what the claim must not say.

A follower generates for the owner of the policy it tracks. The owner checks what can be checked: the claim
names its base model and tokenizer, and no version that it has not made yet. Every other node treats such a
group like one of a foreign model. Not for: how old a claim may be (`freshness.py`).

Nobody keeps a list of followers, so the name alone gives nothing. Refused here is what no follower can say.
For what the name gives - training by token on the log-probabilities it claims (`Treatment.OWN`), the owner's
measures of lag, and equal log-probabilities without being a copy (`coincidence.py`) - its author has to be
believed: a member of a closed swarm, or trusted for groups before (`PeerBook.may_claim`). Until then it is a
foreign policy. A believed author that lies moves no ratio by more than `node/train/claims.py` allows, and
gains no rewards (recomputed here), prompts (derived here) or weight (trust and source are its own).
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

"""Groups that claim to come from this node's own policy: its followers', and whoever says so.

A group's lineage need not be its author's: a follower generates for the owner of the policy it tracks. The
owner knows its lineage, so it checks what can be checked: the claim names its base model and tokenizer, and
no version that it has not made yet. Every other node treats such a group like one of a foreign model.

What an attacker gains by claiming our lineage: its tokens are trained on with token-level ratios against the
log-probabilities it claims (`Treatment.OWN`), stale or invented ones if it likes. What it does not gain:
rewards (recomputed here), prompts (derived here), copies (the evidence of drawn tokens holds between equal
weights too, see `coincidence.py`), or weight (trust is its own, and its source has its own denominator).
Plausibility runs as for everybody; claims beyond the trust region of the objective carry no gradient, and
claims inside it make the group what any off-policy group of a stranger is. Not for: how old a claim may be
(`freshness.py`, which compares it with the version that this node has now).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from node.share.heard import Heard
from node.verify.base import ACCEPT, Verdict, reject
from node.verify.plausibility import LocalEngine, LocalPolicy
from protocol.messages import Lineage

__all__ = ["LineageClaim", "OwnPolicy"]


class _Engine(LocalEngine, Protocol):
    """The scoring side of `node.rollout.engine.base.Engine`, and the version of its weights."""

    @property
    def policy_version(self) -> int: ...


@dataclass(frozen=True)
class OwnPolicy:
    """The policy that this node trains, and the engine that computes with it."""

    lineage: Lineage
    policy: LocalPolicy
    engine: _Engine

    @property
    def version(self) -> int:
        """The version that the engine has now; no newer one was published."""
        return self.engine.policy_version


class LineageClaim:
    """`other_model`: our name on another base model or tokenizer. `future_version`: a version that this node
    has not made. Hard. Needs no body; without `own` (a node that trains nothing) everything passes."""

    name = "lineage"
    hard = True

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

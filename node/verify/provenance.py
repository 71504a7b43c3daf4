"""Prompts cannot be picked: a group's prompt must be the one that its author's slot stands for (D4).

`SlotDerivation` needs no body: the slot must exist, its universe index must be the derived one, and no slot
is answered twice. `PromptDerivation` derives the item behind the index and compares environment and question,
word for word; deriving a new question takes milliseconds, so it runs beside the event loop. `SkipShare` is
soft, because a receipt may be missing for no fault of its author's: gossip is lossy and reconciles every few
seconds.
"""

from __future__ import annotations

from collections.abc import Callable

from node.environment.records import Prompt
from node.share.heard import Heard
from node.verify.base import ACCEPT, Item, Verdict, reject, suspect
from node.verify.ledger import Ledger
from protocol.errors import CharterError
from protocol.messages import Charter, Digest, PromptRef
from protocol.prompts import skip_share, slots

__all__ = ["Duplicate", "PromptDerivation", "SameEnvironment", "SkipShare", "SlotDerivation"]

MIN_SLOTS_FOR_SHARE = 8
"""Below this slot number a single late receipt would look like choosing."""


class SlotDerivation:
    """`tampered_prompt`: no such slot, or not its index. `equivocation`: another answer for an answered slot.
    Hard."""

    name = "slot"

    def __init__(self, charter: Charter, swarm_id: Digest, ledger: Ledger) -> None:
        self._charter = charter
        self._swarm_id = swarm_id
        self._ledger = ledger

    def check(self, item: Heard) -> Verdict:
        """See `Check.check`. Enters the receipt into the ledger. Run `Freshness` first: it bounds the
        window."""
        prompt = item.announcement.prompt
        derived = slots(self._swarm_id, self._charter, prompt.window, item.sender)
        if prompt.slot >= len(derived) or derived[prompt.slot] != prompt.index:
            return reject("tampered_prompt")
        if not self._ledger.claim(item.sender, item.announcement):
            return reject("equivocation")
        return ACCEPT


class SameEnvironment:
    """`environment_mismatch`: the author scored with other code or data than this node has, so neither can
    say that the other is wrong. Hard, blameless. `pin` gives what this node has for a prompt, "" where that
    is not known."""

    name = "environment"

    def __init__(self, pin: Callable[[PromptRef], str]) -> None:
        self._pin = pin

    def check(self, item: Heard) -> Verdict:
        """See `Check.check`."""
        own, theirs = self._pin(item.announcement.prompt), item.announcement.pin
        return reject("environment_mismatch") if own and theirs and own != theirs else ACCEPT


class Duplicate:
    """`duplicate`: this very group was judged before, or is being judged now. Hard, blameless."""

    name = "duplicate"

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def check(self, item: Heard) -> Verdict:
        """See `Check.check`. Marks the slot as judged."""
        return ACCEPT if self._ledger.start_judging(item.sender, item.announcement) else reject("duplicate")


class SkipShare:
    """`skipped_too_much`: of the slots up to the highest one answered, more are missing than the charter
    allows."""

    name = "skips"

    def __init__(self, charter: Charter, ledger: Ledger) -> None:
        self._charter = charter
        self._ledger = ledger

    def check(self, item: Heard) -> Verdict:
        """See `Check.check`."""
        seen = self._ledger.slots_seen(item.sender, item.announcement.prompt.window)
        if seen and seen[-1] >= MIN_SLOTS_FOR_SHARE and skip_share(seen) > self._charter.max_skip_share:
            return suspect("skipped_too_much")
        return ACCEPT


class PromptDerivation:
    """`tampered_prompt`: the environment or the question is not the derived one. Hard. `item_at` gives the
    item of a universe index, usually `node.rollout.prompts.Universe.item`, which remembers it."""

    name = "prompt"

    def __init__(self, item_at: Callable[[int], Prompt]) -> None:
        self._item_at = item_at

    def check(self, item: Item) -> Verdict:
        """See `Check.check`."""
        try:
            derived = self._item_at(item.group.prompt.index)
        except CharterError:  # the environment fails here; elsewhere, it seems, it does not
            return reject("no_question", blames_author=False)
        if (item.group.environment, item.group.question) != (derived.environment, derived.text):
            return reject("tampered_prompt")
        return ACCEPT

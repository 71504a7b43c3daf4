"""Copied completions: the first arrival of a group counts, whatever time its author claims.

A bounded index of prints (`coincidence.py`) of own and accepted groups, by the token ids of their rollouts. A
candidate is compared with the groups that share half of its completions; enough evidence, and it is `copied`
(another author's, of the same prompt) or `replayed` (its own, from another slot). To another prompt a stolen
text is an answer like any other, scored there; it must not stand in its author's way. Only bodies that were
served count: an announcement alone accuses nobody, since its digest is bound to its author
(`protocol/receipts.py`). A print enters when all checks have passed, so a refused group accuses nobody.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from cachetools import FIFOCache

from node.verify.base import ACCEPT, Item, Verdict, reject
from node.verify.coincidence import COPY_NATS, GroupPrint, evidence_nats, print_group
from protocol.messages import Lineage, PeerId, RolloutGroup
from protocol.rollouts import TokenArrays

__all__ = ["Copies"]

MAX_PRINTS = 4096
"""Groups remembered: 12 MB of eight short answers each, at most 200 MB of 64 long ones. A node that begins
grows until it has so many."""
MAX_GROUPS_PER_COMPLETION = 256
"""A common completion ("7") occurs in very many groups; the newest are compared."""
MAX_COMPARISONS = 64

PrintKey = tuple[PeerId, int, int]
"""Author, window, slot."""


class Copies:
    """The index and the check on it. Hard."""

    name = "copies"

    def __init__(self, may_claim: Callable[[PeerId, Lineage], bool], max_prints: int = MAX_PRINTS) -> None:
        """`may_claim`: whether an author is believed about the lineage that it names."""
        self._may_claim = may_claim
        self._max_prints = max_prints
        self._prints: OrderedDict[PrintKey, GroupPrint] = OrderedDict()
        self._holders: dict[bytes, FIFOCache[PrintKey, None]] = {}

    def __len__(self) -> int:
        return len(self._prints)

    def remember(self, group: RolloutGroup, tokens: Sequence[TokenArrays], arrived_at: int) -> None:
        """Enter a group: an own one, or a candidate that passed all checks."""
        entry = print_group(group, tokens, arrived_at)
        key = (entry.author, entry.window, entry.slot)
        self._drop(key)
        self._prints[key] = entry
        for completion in {rollout.key for rollout in entry.rollouts}:
            holders = self._holders.setdefault(completion, FIFOCache(MAX_GROUPS_PER_COMPLETION))
            holders[key] = None
        while len(self._prints) > self._max_prints:
            self._drop(next(iter(self._prints)))

    def check(self, item: Item) -> Verdict:
        """See `Check.check`."""
        own = print_group(item.group, item.tokens, item.arrived_at)
        believed = self._may_claim(own.author, own.lineage)
        for earlier in self._earlier(own):
            if earlier.author != own.author and earlier.prompt != own.prompt:
                continue
            if evidence_nats(own, earlier, believed=believed) >= COPY_NATS:
                return reject("replayed" if earlier.author == own.author else "copied")
        return ACCEPT

    def _earlier(self, own: GroupPrint) -> list[GroupPrint]:
        """Groups that came first and share at least half of the completions, those that share most first."""
        place = (own.author, own.window, own.slot)
        shared: Counter[PrintKey] = Counter()
        for rollout in own.rollouts:
            shared.update(list(self._holders.get(rollout.key, ())))  # a mapping would be added as counts
        earlier: list[GroupPrint] = []
        for key, count in shared.most_common(MAX_COMPARISONS):
            known = self._prints[key]
            if key != place and 2 * count >= len(own.rollouts) and known.arrived_at <= own.arrived_at:
                earlier.append(known)
        return earlier

    def _drop(self, key: PrintKey) -> None:
        entry = self._prints.pop(key, None)
        if entry is None:
            return
        for completion in {rollout.key for rollout in entry.rollouts}:
            holders = self._holders.get(completion)
            if holders is not None:
                holders.pop(key, None)
                if not holders:
                    del self._holders[completion]

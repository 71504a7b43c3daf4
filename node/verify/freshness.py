"""Is it still worth using: age in windows, and lag in versions behind the newest one known of its lineage.

Of this node's own lineage, which followers generate for, that is the version it has now; of another one, what
the sender itself announced, so that nobody's numbers move the verdict on somebody else.

The rule is `node.weight.staleness`, the same that the pool is gated by. The window is compared with this
node's clock; what the sender says about time counts for nothing. Needs no body, so it also runs on
announcements before anything is fetched.
"""

from __future__ import annotations

from node.membership import Membership
from node.peers.book import PeerBook
from node.share.heard import Heard
from node.verify.base import ACCEPT, Verdict, reject
from node.verify.lineage import OwnPolicy
from node.weight.staleness import judge_staleness
from protocol.constants import MAX_CLOCK_SKEW_MS

__all__ = ["Freshness"]


class Freshness:
    """`future` beyond the accepted clock skew, `stale` when too old or too far behind its lineage. Hard,
    blameless."""

    name = "freshness"

    def __init__(self, membership: Membership, peers: PeerBook, own: OwnPolicy | None = None) -> None:
        self._membership = membership
        self._peers = peers
        self._own = own

    def check(self, item: Heard) -> Verdict:
        """See `Check.check`."""
        charter, now_windows = self._membership.charter, self._membership.window()
        announcement, window = item.announcement, item.announcement.prompt.window
        # The peer's number is compared, never multiplied: 2**63 - 1 windows must not overflow anything.
        if window > int(now_windows + MAX_CLOCK_SKEW_MS / charter.window_ms):
            return reject("future")
        staleness = judge_staleness(
            announcement.policy_version,
            announcement.oldest_version,
            self._newest(item),
            window,
            int(now_windows),
            charter.rules,
        )
        return ACCEPT if staleness.fresh else reject("stale")

    def _newest(self, item: Heard) -> int:
        lineage = item.announcement.lineage
        if self._own is not None and lineage == self._own.lineage:
            return self._own.version
        newest = self._peers.newest_version(item.sender, lineage)
        return newest if newest is not None else item.announcement.policy_version

"""Who this node hears from: one row a peer, and everything about the one under the cursor below."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import DataTable, Static

from node.events import PeerStatus, SourceShare
from swarm_cli.dashboard.text import ACCENT, BAD, DIM, GOOD, WARN, cut, decimal, duration, quantity, short_id
from swarm_cli.dashboard.view import NodeView
from swarm_cli.dashboard.widgets.table import Column, KeyedTable

__all__ = ["PeerDetail", "PeersPane", "PeersTable"]

FIXED: tuple[Column, ...] = (
    ("ver", 5),
    ("trust", 5),
    ("accepted", 8),
    ("lag", 4),
    ("seen", 6),
    ("tokenizer", 9),
)
AGE: Column = ("age", 4)
"""Beside the lag where there is room."""
WIDE_CELLS = 100


class PeersTable(KeyedTable):
    """Name, id, version, trust, accepted, rejected with reasons, lag in versions, age in windows, last seen,
    tokenizer."""

    BORDER_TITLE = "peers"

    _view: NodeView | None = None

    def columns_for(self, cells: int) -> tuple[Column, ...]:
        age = (AGE,) if cells >= WIDE_CELLS else ()
        left = cells - sum(width + 1 for _, width in (*FIXED, *age)) - 3 - 7
        name = min(24, max(9, left * 3 // 8))
        version, trust, accepted, lag, seen, same = FIXED
        rejected = max(8, left - name)
        named = (("name", name), ("id", 7))
        return (*named, version, trust, accepted, ("rejected", rejected), lag, *age, seen, same)

    def show(self, view: NodeView) -> None:
        """Draw the peers of `view`."""
        old, self._view = self._view, view
        if old is None or (old.peers, old.peer_id, old.at // 1000) != (
            view.peers,
            view.peer_id,
            view.at // 1000,
        ):
            self.redraw()

    def redraw(self) -> None:
        if self._view is None or not self.size.width:
            return
        widths = dict(self.columns_for(self.cells))
        self.set_rows([(peer.peer_id, _cells(peer, self._view.at, widths)) for peer in self._view.peers])

    def selected(self) -> PeerStatus | None:
        """The peer under the cursor."""
        if self._view is None:
            return None
        return next((peer for peer in self._view.peers if peer.peer_id == self.selected_key), None)


def _cells(peer: PeerStatus, at: int, widths: dict[str, int]) -> tuple[Text | str, ...]:
    name_style = "" if peer.connected else WARN if peer.frozen else DIM
    seen = duration(max(0, at - peer.last_seen_at) / 1000) if peer.last_seen_at else "never"
    return (
        Text(cut(_called(peer), widths["name"]), name_style),
        Text(short_id(peer.peer_id), DIM),
        _right(f"v{peer.policy_version}" if peer.policy_version >= 0 else "–", widths["ver"]),
        _right(decimal(peer.trust), widths["trust"], _trust_style(peer.trust)),
        _right(quantity(peer.accepted), widths["accepted"], GOOD if peer.accepted else DIM),
        _rejected(peer, widths["rejected"]),
        _right(decimal(peer.lag, 1 if peer.lag < 100 else 0), widths["lag"]),
        *((_right(decimal(peer.age_windows, 1), widths["age"]),) if "age" in widths else ()),
        _right(seen, widths["seen"], name_style),
        Text("same" if peer.same_tokenizer else "other", "" if peer.same_tokenizer else WARN),
    )


def _called(peer: PeerStatus) -> str:
    name = peer.name or "(no name)"
    return f"frozen: {name}" if peer.frozen else name


def _link(peer: PeerStatus, at: int) -> tuple[str, str]:
    """Whether it answers, and its colour."""
    ago = f"answered {duration(max(0, at - peer.answered_at) / 1000)} ago" if peer.answered_at else ""
    if peer.connected:
        return f"connected, {ago}".removesuffix(", "), GOOD
    if peer.frozen:
        return f"frozen: the link stands, its node {ago or 'has not answered'}", BAD
    return "not connected", WARN


def _right(value: str, cells: int, style: str = "") -> Text:
    return Text(value.rjust(cells), style)


def _trust_style(trust: float) -> str:
    return GOOD if trust >= 0.7 else WARN if trust >= 0.3 else BAD


def _rejected(peer: PeerStatus, cells: int) -> Text:
    """Counts and reasons, the most frequent first, as many as fit; red where most is rejected."""
    if not peer.rejected:
        return Text("0", DIM)
    reasons = sorted(peer.rejected.items(), key=lambda item: (-item[1], item[0]))
    shown = ""
    for reason, count in reasons:
        longer = f"{shown}, {quantity(count)} {reason}" if shown else f"{quantity(count)} {reason}"
        if shown and cell_len(longer) > cells:
            break
        shown = longer
    return Text(cut(shown, cells), BAD if sum(peer.rejected.values()) > peer.accepted else WARN)


class PeerDetail(Static):
    """Full id, all reasons and the part in the last step of one peer."""

    BORDER_TITLE = "peer"

    def show(self, view: NodeView, peer: PeerStatus | None) -> None:
        """Draw `peer`, or where to find it when there is none."""
        if peer is None:
            self.update(Text("no peers yet: this node trains alone and keeps trying to reach the swarm", DIM))
            return
        text = Text.assemble(
            (cut(peer.name or "(no name)", 40), f"bold {ACCENT}"), ("  ", ""), (peer.peer_id, "")
        )
        link = _link(peer, view.at)
        tokenizer = (
            "same tokenizer" if peer.same_tokenizer else "another tokenizer: its text is read, not its tokens"
        )
        text.append("\n")
        text.append_text(Text.assemble(link, (f"  {tokenizer}", DIM)))
        text.append("\nrejected  ", DIM)
        text.append(
            ", ".join(
                f"{reason} {count}" for reason, count in sorted(peer.rejected.items(), key=lambda i: -i[1])
            )
            or "nothing"
        )
        share = (
            next((s for s in view.steps[-1].sources if s.source == peer.peer_id), None)
            if view.steps
            else None
        )
        text.append("\nlast step ", DIM)
        text.append(_share(share))
        self.update(text)


def _share(share: SourceShare | None) -> str:
    if share is None:
        return "none of its groups was drawn"
    return (
        f"{share.groups} groups, {quantity(share.tokens)} tokens, weight {decimal(share.weight)}, "
        f"ess {decimal(share.ess)}, gap {decimal(share.gap, 3)} nat"
    )


class PeersPane(Vertical):
    """Screen 2."""

    _view: NodeView | None = None

    def compose(self) -> ComposeResult:
        yield PeersTable(id="peers-table")
        yield PeerDetail(id="peer-detail")

    def show(self, view: NodeView) -> None:
        """Draw the peers of `view`."""
        self._view = view
        self.query_one(PeersTable).show(view)
        self._show_detail()

    def enter(self) -> None:
        """Give the keys to the table."""
        self.query_one(PeersTable).focus()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        event.stop()
        self._show_detail()

    def _show_detail(self) -> None:
        if self._view is not None:
            self.query_one(PeerDetail).show(self._view, self.query_one(PeersTable).selected())

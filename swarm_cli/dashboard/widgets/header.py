"""The two lines at the top: which node this is, how it is doing, and which other nodes can be looked at."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text
from textual.widgets import Static

from swarm_cli.dashboard.text import (
    ACCENT,
    BAD,
    DIM,
    GOOD,
    INFO,
    WARN,
    cut,
    duration,
    labelled,
    quantity,
    short_id,
)
from swarm_cli.dashboard.view import Link, NodeView

__all__ = ["NodeHeader"]

LINK_STYLES = {
    Link.CONNECTING: WARN,
    Link.LIVE: GOOD,
    Link.GONE: BAD,
    Link.STOPPED: DIM,
    Link.REPLAY: INFO,
    Link.ENDED: INFO,
}
LINK_WORDS = {Link.ENDED: "replay ended", Link.CONNECTING: "connecting …"}


class NodeHeader(Static):
    """Swarm, node, id, link and uptime; model, version and peers; the nodes that `n` walks through."""

    def show(self, view: NodeView, names: Sequence[str], selected: int) -> None:
        """Draw `view`, node `selected` of `names`."""
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        grid.add_column(justify="right", no_wrap=True)
        grid.add_row(_who(view), _state(view))
        grid.add_row(_what(view), _nodes(names, selected))
        self.update(grid)


def _who(view: NodeView) -> Text:
    swarm = view.started.swarm if view.started else ""
    text = Text.assemble(("▚ ", ACCENT), (cut(view.name, 24), f"bold {ACCENT}"))
    if swarm:
        text.append(" in ", DIM)
        text.append(cut(swarm, 24))
    if view.peer_id:
        text.append(f"  {short_id(view.peer_id)}", DIM)
    return text


def _state(view: NodeView) -> Text:
    style = LINK_STYLES[view.link]
    text = Text.assemble(("● ", style), (LINK_WORDS.get(view.link, view.link.value), style))
    if view.started:
        text.append("  up ", DIM)
        text.append(duration(view.uptime_s))
    return text


def _what(view: NodeView) -> Text:
    if view.started is None:
        return Text("no event yet; a node writes its first when its policy is loaded", DIM)
    version = f"v{view.policy_version}" if view.policy_version >= 0 else "v–"
    peers = f"{view.connected} of {len(view.peers)}" if view.peers else "none yet"
    if view.frozen:
        peers += f", {view.frozen} frozen"
    return Text("   ").join(
        [
            Text.assemble(
                cut(view.started.model, 24), (f" {quantity(view.started.params)} params", DIM), no_wrap=True
            ),
            labelled("policy", version, "bold"),
            labelled("peers", peers),
        ]
    )


def _nodes(names: Sequence[str], selected: int) -> Text:
    if len(names) < 2:
        return Text()
    if len(names) > 4:
        return labelled("node", f"{selected + 1} of {len(names)}")
    return Text(" ").join(
        Text(f" {cut(name, 10)} ", f"reverse {ACCENT}" if index == selected else DIM)
        for index, name in enumerate(names)
    )

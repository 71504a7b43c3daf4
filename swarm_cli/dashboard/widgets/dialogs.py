"""The two sheets that open over the screen: the keys (`?`) and the identity of the node shown (`i`)."""

from __future__ import annotations

from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from node.events import NodeStarted
from swarm_cli.dashboard.text import ACCENT, DIM, WARN
from swarm_cli.dashboard.view import NodeView

__all__ = ["Sheet", "help_sheet", "identity_sheet"]

KEYS = (
    ("1 2 3", "overview, peers, rollouts"),
    ("n  N", "next node, previous node"),
    ("i", "identity of this node: full ids, addresses, sandbox"),
    ("↑ ↓  j k", "move in a list, scroll a text"),
    ("g  G", "top, bottom of a list"),
    ("Enter", "inspect the group under the cursor"),
    ("Esc", "back"),
    ("f", "filter rollouts: all, refused, of peers, own"),
    ("ctrl+p", "command palette: screenshot, theme"),
    ("?", "this sheet"),
    ("q", "quit; the node goes on"),
)


class Sheet(ModalScreen[None]):
    """Closes with Escape, q or the key that opened it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,i,enter", "app.pop_screen", "Close", id="sheet.close"),
    ]

    def __init__(self, heading: str, body: Table | Text) -> None:
        super().__init__()
        self.heading = heading
        self._body = body

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="sheet") as sheet:
            sheet.border_title = self.heading
            yield Static(self._body)


def help_sheet() -> Sheet:
    """Every key."""
    grid = Table.grid(padding=(0, 3))
    for key, meaning in KEYS:
        grid.add_row(Text(key, ACCENT), Text(meaning))
    return Sheet("keys", grid)


def identity_sheet(view: NodeView) -> Sheet:
    """What the node of `view` said about itself when it started."""
    return Sheet("this node", _identity(view.started))


def _identity(started: NodeStarted | None) -> Table | Text:
    if started is None:
        return Text("no event yet", DIM)
    grid = Table.grid(padding=(0, 3))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    rows = (
        ("name", started.name),
        ("peer id", started.peer_id),
        ("swarm", started.swarm),
        ("swarm id", started.swarm_id),
        ("addresses", "\n".join(started.addresses) or "none"),
        ("model", f"{started.model}, {started.params:,} parameters"),
        ("engine", started.engine),
        ("run folder", started.run_dir),
    )
    for label, value in rows:
        grid.add_row(Text(label, DIM), Text(value))
    grid.add_row(Text("sandbox", DIM), Text(started.sandbox, WARN if "weak" in started.sandbox else ""))
    return grid

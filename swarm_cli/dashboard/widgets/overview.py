"""Screen 1: is it learning, what does it wait for, who takes part, and what should the operator know."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import DataTable

from swarm_cli.dashboard.view import NodeView
from swarm_cli.dashboard.widgets.curves import Curves
from swarm_cli.dashboard.widgets.facts import Facts
from swarm_cli.dashboard.widgets.log import NoticeLog
from swarm_cli.dashboard.widgets.peers import PeersTable
from swarm_cli.dashboard.widgets.rollouts import GroupsTable
from swarm_cli.dashboard.widgets.stages import StageStrip

__all__ = ["OverviewPane"]

SHOWN_GROUPS = 30
"""Rollouts of the overview, which does not scroll; all of them are on screen 3."""


class OverviewPane(Vertical):
    """Compact on a small screen; on a large one peers and rollouts join it."""

    def compose(self) -> ComposeResult:
        yield Curves()
        yield StageStrip()
        yield Facts()
        with Horizontal(id="overview-tables"):
            peers = PeersTable(id="overview-peers")
            groups = GroupsTable(id="overview-groups")
            groups.max_rows = SHOWN_GROUPS
            peers.can_focus = groups.can_focus = False
            peers.show_cursor = groups.show_cursor = False
            yield peers
            yield groups
        yield NoticeLog()

    def show(self, view: NodeView) -> None:
        """Draw `view`."""
        self.query_one(Curves).show(view)
        self.query_one(StageStrip).show(view)
        self.query_one(Facts).show(view)
        self.query_one(PeersTable).show(view)
        self.query_one(GroupsTable).show(view)
        self.query_one(NoticeLog).show(view)

    def enter(self) -> None:
        """Nothing here takes keys."""
        self.screen.set_focus(None)

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        event.stop()

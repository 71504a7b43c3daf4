"""Which groups were judged and why: a list with the newest on top, and the whole story of one of them."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import ClassVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import DataTable, Static

from node.events import CheckOutcome, GroupJudged
from swarm_cli.dashboard.text import ACCENT, BAD, DIM, GOOD, WARN, cut, cut_head, decimal, labelled, since
from swarm_cli.dashboard.view import MAX_GROUPS, NodeView, NumberedGroup
from swarm_cli.dashboard.widgets.table import Column, KeyedTable

__all__ = ["GroupsTable", "Inspector", "RolloutsPane", "Shown"]

VERDICT_STYLES = {"accept": GOOD, "reject": BAD, "suspect": WARN}
NARROW_CELLS = 60
"""Below it the question is left out of the list."""


class Shown(StrEnum):
    """Which groups the list shows; `f` goes round."""

    ALL = "all"
    REFUSED = "refused"
    PEERS = "of peers"
    OWN = "own"


WANTED: dict[Shown, Callable[[GroupJudged], bool]] = {
    Shown.ALL: lambda group: True,
    Shown.REFUSED: lambda group: not group.accepted,
    Shown.PEERS: lambda group: not group.own,
    Shown.OWN: lambda group: group.own,
}


class GroupsTable(KeyedTable):
    """Time, author, verdict with its reason, mean reward, question."""

    BORDER_TITLE = "rollouts"

    _view: NodeView | None = None
    shown = Shown.ALL
    max_rows = MAX_GROUPS

    def columns_for(self, cells: int) -> tuple[Column, ...]:
        fixed: tuple[Column, ...] = (("time", 7), ("author", 10), ("verdict", 17), ("reward", 6))
        left = cells - sum(width + 1 for _, width in fixed) - 1
        if cells < NARROW_CELLS:
            return (*fixed[:2], ("verdict", max(10, 18 + left)), fixed[3])
        return (*fixed, ("question", left))

    def show(self, view: NodeView) -> None:
        """Draw the groups of `view`."""
        old, self._view = self._view, view
        if old is None or (old.groups, old.started) != (view.groups, view.started):
            self.redraw()

    def next_filter(self) -> Shown:
        """Show the next kind of groups."""
        kinds = list(Shown)
        self.shown = kinds[(kinds.index(self.shown) + 1) % len(kinds)]
        self.border_title = "rollouts" if self.shown is Shown.ALL else f"rollouts ({self.shown.value})"
        self.redraw()
        return self.shown

    def redraw(self) -> None:
        if self._view is None or not self.size.width:
            return
        widths = dict(self.columns_for(self.cells))
        wanted = WANTED[self.shown]
        rows = [
            (str(group.number), _cells(group.event, self._view, widths))
            for group in self._view.groups[: -self.max_rows - 1 : -1]
            if wanted(group.event)
        ]
        self.set_rows(rows, follow_top=True)

    def selected(self) -> NumberedGroup | None:
        """The group under the cursor."""
        if self._view is None:
            return None
        return next((group for group in self._view.groups if str(group.number) == self.selected_key), None)


def _cells(group: GroupJudged, view: NodeView, widths: dict[str, int]) -> tuple[Text | str, ...]:
    start = view.started.at if view.started else view.groups[0].event.at
    author = Text("own", ACCENT) if group.own else Text(cut(view.name_of(group.author), widths["author"]))
    verdict = (
        Text("accepted", GOOD)
        if group.accepted
        else Text(cut(group.reason or "refused", widths["verdict"]), BAD)
    )
    mean = decimal(sum(group.rewards) / len(group.rewards)) if group.rewards else "–"
    cells: tuple[Text | str, ...] = (
        Text(since(group.at, start), DIM),
        author,
        verdict,
        mean.rjust(widths["reward"]),
    )
    if "question" in widths:
        return (*cells, Text(cut_head(group.question, widths["question"])))
    return cells


class Inspector(VerticalScroll, can_focus=True):
    """Question, completions with their rewards, and every check's verdict and cost."""

    BORDER_TITLE = "group"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "scroll_down", "Down", show=False, id="inspector.down"),
        Binding("k", "scroll_up", "Up", show=False, id="inspector.up"),
    ]

    _shown: NumberedGroup | None = None

    def compose(self) -> ComposeResult:
        yield Static(id="inspected")

    def show(self, view: NodeView, group: NumberedGroup | None) -> None:
        """Draw `group` from its top, unless it is there already."""
        body = self.query_one("#inspected", Static)
        if group is None:
            self._shown = None
            body.update(Text("no group yet", DIM))
            return
        if self._shown is None or self._shown.event is not group.event:
            self._shown = group
            body.update(_story(group.event, view))
            self.scroll_home(animate=False)


def _story(group: GroupJudged, view: NodeView) -> Group:
    outcome = Text("accepted", f"bold {GOOD}") if group.accepted else Text("refused: ", f"bold {BAD}")
    if not group.accepted:
        outcome.append(group.reason or "no reason given", BAD)
    author = "own" if group.own else view.name_of(group.author)
    head: list[RenderableType] = [
        Text.assemble(outcome, ("  by ", DIM), (cut(author, 40), f"bold {ACCENT}")),
        Text(group.author, DIM),
        Text("  ").join(
            [
                labelled("group", cut(group.group, 16)),
                labelled("policy", f"v{group.policy_version}"),
                labelled("window", str(group.window)),
                labelled("slot", str(group.slot)),
            ]
        ),
        labelled("environment", cut(group.environment, 40)),
        Text(),
        Text("question", DIM),
        Text(group.question),
        Text(),
        Text("rewards and completions", DIM)
        if group.accepted
        else Text("rewards (claimed) and completions", DIM),
        _completions(group),
    ]
    return Group(*head, Text(), Text("checks", DIM), _checks(group.checks))


def _completions(group: GroupJudged) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    best = max(group.rewards, default=0.0)
    for number, completion in enumerate(group.completions):
        reward = group.rewards[number] if number < len(group.rewards) else None
        style = DIM if reward is None else GOOD if reward >= best and reward > 0 else ""
        table.add_row(Text("–" if reward is None else decimal(reward), style), Text(completion or "(empty)"))
    return table


def _checks(checks: tuple[CheckOutcome, ...]) -> Table | Text:
    if not checks:
        return Text("none ran")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for check in checks:
        table.add_row(
            Text(cut(check.check, 20)),
            Text(cut(check.verdict, 10), VERDICT_STYLES.get(check.verdict, WARN)),
            Text(f"{decimal(check.cost_s * 1000, 1)} ms", DIM),
            Text(check.reason, DIM),
        )
    return table


class RolloutsPane(Horizontal):
    """Screen 3. On a wide screen list and inspector stand side by side; on a narrow one Enter swaps them."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f", "filter", "Filter", id="rollouts.filter"),
        Binding("escape", "back", "Back", id="rollouts.back"),
    ]

    _view: NodeView | None = None

    def compose(self) -> ComposeResult:
        yield GroupsTable(id="groups-table")
        yield Inspector(id="inspector")

    def show(self, view: NodeView) -> None:
        """Draw the groups of `view`."""
        old, self._view = self._view, view
        if old is not None and old.peer_id != view.peer_id and self.has_class("inspecting"):
            self.action_back()  # another node: what was being read is not one of its groups
        self.query_one(GroupsTable).show(view)
        self._inspect()

    def enter(self) -> None:
        """Give the keys to what is in front."""
        self.query_one(Inspector if self.has_class("inspecting") else GroupsTable).focus()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        event.stop()
        self._inspect()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        event.stop()
        self.add_class("inspecting")
        self.query_one(Inspector).focus()
        self.refresh_bindings()

    def action_back(self) -> None:
        """Return to the list."""
        self.remove_class("inspecting")
        self.query_one(GroupsTable).focus()
        self.refresh_bindings()

    def action_filter(self) -> None:
        """Show the next kind of groups."""
        self.query_one(GroupsTable).next_filter()
        self._inspect()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """`Back` is offered only inside the inspector, `Filter` only outside."""
        inspecting = self.has_class("inspecting")
        return {"back": inspecting, "filter": not inspecting}.get(action, True)

    def _inspect(self) -> None:
        if self._view is None:
            return
        table, inspector = self.query_one(GroupsTable), self.query_one(Inspector)
        if self.has_class("inspecting") and inspector.has_focus:
            return  # what is being read does not move on
        inspector.show(self._view, table.selected())

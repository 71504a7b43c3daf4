"""The dashboard: one Textual program that looks at feeds and draws the view of one of them.

Data goes one way. Feeds (`feed.py`) fold events into immutable views in background tasks of this event loop;
a timer takes the selected feed's view REFRESH_HZ times a second and hands it to the widgets of the visible
screen. Nothing here acts on a node, and a crash of the screen cannot reach it. No torch and no network stack
is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.theme import Theme
from textual.widgets import ContentSwitcher, Footer

from swarm_cli.dashboard.feed import Feed, SocketFeed
from swarm_cli.dashboard.text import ACCENT, BAD, GOOD, INFO, WARN
from swarm_cli.dashboard.view import NodeView
from swarm_cli.dashboard.widgets.dialogs import help_sheet, identity_sheet
from swarm_cli.dashboard.widgets.header import NodeHeader
from swarm_cli.dashboard.widgets.overview import OverviewPane
from swarm_cli.dashboard.widgets.peers import PeersPane
from swarm_cli.dashboard.widgets.rollouts import RolloutsPane

__all__ = ["MonitorApp", "Outcome", "run_dashboard"]

REFRESH_HZ = 3
Outcome = Literal["finished", "quit"]
"""Why the dashboard closed: what it showed came to its end, or the person left."""

THEME = Theme(
    name="murmuration",
    primary=ACCENT,
    secondary=INFO,
    accent=ACCENT,
    success=GOOD,
    warning=WARN,
    error=BAD,
    foreground="#c9d1d9",
    background="#0f1318",
    surface="#0f1318",
    panel="#1a2028",
    boost="#1a2028",
    dark=True,
)


class MonitorApp(App[Outcome]):
    """Shows one of `feeds` at a time. `until` is asked at each refresh; once true, the app closes by
    itself."""

    CSS_PATH = "dashboard.tcss"
    TITLE = "murmuration"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-low"), (36, "-tall")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "show('overview')", "Overview", id="show.overview"),
        Binding("2", "show('peers')", "Peers", id="show.peers"),
        Binding("3", "show('rollouts')", "Rollouts", id="show.rollouts"),
        Binding("n", "turn(1)", "Node", id="node.next"),
        Binding("N", "turn(-1)", "Previous node", show=False, id="node.previous"),
        Binding("i", "identity", "Id", id="node.identity"),
        Binding("question_mark,f1", "help", "Help", key_display="?", id="app.help"),
        Binding("q", "leave", "Quit", id="app.quit"),
        Binding("ctrl+c", "leave", "Quit", show=False, priority=True, id="app.interrupt"),
    ]

    def __init__(self, feeds: Sequence[Feed], *, until: Callable[[], bool] | None = None) -> None:
        super().__init__()
        if not feeds:
            raise ValueError("the dashboard needs at least one feed")
        self.animation_level = "none"
        self._feeds = tuple(feeds)
        self._until = until
        self.failure: Exception | None = None
        """What `until` raised; the app closes then."""
        self._selected = 0
        self._drawn: tuple[object, ...] = ()

    @property
    def view(self) -> NodeView:
        """The newest view of the selected feed."""
        return self._feeds[self._selected].view

    def compose(self) -> ComposeResult:
        yield NodeHeader(id="header")
        with ContentSwitcher(initial="overview"):
            yield OverviewPane(id="overview")
            yield PeersPane(id="peers")
            yield RolloutsPane(id="rollouts")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.register_theme(THEME)
        self.theme = THEME.name
        for feed in self._feeds:
            self.run_worker(feed.run(), group="feeds")
        self.set_interval(1 / REFRESH_HZ, self.refresh_view)
        self.call_after_refresh(self.refresh_view)

    def refresh_view(self) -> None:
        """Draw the selected feed's view where it, the node or the screen changed."""
        try:
            over = self._until is not None and self._until()
        except Exception as error:  # not ours to judge: `run_dashboard` raises it once the terminal is back
            self.failure = error
            over = True
        if over:
            self.exit("finished")
            return
        switcher = self.query_one(ContentSwitcher)
        names = tuple(feed.view.name for feed in self._feeds)
        drawn = (self.view, names, self._selected, switcher.current)
        if drawn == self._drawn:
            return
        self._drawn = drawn
        self.query_one(NodeHeader).show(self.view, names, self._selected)
        match switcher.visible_content:
            case OverviewPane() | PeersPane() | RolloutsPane() as pane:
                pane.show(self.view)

    def action_leave(self) -> None:
        """Close because the person asked; nodes are not told."""
        self.exit("quit")

    def action_show(self, pane: str) -> None:
        """Switch to a screen."""
        switcher = self.query_one(ContentSwitcher)
        switcher.current = pane
        self.refresh_view()
        match switcher.visible_content:
            case OverviewPane() | PeersPane() | RolloutsPane() as content:
                content.enter()

    def action_turn(self, by: int) -> None:
        """Look at another node."""
        self._selected = (self._selected + by) % len(self._feeds)
        self.refresh_view()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Turning is offered only where there is more than one node."""
        return len(self._feeds) > 1 if action == "turn" else True

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(help_sheet())

    def action_identity(self) -> None:
        """Show what the node said about itself."""
        self.push_screen(identity_sheet(self.view))


def run_dashboard(sockets: Sequence[Path], *, until: Callable[[], bool] | None = None) -> Outcome:
    """Show the nodes that serve (or will serve) `sockets` until `until()` is true or the person quits.

    Blocks, and owns the terminal meanwhile: child processes must write elsewhere. Raises what `until` raises.
    """
    app = MonitorApp([SocketFeed(path) for path in sockets], until=until)
    outcome = app.run()
    if app.failure is not None:
        raise app.failure
    return outcome or "quit"

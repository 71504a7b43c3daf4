"""The tail of what the node wants its operator to know, newest at the bottom."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text
from textual.events import Resize
from textual.widgets import Static

from node.events import Notice, NoticeLevel
from swarm_cli.dashboard.text import BAD, DIM, INFO, WARN, cut, since
from swarm_cli.dashboard.view import NodeView

__all__ = ["NoticeLog"]

LEVEL_STYLES = {"info": INFO, "warning": WARN, "error": BAD}


class NoticeLog(Static):
    """As many notices as there are lines, plus one that counts what could not be read."""

    BORDER_TITLE = "log"

    _view: NodeView | None = None

    def show(self, view: NodeView) -> None:
        """Draw the notices of `view`."""
        old, self._view = self._view, view
        if old is None or (old.notices, old.malformed, old.stopped) != (
            view.notices,
            view.malformed,
            view.stopped,
        ):
            self._draw()

    def on_resize(self, event: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        if self._view is None:
            return
        cells = max(10, self.size.width - 8 - 1 - 8)
        start = self._view.started.at if self._view.started else 0
        lines = [_line(notice, start, cells) for notice in self._view.notices]
        if (stopped := self._view.stopped) is not None:
            text = f"stopped after {stopped.steps} steps: {stopped.reason}"
            lines.append(_line(Notice(at=stopped.at, level=NoticeLevel.INFO, text=text), start, cells))
        if self._view.malformed:
            text = f"lines of this feed that could not be read, skipped: {self._view.malformed}"
            lines.append((Text(""), Text("feed", WARN), Text(cut(text, cells))))
        grid = Table.grid(padding=(0, 1))
        for _ in range(3):
            grid.add_column(no_wrap=True)
        for line in lines[-max(1, self.size.height) :]:
            grid.add_row(*line)
        self.update(grid if lines else Text("nothing to report", DIM))


def _line(notice: Notice, start: int, cells: int) -> tuple[Text, Text, Text]:
    style = LEVEL_STYLES.get(notice.level, DIM)
    level = cut(notice.level, 7)
    return (
        Text(since(notice.at, start) if start else "", DIM),
        Text(level, style),
        Text(cut(notice.text, cells)),
    )

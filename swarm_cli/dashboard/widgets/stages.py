"""The stage strip `rollout | verify | share | weight | train | broadcast`: how full each queue is, and what
each stage waits for, so that the one that holds up the others is seen at once."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text
from textual.events import Resize
from textual.widgets import Static

from node.events import StageStatus
from swarm_cli.dashboard.text import ACCENT, DIM, GOOD, WARN, cut, duration
from swarm_cli.dashboard.view import NodeView

__all__ = ["STAGES", "StageStrip"]

STAGES = ("rollout", "verify", "share", "weight", "train", "broadcast")
LONG_WAIT_S = 30.0


class StageStrip(Static):
    """A column for each, in the order of the flow."""

    BORDER_TITLE = "stages"

    _stages: tuple[StageStatus, ...] = ()

    def show(self, view: NodeView) -> None:
        """Draw the stages of `view`."""
        if view.stages is not self._stages:
            self._stages = view.stages
            self._draw()

    def on_mount(self) -> None:
        self._draw()

    def on_resize(self, event: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        known = {status.stage: status for status in self._stages}
        # A follower has fewer of them.
        standard = [name for name in STAGES if name in known] or STAGES
        names = (*standard, *(name for name in known if name not in STAGES))[:8]
        cells = max(8, self.content_size.width // len(names) - 1)
        grid = Table.grid(expand=True, padding=(0, 1))
        for _ in names:
            grid.add_column(ratio=1, no_wrap=True)
        columns = [_column(name, known.get(name), cells) for name in names]
        for row in zip(*columns, strict=True):
            grid.add_row(*row)
        self.update(grid)


def _column(name: str, status: StageStatus | None, cells: int) -> tuple[Text, Text, Text, Text]:
    """Name with the time it waits, queue, and two lines that say for what."""
    if status is None:
        return Text(cut(name, cells), DIM), Text("–", DIM), Text(), Text()
    if not status.waiting_for and not status.stalled_s:
        return Text(cut(name, cells), f"bold {ACCENT}"), _queue(status, cells), Text("working", GOOD), Text()
    style = WARN if status.stalled_s or status.waiting_s >= LONG_WAIT_S else DIM
    first, second = _two_lines(status.waiting_for or "one piece of work", cells)
    waited = duration(status.stalled_s or status.waiting_s)
    title = Text.assemble((cut(name, cells), "bold"))
    if len(name) + 1 + len(waited) <= cells:
        title.append(f" {waited}", style)
    return title, _queue(status, cells), Text(first, style), Text(second, style)


def _two_lines(text: str, cells: int) -> tuple[str, str]:
    """`text` broken between words where that makes it fit."""
    if len(text) <= cells or " " not in text:
        return cut(text, cells), ""
    at = text.rfind(" ", 0, cells + 1)
    at = at if at > 0 else text.find(" ")
    return cut(text[:at], cells), cut(text[at + 1 :], cells)


def _queue(status: StageStatus, cells: int) -> Text:
    """`▮▮▮▯▯ 12/16`, without the bar where there is no queue or no room."""
    if status.capacity <= 0:
        return Text(f"{status.queued} queued" if status.queued else "no queue", DIM)
    numbers = f"{status.queued}/{status.capacity}"
    share = min(1.0, max(0.0, status.queued / status.capacity))
    width = min(10, cells - len(numbers) - 1)
    style = WARN if share >= 1 else GOOD
    if width < 3:
        return Text(numbers, style)
    full = round(share * width)
    return Text.assemble(("━" * full, style), ("━" * (width - full), "#333c47"), f" {numbers}")

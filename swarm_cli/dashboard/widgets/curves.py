"""Reward and loss over the steps, and the held-out result before training and now."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.events import Resize
from textual.widgets import Sparkline, Static

from node.events import Evaluated, StepDone
from swarm_cli.dashboard.text import BAD, DIM, GOOD, decimal, signed
from swarm_cli.dashboard.view import NodeView

__all__ = ["Curve", "Curves"]


class Curve(Horizontal):
    """One named series: its name and newest value, the sparkline, and its range."""

    def __init__(self, name: str, value: Callable[[StepDone], float], *, digits: int, id: str) -> None:
        super().__init__(id=id, classes="curve")
        self._series = name
        self._value = value
        self._digits = digits

    def compose(self) -> ComposeResult:
        yield Static(classes="curve-name")
        yield Sparkline([], summary_function=fmean)
        yield Static(classes="curve-range")

    def show(self, steps: tuple[StepDone, ...]) -> None:
        """Draw the series of `steps`; a skipped step has no values."""
        values = [v for step in steps if not step.skipped and math.isfinite(v := self._value(step))]
        newest, spread = "–", ""
        if values:
            newest = decimal(values[-1], self._digits)
            spread = f"max {decimal(max(values), self._digits)}\nmin {decimal(min(values), self._digits)}"
        self.query_one(".curve-name", Static).update(
            Text.assemble((f"{self._series}\n", DIM), (newest, "bold"))
        )
        self.query_one(".curve-range", Static).update(Text(spread, DIM))
        sparkline = self.query_one(Sparkline)
        sparkline.set_class(not values, "empty")
        sparkline.data = values


class Curves(Vertical):
    """The first thing to look at: is it learning?"""

    BORDER_TITLE = "learning"

    _view: NodeView | None = None

    def compose(self) -> ComposeResult:
        yield Curve("reward", lambda step: step.reward, digits=3, id="reward")
        yield Curve("loss", lambda step: step.loss, digits=3, id="loss")
        yield Static(id="held-out")

    def show(self, view: NodeView) -> None:
        """Draw the curves and the held-out line of `view`."""
        self._view = view
        for curve in self.query(Curve):
            curve.show(view.steps)
        self._show_held_out()

    def on_resize(self, event: Resize) -> None:
        self._show_held_out()

    def _show_held_out(self) -> None:
        if self._view is not None:
            self.query_one("#held-out", Static).update(_held_out(self._view, wide=self.size.width >= 100))


def _held_out(view: NodeView, *, wide: bool) -> Text:
    latest = view.evaluations[-1] if view.evaluations else None
    text = Text.assemble(("held-out ", DIM), no_wrap=True, overflow="ellipsis")
    if latest is None:
        return text.append("not measured yet")
    before = view.before if view.before is not latest else None
    text.append_text(_change("sampled", before, latest, latest.sampled))
    text.append("  ")
    text.append_text(_change("greedy", before, latest, latest.greedy))
    versions = f"v{latest.policy_version}"
    if before is not None:
        versions = f"v{before.policy_version} → {versions}"
    return text.append(f"  {versions}, {latest.prompts} prompts" if wide else f"  {versions}", DIM)


def _change(name: str, before: Evaluated | None, latest: Evaluated, now: float) -> Text:
    text = Text.assemble((f"{name} ", DIM))
    if before is None:
        return text.append(decimal(now), "bold")
    then = before.sampled if name == "sampled" else before.greedy
    text.append(f"{decimal(then)} → ", "")
    text.append(decimal(now), "bold")
    return text.append(f" ({signed(now - then)})", GOOD if now >= then else BAD)

"""How the screen looks: a frozen view (and so a frozen clock), no animation, no blinking cursor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from textual.pilot import Pilot

from swarm_cli.dashboard.app import MonitorApp, Outcome
from swarm_cli.dashboard.feed import Feed
from swarm_cli.dashboard.view import NodeView

pytestmark = pytest.mark.slow

SIZES = {"80x24": (80, 24), "160x50": (160, 50)}
SCREENS = {
    "overview": (),
    "peers": ("2", "j"),
    "rollouts": ("3", "j", "j"),
    "inspector": ("3", "enter"),
    "help": ("?",),
    "identity": ("i",),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("screen", SCREENS)
def test_looks_as_before(
    snap_compare: Callable[..., bool],
    sample_view: NodeView,
    frozen_feed: type[Feed],
    screen: str,
    size: str,
) -> None:
    app = MonitorApp([frozen_feed(sample_view), frozen_feed(NodeView(label="bob"))])

    async def go(pilot: Pilot[Outcome]) -> None:
        app.refresh_view()
        await pilot.press(*SCREENS[screen])
        await pilot.pause()

    assert snap_compare(app, terminal_size=SIZES[size], run_before=go)

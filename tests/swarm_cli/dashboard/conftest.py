"""A frozen node for the screen: the recorded sample folded once, and a feed that never changes."""

from __future__ import annotations

import pytest

from swarm_cli.dashboard.feed import Feed, read_event
from swarm_cli.dashboard.view import Link, NodeView, fold, set_link
from tests.swarm_cli.dashboard.make_sample import SAMPLE


class FrozenFeed(Feed):
    """Shows `view`, which a test may replace."""

    def __init__(self, view: NodeView) -> None:
        super().__init__(view.label)
        self._view = view

    def put(self, view: NodeView) -> None:
        """Change what is shown."""
        self._view = view

    async def run(self) -> None:
        """Nothing comes."""


@pytest.fixture(scope="session")
def sample_view() -> NodeView:
    """The view at the end of the sample, as of a node that still runs."""
    view = NodeView(label="alice")
    for line in SAMPLE.read_bytes().splitlines():
        event = read_event(line)
        if event is None:
            raise ValueError(f"{SAMPLE} holds a line that is no event: {line[:80]!r}")
        view = fold(view, event)
    return set_link(view, Link.LIVE)


@pytest.fixture(scope="session")
def frozen_feed() -> type[FrozenFeed]:
    """The class, for tests that need several feeds."""
    return FrozenFeed

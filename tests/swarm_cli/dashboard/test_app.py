"""The program under a pilot: keys, switching, the inspector, and that text of peers is inert."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import ContentSwitcher

from node.events import (
    CheckOutcome,
    GroupJudged,
    NodeStarted,
    Notice,
    NoticeLevel,
    PeersSeen,
    StagesSeen,
    StageStatus,
)
from swarm_cli.dashboard.app import MonitorApp, Outcome
from swarm_cli.dashboard.feed import Feed, ReplayFeed, SocketFeed
from swarm_cli.dashboard.view import Link, NodeView, fold, inert_event, lose_line, set_link
from swarm_cli.dashboard.widgets.dialogs import Sheet
from swarm_cli.dashboard.widgets.peers import PeersTable
from swarm_cli.dashboard.widgets.rollouts import GroupsTable, Inspector
from tests.swarm_cli.dashboard.make_sample import BOB, SAMPLE, sample_events

SMALL, LARGE = (80, 24), (160, 50)
EVENTS = list(sample_events())
GROUP = next(event for event in EVENTS if isinstance(event, GroupJudged) and not event.own)
PEERS = next(event for event in EVENTS if isinstance(event, PeersSeen))
STARTED = next(event for event in EVENTS if isinstance(event, NodeStarted))

slow = pytest.mark.slow
Frozen = type[Feed]


def shown(app: MonitorApp) -> str:
    """Everything on the screen, line by line, without styles: from the picture that Textual makes of it."""
    picture = ElementTree.fromstring(app.export_screenshot())
    lines: dict[float, list[str]] = {}
    for run in picture.iter("{http://www.w3.org/2000/svg}text"):
        lines.setdefault(float(run.attrib["y"]), []).append("".join(run.itertext()))
    return "\n".join("".join(runs) for _, runs in sorted(lines.items())).replace("\xa0", " ")


async def settle(app: MonitorApp, pilot: Pilot[Outcome]) -> None:
    """Draw what the feeds say now."""
    app.refresh_view()
    await pilot.pause()


@slow
def test_the_dashboard_starts_without_torch_or_a_network_stack() -> None:
    code = (
        "import sys, swarm_cli.dashboard.app, swarm_cli.commands.monitor, node.telemetry;"
        "print([m for m in ('torch', 'transformers', 'hivemind', 'libp2p', 'vllm') if m in sys.modules])"
    )
    root = Path(__file__).parents[3]
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_every_binding_has_an_id() -> None:
    for owner in (MonitorApp, PeersTable, GroupsTable, Inspector, Sheet):
        assert all(binding.id for binding in owner.BINDINGS), owner  # type: ignore[union-attr]


@slow
@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_digits_switch_screens(
    sample_view: NodeView, frozen_feed: Frozen, size: tuple[int, int]
) -> None:
    app = MonitorApp([frozen_feed(sample_view)])
    async with app.run_test(size=size) as pilot:
        await settle(app, pilot)
        switcher = app.query_one(ContentSwitcher)
        assert "learning" in shown(app)
        assert "0.10 → 0.69 (+0.59)" in shown(app)
        await pilot.press("2")
        assert switcher.current == "peers"
        assert BOB in shown(app)
        await pilot.press("3")
        assert switcher.current == "rollouts"
        assert "false_reward" in shown(app)
        await pilot.press("1")
        assert switcher.current == "overview"


@slow
async def test_moving_in_the_peers_table_changes_the_detail(
    sample_view: NodeView, frozen_feed: Frozen
) -> None:
    app = MonitorApp([frozen_feed(sample_view)])
    async with app.run_test(size=SMALL) as pilot:
        await settle(app, pilot)
        await pilot.press("2", "j", "down")
        assert "12D3KooWMaLLo" in shown(app)
        assert "false_reward 48, copied 3, rate 1" in shown(app)
        await pilot.press("k")
        assert "another tokenizer" in shown(app)


@slow
async def test_enter_opens_the_inspector_and_escape_closes_it(
    sample_view: NodeView, frozen_feed: Frozen
) -> None:
    app = MonitorApp([frozen_feed(sample_view)])
    async with app.run_test(size=SMALL) as pilot:
        await settle(app, pilot)
        await pilot.press("3")
        assert not app.query_one(Inspector).display
        await pilot.press("enter")
        text = shown(app)
        assert "refused: false_reward" in text
        assert "by mallory" in text
        assert "State the final answer to the following arithmetic problem: 26 + 51 =" in text
        assert "I think it is a big number" in text
        await pilot.press(*["j"] * 12)
        assert "claimed 1.00, got 0.00" in shown(app)
        assert "14.2 ms" in shown(app)
        await pilot.press("1", "3", "escape")
        assert not app.query_one(Inspector).display
        await pilot.press("j")
        assert app.query_one("#groups-table", GroupsTable).cursor_row == 1


@slow
async def test_the_inspector_stays_on_what_is_read_while_groups_come(
    sample_view: NodeView, frozen_feed: Frozen
) -> None:
    feed = frozen_feed(sample_view)
    app = MonitorApp([feed])
    newer = msgspec.structs.replace(GROUP, question="what is new?", at=sample_view.at)
    async with app.run_test(size=LARGE) as pilot:
        await settle(app, pilot)
        await pilot.press("3", "j", "j", "enter")
        table = app.query_one("#groups-table", GroupsTable)
        selected = table.selected_key
        feed.put(fold(sample_view, newer))  # type: ignore[attr-defined]
        await settle(app, pilot)
        assert table.selected_key == selected
        assert table.cursor_row == 3
        assert "19 + 40 =" in shown(app)
        await pilot.press("escape", "g")
        assert "what is new?" in shown(app)
        feed.put(fold(fold(sample_view, newer), msgspec.structs.replace(newer, question="newest?")))  # type: ignore[attr-defined]
        await settle(app, pilot)
        assert table.cursor_row == 0, "a cursor on the newest stays on the newest"
        assert "newest?" in shown(app)


@slow
async def test_the_filter_goes_round(sample_view: NodeView, frozen_feed: Frozen) -> None:
    app = MonitorApp([frozen_feed(sample_view)])
    async with app.run_test(size=SMALL) as pilot:
        await settle(app, pilot)
        await pilot.press("3")
        table = app.query_one("#groups-table", GroupsTable)
        counts = [table.row_count]
        for _ in range(4):
            await pilot.press("f")
            counts.append(table.row_count)
        assert counts == [96, 16, 48, 48, 96]


@slow
async def test_n_turns_to_the_next_node(sample_view: NodeView, frozen_feed: Frozen) -> None:
    bob = msgspec.structs.replace(STARTED, name="bob", peer_id=BOB)
    other = set_link(fold(NodeView(label="bob"), bob), Link.GONE)
    app = MonitorApp([frozen_feed(sample_view), frozen_feed(other)])
    async with app.run_test(size=SMALL) as pilot:
        await settle(app, pilot)
        assert "live" in shown(app)
        await pilot.press("3", "enter", "n")
        assert app.view is other
        assert "gone" in shown(app)
        assert not app.query_one(Inspector).display, "the group read before is not one of this node"
        await pilot.press("N")
        assert app.view is sample_view


@slow
async def test_a_single_node_offers_no_turning(sample_view: NodeView, frozen_feed: Frozen) -> None:
    app = MonitorApp([frozen_feed(sample_view)])
    async with app.run_test(size=SMALL) as pilot:
        await settle(app, pilot)
        assert "n Node" not in shown(app)
        await pilot.press("n")
        assert app.view is sample_view


@slow
async def test_sheets_open_and_close(sample_view: NodeView, frozen_feed: Frozen) -> None:
    app = MonitorApp([frozen_feed(sample_view)])
    async with app.run_test(size=SMALL) as pilot:
        await settle(app, pilot)
        await pilot.press("i")
        assert isinstance(app.screen, Sheet)
        assert app.screen.heading == "this node"
        assert STARTED.peer_id in shown(app)
        app.refresh_view()
        await pilot.press("escape", "?")
        assert isinstance(app.screen, Sheet)
        assert app.screen.heading == "keys"
        await pilot.press("q")
        assert app.is_running
        assert not isinstance(app.screen, Sheet)


@slow
async def test_q_quits(sample_view: NodeView, frozen_feed: Frozen) -> None:
    app = MonitorApp([frozen_feed(sample_view)])
    async with app.run_test(size=SMALL) as pilot:
        await pilot.press("q")
    assert app.return_value == "quit"


@slow
async def test_the_app_closes_by_itself_when_told(sample_view: NodeView, frozen_feed: Frozen) -> None:
    over = False
    app = MonitorApp([frozen_feed(sample_view)], until=lambda: over)
    async with app.run_test(size=SMALL) as pilot:
        await settle(app, pilot)
        over = True
        await settle(app, pilot)
    assert app.return_value == "finished"


@slow
async def test_an_error_of_the_caller_closes_the_app_and_is_kept(
    sample_view: NodeView, frozen_feed: Frozen
) -> None:
    error = RuntimeError("a child died")

    def until() -> bool:
        raise error

    app = MonitorApp([frozen_feed(sample_view)], until=until)
    async with app.run_test(size=SMALL) as pilot:
        await settle(app, pilot)
    assert app.failure is error


@slow
async def test_an_empty_view_is_drawn(frozen_feed: Frozen, tmp_path: Path) -> None:
    app = MonitorApp([SocketFeed(tmp_path / "none.sock", "somebody")])
    async with app.run_test(size=SMALL) as pilot:
        await settle(app, pilot)
        assert "connecting" in shown(app)
        assert "waiting for the first step" in shown(app)
        await pilot.press("2")
        assert "no peers yet" in shown(app)
        await pilot.press("3", "enter")
        assert app.is_running


@slow
async def test_lost_lines_are_one_notice(sample_view: NodeView, frozen_feed: Frozen) -> None:
    app = MonitorApp([frozen_feed(lose_line(lose_line(sample_view)))])
    async with app.run_test(size=SMALL) as pilot:
        await settle(app, pilot)
        assert shown(app).count("could not be read, skipped: 2") == 1


@slow
async def test_a_replay_is_shown() -> None:
    app = MonitorApp([ReplayFeed(SAMPLE)])
    async with app.run_test(size=SMALL) as pilot:
        for _ in range(50):
            if app.view.link is Link.ENDED:
                break
            await pilot.pause()
        await settle(app, pilot)
        assert "replay ended" in shown(app)
        assert "v48" in shown(app)


EVIL = "\x1b[31m\x1b]8;;http://evil\x1b\\x\x1b]8;;\x1b\\[bold]b[/][@click=app.quit]c[/]\u202etxt\u2066\x07\x9b2J\r"
FORBIDDEN = ("\x1b", "\x9b", "\x07", "\r", "\u202e", "\u2066")


def _hostile_view() -> NodeView:
    """A node whose peers, and whose recording, put hostile text wherever text can stand."""
    peer = msgspec.structs.replace(PEERS.peers[0], name=EVIL, rejected={EVIL: 3}, peer_id=f"12D3KooW{EVIL}")
    check = CheckOutcome(check=EVIL, verdict=EVIL, reason=EVIL, cost_s=0.1)
    group = msgspec.structs.replace(
        GROUP,
        author=peer.peer_id,
        accepted=False,
        reason=EVIL,
        group=EVIL,
        environment=EVIL,
        question=EVIL,
        completions=(EVIL, "plain"),
        rewards=(1.0,),
        checks=(check,),
    )
    stage = StageStatus(stage=EVIL, queued=1, capacity=2, waiting_for=EVIL, waiting_s=1.0)
    started = msgspec.structs.replace(
        STARTED, name=EVIL, swarm=EVIL, model=EVIL, addresses=(EVIL,), sandbox=EVIL
    )
    view = NodeView(label=EVIL)
    for event in (
        started,
        PeersSeen(at=STARTED.at, peers=(peer,)),
        group,
        StagesSeen(at=STARTED.at, stages=(stage,)),
        Notice(at=STARTED.at, level=NoticeLevel.WARNING, text=EVIL),
    ):
        view = fold(view, inert_event(event))
    return view


@slow
@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_text_of_peers_is_inert_on_every_screen(frozen_feed: Frozen, size: tuple[int, int]) -> None:
    app = MonitorApp([frozen_feed(_hostile_view()), frozen_feed(_hostile_view())])
    async with app.run_test(size=size) as pilot:
        await settle(app, pilot)
        seen = shown(app)
        for keys in (("2",), ("3",), ("enter",), ("escape", "n"), ("i",)):
            await pilot.press(*keys)
            await settle(app, pilot)
            seen += shown(app)
        for sequence in FORBIDDEN:
            assert sequence not in seen
        assert (
            "\ufffd[31m\ufffd]8;;http://evil\ufffd\\x\ufffd]8;;\ufffd\\[bold]b[/][@click=app.quit]c[/]\ufffdtxt"
            in seen
        )
        assert app.is_running

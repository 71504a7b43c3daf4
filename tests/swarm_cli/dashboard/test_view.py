"""Folding: bounded, pure, and right about restarts. Expected values are worked out by hand."""

from __future__ import annotations

import msgspec
import pytest

from node.events import (
    BlobStatus,
    Evaluated,
    GroupJudged,
    NodeStarted,
    NodeStopped,
    Notice,
    PeersSeen,
    PeerStatus,
    StagesSeen,
    StageStatus,
    StepDone,
    WeightsSeen,
)
from swarm_cli.dashboard.view import (
    MAX_GROUPS,
    MAX_NOTICES,
    MAX_STEPS,
    Link,
    NodeView,
    fold,
    inert_event,
    lose_line,
    set_link,
)
from swarm_cli.dashboard.widgets.facts import facts_of
from tests.swarm_cli.dashboard.make_sample import ALICE, BOB, STEPS, sample_events, stopped_event

EVENTS = list(sample_events())
STARTED = next(event for event in EVENTS if isinstance(event, NodeStarted))
STEP = next(event for event in EVENTS if isinstance(event, StepDone))
GROUP = next(event for event in EVENTS if isinstance(event, GroupJudged))
PEERS = next(event for event in EVENTS if isinstance(event, PeersSeen))
EVALUATED = next(event for event in EVENTS if isinstance(event, Evaluated))


def folded(*events: object, view: NodeView | None = None) -> NodeView:
    result = view or NodeView(label="node")
    for event in events:
        result = fold(result, event)  # type: ignore[arg-type]
    return result


def step(version: int, *, skipped: bool = False, loss: float = 0.5) -> StepDone:
    return msgspec.structs.replace(STEP, policy_version=version, skipped=skipped, loss=loss)


def test_the_sample_folds_to_what_it_says() -> None:
    view = folded(*EVENTS)
    assert view.name == "alice"
    assert view.peer_id == ALICE
    assert view.policy_version == STEPS
    assert [s.policy_version for s in view.steps] == list(range(1, STEPS + 1))
    assert view.before is not None
    assert view.before.policy_version == 0
    assert view.evaluations[-1].moment == "after"
    assert [peer.name for peer in view.peers] == ["bob", "carol", "mallory"]
    assert view.connected == 2
    assert view.groups_judged == 96
    assert len(view.notices) == 4
    assert view.uptime_s == pytest.approx(123.5)


def test_folding_leaves_the_old_view_alone() -> None:
    view = folded(STARTED)
    later = fold(view, STEP)
    assert view.steps == ()
    assert later.steps == (STEP,)


def test_histories_are_bounded_and_keep_the_newest() -> None:
    view = folded(*(step(version) for version in range(1, MAX_STEPS + 11)))
    assert len(view.steps) == MAX_STEPS
    assert view.steps[-1].policy_version == MAX_STEPS + 10
    view = folded(*[GROUP] * (MAX_GROUPS + 5))
    assert len(view.groups) == MAX_GROUPS
    assert view.groups_judged == MAX_GROUPS + 5
    assert view.groups[-1].number == MAX_GROUPS + 5
    view = folded(*(Notice(at=n, level="info", text=str(n)) for n in range(MAX_NOTICES + 3)))
    assert [view.notices[0].text, view.notices[-1].text] == ["3", str(MAX_NOTICES + 2)]


def test_versions_made_again_after_a_resume_replace_the_old_ones() -> None:
    view = folded(STARTED, step(1), step(2), step(3, loss=9.0), STARTED, step(3, loss=0.25))
    assert [(s.policy_version, s.loss) for s in view.steps] == [(1, 0.5), (2, 0.5), (3, 0.25)]


def test_a_skipped_step_drops_nothing() -> None:
    view = folded(step(1), step(2), step(2, skipped=True), step(3))
    assert [(s.policy_version, s.skipped) for s in view.steps] == [
        (1, False),
        (2, False),
        (2, True),
        (3, False),
    ]


def test_another_node_in_the_same_file_starts_afresh() -> None:
    other = msgspec.structs.replace(STARTED, peer_id=BOB, name="bob")
    view = folded(STARTED, STEP, GROUP, other)
    assert view.name == "bob"
    assert view.steps == ()
    assert view.groups == ()


def test_the_first_result_before_training_stays() -> None:
    later = msgspec.structs.replace(EVALUATED, policy_version=20, sampled=0.5)
    again = msgspec.structs.replace(EVALUATED, policy_version=0, sampled=0.3)
    assert folded(EVALUATED, later).before == EVALUATED
    assert folded(EVALUATED, later, again).before == again


def test_snapshots_replace_each_other() -> None:
    stage = StageStatus(stage="train", queued=1, capacity=1, waiting_for="", waiting_s=0.0)
    view = folded(StagesSeen(at=1, stages=(stage, stage)), StagesSeen(at=2, stages=(stage,)))
    assert view.stages == (stage,)


def test_a_peer_listed_twice_is_shown_once() -> None:
    first: PeerStatus = PEERS.peers[0]
    second = msgspec.structs.replace(first, accepted=77)
    view = folded(PeersSeen(at=1, peers=(first, second)))
    assert view.peers == (second,)


def test_stopping_is_told_apart_from_going_away() -> None:
    live = set_link(NodeView(label="x"), Link.LIVE)
    stopped = fold(live, stopped_event())
    assert stopped.link is Link.STOPPED
    assert isinstance(stopped.stopped, NodeStopped)
    again = fold(stopped, STARTED)
    assert again.link is Link.LIVE
    assert again.stopped is None
    replayed = fold(set_link(live, Link.REPLAY), stopped_event())
    assert replayed.link is Link.REPLAY


def test_time_never_runs_backwards() -> None:
    view = folded(Notice(at=500, level="info", text=""), Notice(at=400, level="info", text=""))
    assert view.at == 500


def test_lost_lines_are_counted() -> None:
    assert lose_line(lose_line(NodeView(label="x"))).malformed == 2


def test_names_of_peers_fall_back_to_the_tail_of_the_id() -> None:
    view = folded(STARTED, PEERS)
    assert view.name_of(BOB) == "bob"
    assert view.name_of(ALICE) == "alice"
    assert view.name_of("12D3KooWunknown") == "…Wunknown"


def test_texts_of_an_event_become_inert_wherever_they_stand() -> None:
    evil = "a\x1b]8;;http://x\x1b\\b\u202ec\u2066d\x07[bold]e"
    peer = msgspec.structs.replace(PEERS.peers[0], name=evil, rejected={evil: 1})
    event = inert_event(PeersSeen(at=1, peers=(peer,)))
    shown = "a\ufffd]8;;http://x\ufffd\\b\ufffdc\ufffdd\ufffd[bold]e"
    assert event.peers[0].name == shown
    assert event.peers[0].rejected == {shown: 1}
    group = inert_event(msgspec.structs.replace(GROUP, question=evil, completions=(evil, "ok\n\tfine")))
    assert group.question == shown
    assert group.completions == (shown, "ok\n\tfine")


def test_an_inert_event_is_unchanged_when_it_was_inert() -> None:
    assert inert_event(GROUP) == GROUP
    assert inert_event(STEP) == STEP


def test_numbers_beyond_64_bits_are_capped() -> None:
    huge = inert_event(msgspec.structs.replace(STARTED, params=10**400))
    assert huge.params == 2**63


def weights(owner: str, version: int, head: int, *blobs: BlobStatus) -> WeightsSeen:
    return WeightsSeen(
        at=STARTED.at,
        owner=owner,
        policy_version=version,
        head=head,
        followers=2,
        sent_bytes=1_500_000,
        received_bytes=20_000,
        blobs=blobs,
    )


def test_a_follower_shows_whose_version_it_generates_with() -> None:
    started = msgspec.structs.replace(STARTED, role="follower")
    fetched = BlobStatus(chunks=16, have=5, peers=2, bytes_per_s=1e6)
    view = folded(started, PEERS, weights(BOB, 7, 9, fetched))
    assert (view.role, view.policy_version) == ("follower", 7)
    assert [(label, value) for label, value, _ in facts_of(view)] == [
        ("follows", "bob"),
        ("generates with", "v7"),
        ("behind its owner", "2 versions"),
        ("fetching chunks", "5/16"),
        ("weights in+out", "20.0k+1.5MB"),
    ]
    assert folded(started).policy_version == -1
    assert ("follows", "nobody") in [fact[:2] for fact in facts_of(folded(started, weights("", -1, -1)))]


def test_an_owner_shows_its_followers() -> None:
    view = folded(STARTED, weights(ALICE, 7, 7))
    assert [(label, value) for label, value, _ in facts_of(view)] == [
        ("followers", "2"),
        ("published", "v7"),
        ("weights in+out", "20.0k+1.5MB"),
    ]
    trained = msgspec.structs.replace(STEP, groups_followers=3, staleness_followers=1.5)
    assert ("of followers", "3, 1.5 behind") in [fact[:2] for fact in facts_of(folded(STARTED, trained))]

"""What the soak reads from events, and that slopes are slopes."""

from __future__ import annotations

import pytest

from node.events import Event, GroupJudged, PeersSeen, PeerStatus, StagesSeen, StageStatus
from swarm_cli.bench.soak.record import EXPLAINS_S, NodeRecord, slope
from tests.swarm_cli.dashboard.make_sample import sample_events


def test_a_slope_is_growth_per_minute_with_its_interval() -> None:
    grows = slope([(float(s), 5.0 + 0.5 * s) for s in range(10)])
    assert (grows.per_minute, grows.noise) == (pytest.approx(30.0), pytest.approx(0.0, abs=1e-9))
    # 0 and 1 by turns: slope sum((s - 1.5)(v - .5)) / 5 = 0.2 a second; residuals -.2 .6 -.6 .2, squares 0.8,
    # over 2 degrees of freedom and 5: 0.08
    swings = slope([(0.0, 0.0), (1.0, 1.0), (2.0, 0.0), (3.0, 1.0)])
    assert swings.per_minute == pytest.approx(12.0)
    assert swings.noise == pytest.approx(60 * 1.96 * 0.08**0.5)
    assert slope([(0.0, 1.0), (0.0, 2.0), (0.0, 3.0)]) == slope([]) == slope([(0.0, 1.0), (1.0, 2.0)])


def of(kind: type[Event]) -> list[Event]:
    return [event for event in sample_events() if isinstance(event, kind)]


def test_what_a_kill_has_cost() -> None:
    record = NodeRecord()
    steps = [event for event in sample_events() if type(event).__name__ == "StepDone"]
    for event in steps[:6]:
        record.take(event, 1.0)
    record.killed(10.0)
    for event in steps[4:]:  # two of the six are done again
        record.take(event, 13.0)
    assert record.lost_steps == 2
    assert record.recovered_s == {"kill": 3.0}
    assert record.versions == len(steps) + 2


def test_groups_and_slots_count_once() -> None:
    record = NodeRecord()
    groups = [event for event in of(GroupJudged) if isinstance(event, GroupJudged)]
    assert any(event.own for event in groups)
    assert any(event.accepted and not event.own for event in groups)
    for event in groups:
        record.take(event, 1.0)
    assert record.twice == 0
    record.killed(2.0)
    for event in groups:
        record.take(event, 3.0)
    assert record.twice == sum(event.own or event.accepted for event in groups)


def test_trust_that_a_kill_has_cost() -> None:
    record = NodeRecord()
    record.take(peers(a=0.99, b=0.2), 1.0)
    record.killed(2.0)
    record.take(peers(a=0.5, b=0.2), 3.0)
    assert record.trust_lost == pytest.approx(0.49)


def peers(**trust: float) -> PeersSeen:
    (*_, sample) = (event for event in of(PeersSeen) if isinstance(event, PeersSeen) and event.peers)
    fields = {name: getattr(sample.peers[0], name) for name in PeerStatus.__struct_fields__}
    rows = tuple(PeerStatus(**(fields | {"peer_id": name, "trust": value})) for name, value in trust.items())
    return PeersSeen(at=0, peers=rows)


def test_stalls_that_no_fault_explains() -> None:
    record = NodeRecord()
    record.take(stages(0.0), 0.0)
    record.take(stages(70.0), 200.0)
    record.take(stages(71.0), 201.0)
    assert record.stalls == ["train"]
    record.take(stages(0.0), 202.0)
    record.fault("disk", 300.0)
    record.take(stages(70.0), 300.0 + EXPLAINS_S)
    assert record.stalls == ["train"]


def stages(stalled_s: float) -> StagesSeen:
    train = StageStatus(
        stage="train", queued=0, capacity=0, waiting_for="a batch", waiting_s=1.0, stalled_s=stalled_s
    )
    return StagesSeen(at=0, stages=(train,))

"""The provisioning rules: each formula by hand, then what any plan must satisfy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.weights.follow.provision import (
    HEADROOM,
    Load,
    Provision,
    Worker,
    busy_share,
    by_cost,
    depth,
    dissemination_s,
    exposed_s,
    needed_groups_per_s,
    provision,
    resulting_staleness,
    update_bytes,
)
from protocol.errors import OurFault

LOAD = Load(
    step_s=10.0,
    groups=20.0,
    own_groups_per_s=0.5,
    rollout_s=8.0,
    update_bytes=1e6,
    link_bits_per_s=20e6,
    staleness=6,
)


def alike(rate: float, count: int) -> list[Worker]:
    return [Worker(f"w{k:03}", rate) for k in range(count)]


# --- formulas -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("followers", "hops"), [(0, 0), (1, 1), (2, 2), (8, 4), (16, 5)])
def test_depth_is_one_hop_and_one_more_for_each_doubling(followers: int, hops: float) -> None:
    assert depth(followers) == hops


def test_dissemination_is_one_copy_and_a_chunk_for_each_further_hop() -> None:
    """32 MB in 489 chunks of 64 KiB over 20 Mbit/s: 12.8 s, and 3 of 489 more for the fourth hop."""
    assert dissemination_s(32e6, 20e6, 1) == pytest.approx(12.8)
    assert dissemination_s(32e6, 20e6, 8) == pytest.approx(12.8 * (1 + 3 / 489))
    assert dissemination_s(32e6, 20e6, 0) == 0


def test_a_blob_of_one_chunk_is_not_pipelined() -> None:
    assert dissemination_s(1000, 8000, 4) == pytest.approx(3.0)


def test_an_update_over_several_steps_grows_by_its_new_changes_up_to_a_copy() -> None:
    assert update_bytes(LOAD, 1) == 1e6
    assert update_bytes(LOAD, 3) == 1e6 * (1 + 0.75 * 2)
    assert update_bytes(replace(LOAD, full_bytes=2e6), 3) == 2e6


def test_capacity() -> None:
    """20 groups in 10 s less 4 s of dissemination in every second step: 20/8."""
    assert needed_groups_per_s(LOAD, 4.0, 2) == 2.5
    assert needed_groups_per_s(LOAD, 20.0, 2) == math.inf


def test_only_what_does_not_overlap_generation_is_exposed() -> None:
    assert exposed_s(replace(LOAD, apply_s=0.5), 3.0) == 0.5
    assert exposed_s(replace(LOAD, apply_s=0.5, overlap=False), 3.0) == 3.5


@pytest.mark.parametrize(
    ("dissemination", "rollout_s", "every", "expected"),
    [(3.0, 8.0, 4, 6), (10.0, 10.0, 1, 3), (10.1, 10.0, 1, 4), (25.0, 31.0, 2, 9)],
)
def test_staleness_counts_whole_steps(
    dissemination: float, rollout_s: float, every: int, expected: int
) -> None:
    assert resulting_staleness(replace(LOAD, rollout_s=rollout_s), dissemination, every) == expected


@given(staleness=st.integers(1, 20), dissemination=st.floats(0.01, 100), rollout_s=st.floats(0.01, 100))
def test_the_interval_one_below_the_bound_is_never_feasible(
    staleness: int, dissemination: float, rollout_s: float
) -> None:
    """What ECHO-2 names, kappa = S - 1: both ceilings are at least 1."""
    load = replace(LOAD, rollout_s=rollout_s)
    assert resulting_staleness(load, dissemination, staleness - 1) > staleness


def test_busy_share_is_the_step_over_the_longest_of_what_it_waits_for() -> None:
    assert busy_share(LOAD, 4.0, 0.0, 1) == 1.0
    assert busy_share(LOAD, 1.0, 0.0, 1) == 0.5
    assert busy_share(LOAD, 2.0, 20.0, 2) == 0.5
    assert busy_share(replace(LOAD, own_groups_per_s=0.05), 4.0, 0.0, 1) == 0.5


def test_workers_are_activated_by_cost_per_group() -> None:
    cheap, fast, slow = Worker("cheap", 1.0, 1.0), Worker("fast", 4.0, 8.0), Worker("slow", 0.1, 0.2)
    assert by_cost([slow, fast, cheap]) == [cheap, fast, slow]
    assert by_cost([Worker("b", 1.0), Worker("a", 1.0)]) == [Worker("a", 1.0), Worker("b", 1.0)]


# --- plans --------------------------------------------------------------------------------------------------


def test_no_followers_where_the_own_engine_suffices() -> None:
    plan = provision(replace(LOAD, own_groups_per_s=2.2, staleness=1), alike(1.0, 4))
    assert plan == Provision(
        workers=(),
        publish_every=1,
        update_bytes=0,
        dissemination_s=0,
        exposed_s=0,
        needed_groups_per_s=pytest.approx(2.2),
        given_groups_per_s=2.2,
        staleness=0,
        busy_share=1.0,
        enough=True,
    )


def test_followers_make_up_what_is_missing() -> None:
    """2 groups a second and a tenth, of which 0.5 are there: 1.7 in steps of 0.4 are five."""
    plan = provision(LOAD, alike(0.4, 9))
    assert [worker.name for worker in plan.workers] == ["w000", "w001", "w002", "w003", "w004"]
    assert (plan.publish_every, plan.staleness, plan.enough, plan.busy_share) == (1, 3, True, 1.0)
    assert plan.needed_groups_per_s == pytest.approx(HEADROOM * 2)
    assert plan.given_groups_per_s == pytest.approx(2.5)


def test_what_is_spent_on_receiving_needs_more_followers_which_take_longer_to_reach() -> None:
    """One chunk, 1.6 s a hop. Five followers would do without it; to reach five takes 5.3 s of every 10, to
    make up for that would take more, and all eight are too few: 3.6 s are left."""
    load = replace(LOAD, update_bytes=16e3, full_bytes=16e3, link_bits_per_s=80e3, staleness=3, rollout_s=1.0)
    overlapping = provision(load, alike(0.4, 8))
    assert (len(overlapping.workers), overlapping.enough) == (5, True)
    plan = provision(replace(load, overlap=False), alike(0.4, 8))
    assert (len(plan.workers), plan.enough) == (8, False)
    assert plan.exposed_s == pytest.approx(6.4)
    assert plan.needed_groups_per_s == pytest.approx(HEADROOM * 20 / 3.6)


def test_a_longer_interval_is_taken_where_it_saves_workers() -> None:
    """A pause of 4 s in each of ten: 3.67 needed, 8 followers. In every second step: 2.75, 6. In every third:
    2.54, 6. In every fourth: 2.44, 5; then staleness is 6."""
    load = replace(LOAD, apply_s=4.0)
    plan = provision(load, alike(0.4, 20))
    assert (plan.publish_every, len(plan.workers), plan.staleness) == (4, 5, 6)
    tighter = provision(replace(load, staleness=5), alike(0.4, 20))
    assert (tighter.publish_every, len(tighter.workers), tighter.staleness) == (2, 6, 4)


def test_money_counts_before_the_number_of_workers() -> None:
    plan = provision(LOAD, [Worker("dear", 2.0, 50.0), *alike(0.4, 5)])
    assert len(plan.workers) == 5
    assert plan.cost == 5


def test_an_update_that_takes_longer_than_a_step_is_published_less_often() -> None:
    """25 MB: 10 s at 20 Mbit/s, a step; a copy is no larger, so every second step keeps up."""
    load = replace(LOAD, update_bytes=25e6, full_bytes=25e6)
    plan = provision(load, alike(0.4, 9))
    assert plan.publish_every == 2
    assert plan.dissemination_s < 20


def test_too_few_candidates_give_the_busiest_plan() -> None:
    plan = provision(LOAD, alike(0.4, 2))
    assert not plan.enough
    assert plan.busy_share == pytest.approx(10 / (20 / 1.3))
    assert len(plan.workers) == 2


def test_a_learner_that_is_slower_than_its_step_is_not_fed_beyond_that() -> None:
    """One own group takes 40 s: 20 groups in 40 s and no more."""
    plan = provision(replace(LOAD, own_groups_per_s=0.025), alike(0.1, 20))
    assert plan.needed_groups_per_s == pytest.approx(HEADROOM * 0.5)
    assert plan.busy_share == 0.25
    assert plan.enough


# --- refusals -----------------------------------------------------------------------------------------------


def test_the_refusal_names_the_numbers_and_what_would_do() -> None:
    load = replace(LOAD, rollout_s=45.0)
    with pytest.raises(OurFault) as refused:
        provision(load, alike(0.4, 9))
    text = str(refused.value)
    assert text.startswith("no publish interval keeps staleness within 6: 6 - ceil(")
    assert "1 MB to 5 followers over 20 Mbit/s / 10 s a step" in text
    assert "- ceil(45 s a rollout / 10 s) = 0, where at least 1 is needed" in text
    assert "allow --staleness 7" in text
    assert provision(replace(load, staleness=7), alike(0.4, 9)).staleness == 7


def test_updates_that_never_keep_up_are_refused() -> None:
    with pytest.raises(OurFault, match="followers cannot keep up: an update of 100 MB takes 40 s"):
        provision(replace(LOAD, update_bytes=100e6), alike(0.4, 9))


def test_followers_that_would_only_receive_are_refused() -> None:
    with pytest.raises(OurFault, match="followers cannot keep up"):
        provision(replace(LOAD, update_bytes=35e6, overlap=False), alike(0.4, 9))


LOADS = st.builds(
    Load,
    step_s=st.floats(0.1, 1000),
    groups=st.floats(1, 512),
    own_groups_per_s=st.floats(0.01, 10),
    rollout_s=st.floats(0, 1000),
    update_bytes=st.floats(1e3, 1e10),
    link_bits_per_s=st.floats(1e6, 1e10),
    staleness=st.integers(1, 32),
    full_bytes=st.floats(1e10, 2e10),
    apply_s=st.floats(0, 10),
    overlap=st.booleans(),
)
WORKERS = st.lists(
    st.builds(Worker, st.text("abc", min_size=1), st.floats(0.01, 10), st.floats(0, 9)), max_size=12
)


@given(load=LOADS, candidates=WORKERS)
def test_any_plan_keeps_its_bounds_and_wastes_nobody(load: Load, candidates: list[Worker]) -> None:
    try:
        plan = provision(load, candidates)
    except OurFault:
        return
    ordered = by_cost(candidates)
    assert list(plan.workers) == ordered[: len(plan.workers)]
    assert 0 < plan.busy_share <= 1
    if plan.enough:
        assert plan.given_groups_per_s >= plan.needed_groups_per_s
        assert plan.busy_share == pytest.approx(load.step_s / load.pace_s)
    else:
        assert len(plan.workers) == len(candidates)
    if plan.workers:
        assert plan.staleness <= load.staleness
        assert plan.dissemination_s < plan.publish_every * load.pace_s
    if plan.enough and plan.workers:
        fewer = plan.given_groups_per_s - plan.workers[-1].groups_per_s
        at = dissemination_s(plan.update_bytes, load.link_bits_per_s, len(plan.workers) - 1)
        exposed = exposed_s(load, at) if len(plan.workers) > 1 else 0.0
        assert fewer < HEADROOM * needed_groups_per_s(load, exposed, plan.publish_every) * (1 + 1e-9)

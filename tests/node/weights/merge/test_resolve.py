"""Resolving a merge: values by hand, the same bytes in any order and on any machine, guards, liars."""

from __future__ import annotations

import hashlib
import itertools
import math
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.weights.chain.bf16 import to_bits, to_tensors
from node.weights.merge import _kernels as kernels
from node.weights.merge import resolve as merge
from node.weights.merge._kernels import U16, VALUES
from node.weights.merge.contributions import Contribution
from node.weights.merge.resolve import Merged, MergeRule, fedbuff_weight, resolve
from protocol.delta import weights_digest
from protocol.errors import LocalProtocolError
from protocol.identity import Identity
from protocol.messages import ChunkedBlob, Lineage, LinkKind, SignedLink, WeightsLink

PEERS = [Identity.from_seed(bytes([k]) * 32).peer_id for k in range(1, 10)]
RULE = MergeRule(window_ms=1000)
ALL = ["mean", "trimmed", "clipping"]
Bits = dict[str, U16]


def by(author: int, *, window: int = 0) -> Contribution:
    """A contribution of one of the PEERS, in a window. Tags are in the order of authors."""
    link = WeightsLink(
        lineage=Lineage(PEERS[author], "1" * 64, "7" * 64),
        policy_version=1,
        kind=LinkKind.ANCHOR,
        base_version=1,
        base="b" * 64,
        result="9" * 64,
        blob=ChunkedBlob("8" * 64, 100, 16 * 1024),
        created_at=1000 * window + 999 * (author % 2),
    )
    return Contribution(f"{author:064x}", SignedLink(b"", bytes(64)), link)


def bits(values: Mapping[str, object] | list[float]) -> Bits:
    named = values if isinstance(values, Mapping) else {"w": values}
    return to_bits({name: torch.tensor(each, dtype=torch.float32) for name, each in named.items()})


def floats(merged: Merged, name: str = "w") -> list[float]:
    assert merged.bits is not None
    return to_tensors(merged.bits)[name].flatten().tolist()


def merged(base: list[float], *others: list[float], rule: MergeRule = RULE) -> Merged:
    return resolve(bits(base), [(by(k), bits(each)) for k, each in enumerate(others)], rule)


@pytest.fixture(scope="module", autouse=True)
def compiled(compiled_merge: None) -> None:
    out = np.zeros(1, np.uint16)
    kernels.rounded(out, np.zeros(1), VALUES, out)  # tests call it with arrays that may be written


# --- bf16 ---------------------------------------------------------------------------------------------------


def test_every_pattern_has_its_value() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    finite = (patterns & 0x7F80) != 0x7F80
    expected = to_tensors({"w": patterns})["w"].double().numpy()
    assert np.array_equal(VALUES[finite], expected[finite])
    assert np.array_equal(np.signbit(VALUES[finite]), np.signbit(expected[finite]))


POSITIVE = list(range(1, 0x7F80))


def nearest(exact: Fraction) -> int:
    """The pattern nearest to a positive number, by exact arithmetic; the even one of two."""
    at = int(np.searchsorted(VALUES[POSITIVE], float(exact)))
    around = [pattern for pattern in range(at - 1, at + 3) if 0 <= pattern < 0x7F80]
    return min(around, key=lambda pattern: (abs(Fraction(float(VALUES[pattern])) - exact), pattern % 2))


@settings(max_examples=50)
@given(
    pattern=st.integers(0, 0x7F7F),
    change=st.floats(-3e38, 3e38, allow_subnormal=False) | st.floats(-1e-37, 1e-37, allow_subnormal=False),
)
def test_rounding_is_to_nearest_and_ties_to_even(pattern: int, change: float) -> None:
    out = np.empty(1, np.uint16)
    base = np.array([pattern], np.uint16)
    kernels.rounded(base, np.array([change]), VALUES, out)
    exact = Fraction(float(VALUES[pattern]) + change)
    if change == 0 or exact == 0:
        assert out[0] == (pattern if change == 0 else 0)
    else:
        assert out[0] == nearest(abs(exact)) | (0x8000 if exact < 0 else 0)


@pytest.mark.parametrize(
    ("start", "change", "expected"),
    [
        (0x3F80, 2.0**-8, 0x3F80),  # 1 + half a step: to the even one, down
        (0x3F81, 2.0**-8, 0x3F82),  # to the even one, up
        (0x3F80, 2.0**-8 + 2.0**-40, 0x3F81),  # through float32 this would be a tie
        (0x8000, 0.0, 0x8000),  # -0.0 stays
        (0x3F80, -1.0, 0x0000),
        (0x0001, 2.0**-133, 0x0002),  # denormal
        (0x007F, 2.0**-133, 0x0080),  # the least normal
        (0x7F7F, 1e38, 0x7F7F),  # no infinity
        (0xFF7F, -1e300, 0xFF7F),
    ],
)
def test_rounding_at_the_edges(start: int, change: float, expected: int) -> None:
    out = np.empty(1, np.uint16)
    kernels.rounded(np.array([start], np.uint16), np.array([change]), VALUES, out)
    assert out[0] == expected


# --- by hand ------------------------------------------------------------------------------------------------


def test_the_mean_of_task_vectors_is_added_to_the_base() -> None:
    assert floats(merged([1.0, 2.0], [2.0, 2.0], [3.0, 0.0])) == [2.5, 1.0]


def test_one_that_moved_nothing_halves_the_change() -> None:
    assert floats(merged([1.0, 2.0], [1.0, 2.0], [3.0, 0.0])) == [2.0, 1.0]


def test_staleness_weighs_by_fedbuff() -> None:
    """Three windows behind: weight 1/2 against 1, so a third of the change."""
    made = resolve(bits([0.0]), [(by(0), bits([3.0])), (by(1, window=3), bits([6.0]))], RULE)
    assert [each.age_windows for each in made.used] == [3, 0]
    assert [each.weight for each in made.used] == pytest.approx([1 / 3, 2 / 3])
    assert floats(made) == [5.0]


def test_fedbuff_weights() -> None:
    assert [fedbuff_weight(age) for age in (0, 3, 15)] == [1.0, 0.5, 0.25]


def test_trimmed_leaves_out_the_ends_of_each_weight() -> None:
    rule = replace(RULE, strategy="trimmed", trim=0.2, norm_limit=1e9)
    made = merged([0.0, 0.0], [1.0, -9.0], [2.0, 1.0], [3.0, 2.0], [90.0, 4.0], [4.0, 5.0], rule=rule)
    assert floats(made) == [3.0, pytest.approx(7 / 3, rel=1e-2)]


def test_trimmed_cuts_none_of_few() -> None:
    rule = replace(RULE, strategy="trimmed", trim=0.2)
    assert floats(merged([0.0], [1.0], [2.0], [3.0], rule=rule)) == [2.0]


def test_centered_clipping() -> None:
    """Task vectors 1, 2, 8 with radius 2, the median. First round from 0: 1, 2 and 2: v = 5/3. Second: -2/3,
    1/3 and 2: v = 20/9. Norms guarded to 3 x 2 leave 8 at 6."""
    rule = replace(RULE, strategy="clipping", clip_rounds=1)
    assert floats(merged([0.0], [1.0], [2.0], [8.0], rule=rule)) == [pytest.approx(5 / 3, rel=2**-8)]
    two = merged([0.0], [1.0], [2.0], [8.0], rule=replace(rule, clip_rounds=2))
    assert floats(two) == [pytest.approx(20 / 9, rel=2**-8)]
    assert sum(each.scale * each.weight * norm for each, norm in zip(two.used, (1, 2, 8), strict=True)) == (
        pytest.approx(20 / 9)
    )


def test_clipping_measures_the_distance_over_all_tensors() -> None:
    """(3, 4) has length 5; with radius 5/2 half of it is left."""
    rule = replace(RULE, strategy="clipping", clip_rounds=1, clip_radius=0.5, min_contributions=1)
    start = bits({"a": [0.0], "b": [[0.0]]})
    made = resolve(start, [(by(0), bits({"a": [3.0], "b": [[4.0]]}))], rule)
    assert (floats(made, "a"), floats(made, "b")) == ([1.5], [2.0])
    assert made.bits is not None
    assert made.bits["b"].shape == (1, 1)


def test_longer_vectors_are_shortened_to_the_limit() -> None:
    """Lengths 1, 2 and 60, limit 3 x 2."""
    made = merged([0.0], [1.0], [2.0], [60.0])
    assert [each.norm for each in made.used] == [1.0, 2.0, 60.0]
    assert [each.scale for each in made.used] == [1.0, 1.0, pytest.approx(0.1)]
    assert floats(made) == [3.0]


def test_half_of_the_authors_cannot_raise_the_limit() -> None:
    made = merged([0.0], [1.0], [1.0], [1e30], [1e30])
    assert floats(made) == [2.0]


def test_those_that_moved_nothing_do_not_lower_the_limit() -> None:
    assert floats(merged([0.0], [0.0], [0.0], [0.0], [4.0])) == [1.0]
    assert floats(merged([5.0], [5.0], [5.0])) == [5.0]


# --- the same bytes -----------------------------------------------------------------------------------------

SHAPES = {"embedding": (40, 8), "norm": (8,), "layer": (3, 8, 5)}


def sample(seed: int, start: Bits | None = None) -> Bits:
    """Weights, made of whole numbers only, so that they are the same everywhere."""
    rng = np.random.Generator(np.random.PCG64(seed))
    made = {}
    for name, shape in SHAPES.items():
        if start is None:
            sign, size = rng.integers(0, 2, shape) << 15, rng.integers(0x3C00, 0x3F00, shape)
            made[name] = (sign | size).astype(np.uint16)
        else:
            made[name] = (start[name].astype(np.int32) + rng.integers(-20, 21, shape)).astype(np.uint16)
    return made


START = sample(0)
OTHERS = [(by(k, window=3 * (k % 3)), sample(10 + k, START)) for k in range(5)]
GOLDEN = {
    "mean": "c2f21a84ce8ab60d70cc68f061fe09e9b53f29068707505cf220f12beadae2a5",
    "trimmed": "a7e5e587f965e92c2923ddab48ebb169e8ef657a5d27b159ba8a19ae569c750f",
    "clipping": "a0f072b28d3ca5608eb98be6345547116b43b8be3be1609d11392d199732862f",
}


def result(rule: MergeRule, others: list[tuple[Contribution, Bits]] = OTHERS) -> str:
    made = resolve(START, others, rule)
    assert made.bits is not None
    return weights_digest(made.bits)


@pytest.mark.parametrize("strategy", ALL)
def test_every_order_of_arrival_gives_the_same_bytes(strategy: str) -> None:
    rule = replace(RULE, strategy=strategy)
    assert {result(rule, list(order)) for order in itertools.permutations(OTHERS)} == {result(rule)}


@pytest.mark.parametrize("strategy", ALL)
def test_golden_bytes(strategy: str) -> None:
    """Changing breaks: nodes of two versions merge different weights."""
    assert result(replace(RULE, strategy=strategy)) == GOLDEN[strategy]


@pytest.mark.parametrize("strategy", ALL)
def test_the_size_of_pieces_changes_nothing(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = replace(RULE, strategy=strategy)
    whole = result(rule)
    monkeypatch.setattr(merge, "PIECE", 7)
    assert result(rule) == whole


@pytest.fixture
def flushed() -> Iterator[None]:
    """A thread whose float32 denormals are zero, as some libraries leave it behind."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormals")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("flushed")
def test_a_thread_that_flushes_denormals_merges_the_same() -> None:
    start = {"w": np.array([1, 40, 0x8003], np.uint16)}
    one, two = {"w": np.array([3, 50, 0x8001], np.uint16)}, {"w": np.array([5, 60, 1], np.uint16)}
    made = resolve(start, [(by(0), one), (by(1), two)], RULE)
    assert made.bits is not None
    assert made.bits["w"].tolist() == [4, 55, 0]


def test_nothing_that_is_merged_is_written_to() -> None:
    before = [weights_digest(each) for each in (START, *(other for _, other in OTHERS))]
    for strategy in ALL:
        result(replace(RULE, strategy=strategy))
    assert [weights_digest(each) for each in (START, *(other for _, other in OTHERS))] == before


def test_weights_nobody_moved_keep_their_bits() -> None:
    start = {"w": np.array([0x8000, 0x0000, 0x0001, 0x3F80], np.uint16)}
    moved = {"w": np.array([0x8000, 0x0000, 0x0001, 0x4000], np.uint16)}
    for strategy in ALL:
        made = resolve(start, [(by(0), moved), (by(1), moved)], replace(RULE, strategy=strategy))
        assert made.bits is not None
        assert made.bits["w"].tolist() == moved["w"].tolist()


def test_tied_weights_stay_tied() -> None:
    start = bits([1.0, 2.0])
    start["again"] = start["w"]
    other = bits([3.0, 2.0])
    other["again"] = other["w"].copy()
    made = resolve(start, [(by(0), other), (by(1), other)], RULE)
    assert made.bits is not None
    assert made.bits["again"] is made.bits["w"]
    assert floats(made) == [3.0, 2.0]


def test_ties_in_memory_do_not_change_the_result() -> None:
    """Lengths count a tied tensor under each name, whether it is one array or two."""
    tied, apart = bits([1.0, 2.0]), bits([1.0, 2.0])
    tied["again"], apart["again"] = tied["w"], apart["w"].copy()
    others = [(by(k), bits({"w": [k, 2.0], "again": [k, 2.0]})) for k in (2, 3, 8)]
    assert resolve(tied, others, RULE).used == resolve(apart, others, RULE).used


# --- from another base --------------------------------------------------------------------------------------


def steps(bits: U16) -> np.ndarray:
    """bf16 patterns as whole numbers in the order of their values, both zeros alike."""
    size = (bits & 0x7FFF).astype(np.int32)
    return np.where(bits >> 15 == 1, -size, size)


@pytest.mark.parametrize("strategy", ["mean", "trimmed"])
def test_it_does_not_matter_whether_a_merge_starts_from_the_base_or_from_the_last_merge(
    strategy: str,
) -> None:
    """Both are translation invariant, so that nothing need be rebased once a merge was adopted; what is left
    is double precision, which shows where a weight is all but half-way between two patterns."""
    rule = replace(RULE, strategy=strategy, norm_limit=1e9)
    first = resolve(START, OTHERS, rule).bits
    assert first is not None
    later = [(by(k, window=3 * (k % 3)), sample(20 + k, first)) for k in range(5)]
    from_base, from_last = (resolve(start, later, rule) for start in (START, first))
    assert all(each.scale == 1 for made in (from_base, from_last) for each in made.used)
    assert from_base.bits is not None
    assert from_last.bits is not None
    apart = [np.abs(steps(from_base.bits[name]) - steps(from_last.bits[name])) for name in SHAPES]
    moved = [np.abs(steps(from_base.bits[name]) - steps(START[name])) for name in SHAPES]
    assert max(each.max() for each in apart) <= 1
    assert np.mean(np.concatenate([each.ravel() for each in apart])) < 0.01
    assert np.mean(np.concatenate([each.ravel() for each in moved])) > 3


# --- where the weights lie ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ALL)
def test_weights_that_may_not_be_written_or_lie_in_files_give_the_same_bytes(
    strategy: str, tmp_path: Path
) -> None:
    def filed(name: str, weights: Bits) -> Bits:
        mapped = {}
        for tensor, array in weights.items():
            array.tofile(tmp_path / f"{name}{tensor}")
            mapped[tensor] = np.memmap(tmp_path / f"{name}{tensor}", np.uint16, "r", shape=array.shape)
        return mapped

    rule = replace(RULE, strategy=strategy)
    compiled = len(kernels.accumulate.signatures)
    others = [(contribution, filed(contribution.tag, each)) for contribution, each in OTHERS]
    made = resolve(filed("base", START), others, rule)
    assert made.bits is not None
    assert weights_digest(made.bits) == GOLDEN[strategy]
    assert all(array.flags.writeable for array in made.bits.values())
    assert len(kernels.accumulate.signatures) == compiled  # no loop is compiled for files once more


def test_warming_up_compiles_all_loops() -> None:
    loops = ("add_squares", "accumulate", "difference", "trimmed_mean", "rounded")
    before = {name: list(getattr(kernels, name).signatures) for name in loops}
    for strategy in ALL:
        result(replace(RULE, strategy=strategy))
    assert {name: list(getattr(kernels, name).signatures) for name in loops} == before


# --- memory -------------------------------------------------------------------------------------------------


def test_memory_is_a_few_pieces_beside_the_result() -> None:
    size = 1 << 20
    start = {"w": np.full(size, 0x3F80, np.uint16)}
    others = [(by(k), {"w": np.full(size, 0x3F90 + k, np.uint16)}) for k in range(3)]
    for strategy in ALL:
        resolve({"w": start["w"][:9]}, [(c, {"w": each["w"][:9]}) for c, each in others], RULE)  # compiled
        tracemalloc.start()
        resolve(start, others, replace(RULE, strategy=strategy))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * size + 4_000_000


# --- guards -------------------------------------------------------------------------------------------------


def poisoned(pattern: int) -> Bits:
    return {"w": np.array([0x3F80, pattern], np.uint16)}


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (bits([1.0, 2.0, 3.0]), "merge_shapes"),
        (bits({"w": [[1.0, 2.0]]}), "merge_shapes"),
        (bits({"v": [1.0, 2.0]}), "merge_shapes"),
        (bits({"w": [1.0, 2.0], "v": [1.0]}), "merge_shapes"),
        ({}, "merge_shapes"),
        ({"w": np.array([1.0, 2.0], np.float32)}, "merge_shapes"),
        (poisoned(0x7F80), "merge_not_finite"),
        (poisoned(0xFF80), "merge_not_finite"),
        (poisoned(0x7FC1), "merge_not_finite"),
    ],
)
@pytest.mark.parametrize("strategy", ALL)
def test_what_does_not_fit_is_dropped_with_its_author(other: Bits, reason: str, strategy: str) -> None:
    sound = [(by(0), bits([2.0, 2.0])), (by(2), bits([2.0, 4.0]))]
    rule = replace(RULE, strategy=strategy)
    made = resolve(bits([1.0, 2.0]), [*sound, (by(1), other)], rule)
    assert [(each.author, each.reason) for each in made.dropped] == [(PEERS[1], reason)]
    assert [each.author for each in made.used] == [PEERS[0], PEERS[2]]
    assert made.bits is not None
    alone = resolve(bits([1.0, 2.0]), sound, rule).bits
    assert alone is not None
    assert made.bits["w"].tolist() == alone["w"].tolist()


def test_tied_weights_that_differ_are_dropped() -> None:
    start = bits([1.0, 2.0])
    start["again"] = start["w"]
    other = bits({"w": [1.0, 2.0], "again": [9.0, 2.0]})
    made = resolve(start, [(by(0), other)], RULE)
    assert [each.reason for each in made.dropped] == ["merge_tied"]


def test_what_is_too_old_is_dropped() -> None:
    rule = replace(RULE, max_age_windows=4)
    others = [(by(0), bits([9.0])), (by(1, window=5), bits([2.0])), (by(2, window=1), bits([2.0]))]
    made = resolve(bits([1.0]), others, rule)
    assert [(each.author, each.reason) for each in made.dropped] == [(PEERS[0], "merge_stale")]
    assert floats(made) == [2.0]


def test_a_date_of_what_was_dropped_ages_nobody() -> None:
    rule = replace(RULE, max_age_windows=4)
    others = [(by(0), bits([2.0])), (by(1), bits([2.0])), (by(2, window=99), bits([math.nan]))]
    assert [each.age_windows for each in resolve(bits([1.0]), others, rule).used] == [0, 0]


def test_too_few_are_not_merged() -> None:
    made = merged([1.0], [2.0])
    assert (made.bits, made.used, made.dropped) == (None, (), ())
    assert merged([1.0]).bits is None
    assert floats(merged([1.0], [2.0], rule=replace(RULE, min_contributions=1))) == [2.0]


def test_what_our_side_may_not_do() -> None:
    with pytest.raises(LocalProtocolError, match="two contributions of one author"):
        resolve(bits([1.0]), [(by(0), bits([2.0])), (by(0), bits([3.0]))], RULE)
    with pytest.raises(LocalProtocolError, match="common base of a merge has infinities"):
        merged([math.inf], [2.0], [2.0])
    other = {"w": bits([2.0, 3.0, 4.0, 5.0])["w"][::2]}
    with pytest.raises(LocalProtocolError, match="contiguous"):
        resolve(bits([1.0, 1.0]), [(by(0), other), (by(1), other)], RULE)


@pytest.mark.parametrize(
    "changed",
    [
        {"window_ms": 0},
        {"max_age_windows": -1},
        {"norm_limit": 0.5},
        {"norm_limit": math.nan},
        {"trim": 0.5},
        {"clip_radius": 0.0},
        {"clip_rounds": 0},
        {"min_contributions": 0},
    ],
)
def test_rules_have_bounds(changed: dict[str, float]) -> None:
    with pytest.raises(LocalProtocolError, match=next(iter(changed))):
        replace(RULE, **changed)  # type: ignore[arg-type]


OTHER_VALUES = {
    "strategy": "trimmed",
    "window_ms": 1001,
    "max_age_windows": 63,
    "norm_limit": 3.5,
    "trim": 0.25,
    "clip_radius": 2.0,
    "clip_rounds": 4,
    "min_contributions": 3,
}


def test_equal_rules_have_equal_digests_and_no_others() -> None:
    assert OTHER_VALUES.keys() == {field.name for field in fields(MergeRule)}
    rules = [RULE, *(replace(RULE, **{name: value}) for name, value in OTHER_VALUES.items())]
    assert len({rule.digest() for rule in rules}) == len(rules)
    golden = "d7a7dd5eab9dd825a372429d2c253f466487652608e5bff646f2d565770e2d5b"
    assert RULE.digest() == golden  # changing breaks: nodes of two versions do not merge


# --- liars --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ALL)
@pytest.mark.parametrize("strength", [-1.0, -1e3, 1e30])
def test_a_liar_among_six_does_not_turn_the_merge(strategy: str, strength: float) -> None:
    """Five honest peers moved by about 1 in one direction; the sixth sends the opposite, or noise of any
    size. What is merged still points where the honest ones went."""
    rng = np.random.default_rng(7)
    start, direction = np.zeros(400), rng.choice([-1.0, 1.0], 400)
    honest = [direction + 0.3 * rng.standard_normal(400) for _ in range(5)]
    sent = [list(each) for each in (*honest, strength * direction)]
    made = merged(list(start), *sent, rule=replace(RULE, strategy=strategy))
    along = float(np.dot(floats(made), direction)) / 400
    assert 0.2 < along < 1.6


def test_the_golden_sample_is_what_it_was() -> None:
    """If this fails, the generator of the sample changed, not the merge."""
    data = b"".join(each[name].tobytes() for each in (START, OTHERS[4][1]) for name in sorted(SHAPES))
    assert hashlib.sha256(data).hexdigest()[:16] == "f28b1e16befcbfaf"

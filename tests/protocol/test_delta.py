"""Weight deltas: exact for any bits, close to the entropy they condition on, deaf to hostile bytes."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

pytest.importorskip("constriction")
pytest.importorskip("numba")

from protocol import _delta_layout, _delta_segments, _delta_tables, delta
from protocol._delta_kernels import U16
from protocol._delta_tables import varint
from protocol.errors import DecodeError, LocalProtocolError, RemoteProtocolError

Weights = dict[str, U16]

SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x007F, 0x7F7F, 0x3F80]
"""Zeros, infinities, NaNs with payloads, denormals, the largest number, one."""

PAYLOAD = len(delta.MAGIC) + 64


pytestmark = pytest.mark.usefixtures("compiled_delta")


def bf16(values: np.ndarray) -> U16:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def updated(size: int, step: float, seed: int = 0) -> tuple[Weights, Weights]:
    """Weights of a normal distribution, and the same after a normal step."""
    rng = np.random.default_rng(seed)
    masters = rng.standard_normal(size)
    return {"w": bf16(masters)}, {"w": bf16(masters + step * rng.standard_normal(size))}


def assert_lossless(base: Weights, new: Weights) -> bytes:
    before = {name: array.copy() for name, array in base.items()}
    data = delta.encode(base, new)
    got = delta.decode(base, data)
    assert got.keys() == new.keys()
    for name in new:
        assert got[name].shape == new[name].shape
        np.testing.assert_array_equal(got[name], new[name])
        np.testing.assert_array_equal(base[name], before[name])
    header = delta.read_header(data)
    assert (header.base, header.result) == (delta.weights_digest(base), delta.weights_digest(new))
    return data


any_bits = st.one_of(st.sampled_from(SPECIAL), st.integers(0, 0xFFFF))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Weights, Weights]:
    base: Weights = {}
    new: Weights = {}
    for name in draw(st.lists(st.text(max_size=4), unique=True, max_size=4)):
        shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=12))
        base[name] = draw(hnp.arrays(np.uint16, shape, elements=any_bits))
        fresh = draw(hnp.arrays(np.uint16, shape, elements=any_bits))
        kept = draw(hnp.arrays(np.bool_, shape))
        new[name] = np.where(kept, base[name], fresh).astype(np.uint16)
    return base, new


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(pairs())
def test_any_bits_come_back(pair: tuple[Weights, Weights]) -> None:
    assert_lossless(*pair)


@pytest.mark.parametrize("old", SPECIAL, ids=hex)
def test_any_special_value_becomes_any_other(old: int) -> None:
    new = np.array(SPECIAL, dtype=np.uint16)
    assert_lossless({"w": np.full_like(new, old)}, {"w": new})


def test_nothing_in_nothing_out() -> None:
    assert len(assert_lossless({}, {})) == PAYLOAD + 1
    assert_lossless({"w": np.zeros((0, 3), np.uint16)}, {"w": np.zeros((0, 3), np.uint16)})


@pytest.mark.parametrize("step", [1e-6, 1e-3, 1.0, 1e6], ids=str)
def test_sparse_and_dense_updates_come_back(step: float) -> None:
    assert_lossless(*updated(20_000, step))


def test_every_pattern_steps_to_a_neighbour_and_far_away() -> None:
    """All buckets at once, and steps of all sizes."""
    base = np.arange(1 << 16, dtype=np.uint16)
    assert_lossless({"w": base}, {"w": base ^ np.uint16(1)})
    mixed = np.where(base % 7 == 0, np.random.default_rng(1).permutation(base), base).astype(np.uint16)
    assert_lossless({"w": base}, {"w": mixed})


def test_segments_end_where_both_sides_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_delta_layout, "SEGMENT_VALUES", 500)
    base: Weights = {}
    new: Weights = {}
    for k in range(9):
        one, two = updated(400 + 50 * k, 1e-2, seed=k)
        base[f"w{k}"], new[f"w{k}"] = one["w"], two["w"]
    new["w3"] = base["w3"].copy()
    data = assert_lossless(base, new)
    assert delta.encode(base, new, threads=3) == data
    got = delta.decode(base, data, threads=3)
    for name in new:
        np.testing.assert_array_equal(got[name], new[name])
    monkeypatch.setattr(_delta_segments, "KEPT_BYTES", 0)
    assert delta.encode(base, new) == data


def test_unchanged_tensors_cost_two_bits() -> None:
    base, new = updated(5000, 1e-3)
    alone = len(assert_lossless(base, new))
    still = {f"z{k}": np.full(1000, k, np.uint16) for k in range(40)}
    assert len(assert_lossless(base | still, new | still)) == alone + 10


def test_tied_tensors_cost_once() -> None:
    base, new = updated(5000, 1e-2)
    alone = len(assert_lossless(base, new))
    both = assert_lossless({"a": base["w"], "w": base["w"].copy()}, {"a": new["w"], "w": new["w"].copy()})
    assert len(both) <= alone + 2


def test_tied_tensors_that_share_memory_are_changed_in_place() -> None:
    base, new = updated(5000, 1e-2)
    shared = base["w"].copy()
    data = delta.encode({"a": shared, "w": shared}, {"a": new["w"], "w": new["w"]})
    got = delta.decode({"a": shared, "w": shared}, data)
    assert got["a"] is got["w"]
    assert delta.apply({"a": shared, "w": shared}, data) == delta.weights_digest(got)
    np.testing.assert_array_equal(shared, new["w"])


def test_digest_knows_names_shapes_and_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(60, dtype=np.uint16)
    other = array.copy()
    other[59] ^= 1
    sets = [{"w": array}, {"v": array}, {"w": array.reshape(6, 10)}, {"w": other}, {"w": array, "v": array}]
    assert len({delta.weights_digest(weights) for weights in sets}) == len(sets)
    tied = {"w": array, "v": array.copy()}
    assert delta.weights_digest(tied) == delta.weights_digest(sets[-1])
    assert delta.weights_digest(tied, threads=3) == delta.weights_digest(tied)
    monkeypatch.setattr(_delta_layout, "SEGMENT_VALUES", 7)
    assert delta.weights_digest(tied, threads=3) == delta.weights_digest(sets[-1])
    assert delta.weights_digest({"w": other}) != delta.weights_digest({"w": array})


def test_steps_are_seen_from_zero() -> None:
    """Values that all shrink cost the same whether half of them are negative or none."""
    base, _ = updated(20_000, 0.0)
    base["w"] &= 0x7FFF
    smaller = np.random.default_rng(3).random(20_000) < 0.1
    new = {"w": base["w"] - smaller.astype(np.uint16)}
    signs = np.random.default_rng(4).integers(0, 2, 20_000).astype(np.uint16) << 15
    both = len(assert_lossless({"w": base["w"] ^ signs}, {"w": new["w"] ^ signs}))
    assert both == len(assert_lossless(base, new))


def test_an_alphabet_has_so_many_values_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    base = np.full(40_000, 0x3F80, dtype=np.uint16)
    new = base + np.random.default_rng(0).integers(0, 2, 40_000).astype(np.uint16) * np.uint16(0x1234)
    free = len(assert_lossless({"w": base}, {"w": new}))
    monkeypatch.setattr(_delta_tables, "MAX_EXACT", 0)
    assert len(assert_lossless({"w": base}, {"w": new})) > free


@pytest.mark.slow
@pytest.mark.parametrize("step", [3e-5, 3e-4, 1.0], ids=str)
def test_memory_beyond_two_weight_sets_is_bounded(step: float) -> None:
    """At most 1.2 times the largest tensor, if that is as large as an embedding of 28 million values. What
    undoes an update in place is the second weight set, and smaller while few values change."""
    base, new = updated(14 * _delta_layout.SEGMENT_VALUES, step)
    largest = base["w"].nbytes
    undo = min(6 * int((base["w"] != new["w"]).sum()), largest)
    digests = {"base_digest": delta.weights_digest(base), "new_digest": delta.weights_digest(new)}
    tracemalloc.start()
    try:
        data = delta.encode(base, new, **digests)
        assert tracemalloc.get_traced_memory()[1] - 2 * len(data) <= 1.2 * largest
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        delta.apply(base, data)
        assert tracemalloc.get_traced_memory()[1] - before - undo <= 1.2 * largest
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(base["w"], new["w"])


GOLDEN_BASE = "8f7cc1274217b93c1c0a05c8e3d0aa63e03c2c72cc2a78414abe19ff6591f399"
GOLDEN_BODY = bytes.fromhex(
    "04c5018000000000000000000000000000003f00000000000000000000000000000000100a0000000000000008032704"
    "0302000100ffffffffffffffff000102ff00020209ffff00013bff000102ff000102ff000102ff00020010ffa9000500"
    "01090701efefefefff00021301ffff5f080202280201010220b9cb09f78bbd46b31eeb091ad6736104d99a8ab3b816e7"
    "e25e1c8c8b71326ec6d1b81a67e36e1c8ecb713a6ec7f1b81ee7e37e1c900b72426ec811b92267e48e1c924b724a6ec9"
    "31b926e7e49e1c948b72526eca0c12"
)


def test_format_has_not_changed() -> None:
    """Bytes made once. When this fails, stored deltas no longer read: `MAGIC` needs its next number."""
    base = {"a": np.arange(0x3D00, 0x4000, dtype=np.uint16), "b": np.arange(8, dtype=np.uint16)}
    base |= {"c": np.zeros(2, np.uint16), "d": base["b"].copy()}
    new = {name: array.copy() for name, array in base.items()}
    new["a"][::100] += 1
    new["a"][130] -= 9
    new["a"][300:340] ^= 0x8000
    new["b"] = new["d"] = base["b"] * np.uint16(0x1357) + np.uint16(0x8001)
    data = assert_lossless(base, new)
    assert delta.weights_digest(base) == GOLDEN_BASE
    assert data[PAYLOAD:] == GOLDEN_BODY


@pytest.mark.parametrize("size", [1, 2, 30], ids=str)
@pytest.mark.parametrize("step", [1e-3, 1.0, 1e6], ids=str)
def test_small_tensors_cost_no_more_than_a_copy(size: int, step: float) -> None:
    assert len(assert_lossless(*updated(size, step))) <= PAYLOAD + 2 + 2 * size


def test_noise_costs_no_more_than_a_copy() -> None:
    rng = np.random.default_rng(0)
    base, new = ({"w": rng.integers(0, 1 << 16, 3000, dtype=np.uint16)} for _ in range(2))
    assert len(assert_lossless(base, new)) <= 6000 + PAYLOAD + 2


def entropy_bits(counts: np.ndarray) -> float:
    counts = counts[counts > 0]
    return float((counts * np.log2(counts.sum() / counts)).sum())


@pytest.mark.parametrize("step", [3e-4, 3e-3], ids=str)
def test_size_is_near_the_conditional_entropy(step: float) -> None:
    base, new = updated(300_000, step)
    old, fresh = base["w"], new["w"]
    exponent = (old >> 7) & 0xFF
    distance = fresh.astype(np.int32) - old.astype(np.int32)
    bits = 0.0
    for e in np.unique(exponent):
        inside = exponent == e
        moved = distance[inside & (old != fresh)]
        bits += entropy_bits(np.array([moved.size, inside.sum() - moved.size]))
        bits += entropy_bits(np.unique(moved, return_counts=True)[1]) if moved.size else 0.0
    assert len(delta.encode(base, new)) <= 1.15 * bits / 8 + PAYLOAD


# --- bytes of a stranger ------------------------------------------------------------------------------------


def refused(weights: Weights, data: bytes) -> str:
    """The reason for which `data` is refused; the weights must be untouched."""
    before = {name: array.copy() for name, array in weights.items()}
    with pytest.raises(RemoteProtocolError) as caught:
        delta.apply(weights, data)
    for name, array in before.items():
        np.testing.assert_array_equal(weights[name], array)
    return caught.value.reason


@pytest.fixture(scope="module")
def small() -> tuple[Weights, Weights, bytes]:
    base, new = updated(4000, 3e-2)
    base["b"] = np.arange(16, dtype=np.uint16)
    new["b"] = base["b"] ^ np.uint16(0x6A6A)
    return base, new, delta.encode(base, new)


@pytest.mark.slow
def test_flipped_bits_never_give_other_weights(small: tuple[Weights, Weights, bytes]) -> None:
    base, new, data = small
    rng = np.random.default_rng(5)
    for at in rng.integers(0, len(data), 400):
        broken = bytearray(data)
        broken[at] ^= 1 << int(rng.integers(0, 8))
        try:
            got = delta.decode(base, bytes(broken))
        except RemoteProtocolError:
            continue
        for name in new:  # padding bits alone may differ
            np.testing.assert_array_equal(got[name], new[name])


@pytest.mark.slow
def test_cut_and_lengthened_deltas_are_refused(small: tuple[Weights, Weights, bytes]) -> None:
    base, _, data = small
    cuts = [0, 3, 5, 40, 68, 69, 70, 71, 90, 120, len(data) // 2, len(data) - 40, len(data) - 1]
    for cut in cuts:
        assert refused(base, data[:cut]) in {"delta_truncated", "delta_bounds"}
    assert refused(base, data + b"\0") == "delta_trailing"


@pytest.mark.slow
def test_random_bodies_are_refused(small: tuple[Weights, Weights, bytes]) -> None:
    base, _, data = small
    rng = np.random.default_rng(6)
    for _ in range(200):
        keep = int(rng.integers(PAYLOAD, PAYLOAD + 160))
        refused(base, data[:keep] + rng.bytes(int(rng.integers(0, 400))))


def test_another_base_is_told_apart(small: tuple[Weights, Weights, bytes]) -> None:
    base, new, data = small
    assert refused(new, data) == "delta_base"
    assert refused({"w": base["w"], "c": base["b"]}, data) == "delta_base"
    assert refused({"w": base["w"].reshape(2, -1), "b": base["b"]}, data) == "delta_base"


def test_another_result_is_told_apart_and_undone(small: tuple[Weights, Weights, bytes]) -> None:
    base, _, data = small
    at = len(delta.MAGIC) + 32
    assert refused(base, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]) == "delta_result"


@pytest.mark.parametrize("threads", [1, 3])
def test_errors_in_late_segments_undo_the_early_ones(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(_delta_layout, "SEGMENT_VALUES", 500)
    base, new = updated(5000, 3e-2)
    data = bytearray(delta.encode(base, new))
    data[-8:] = b"\xff" * 8
    before = base["w"].copy()
    with pytest.raises(DecodeError):
        delta.apply(base, bytes(data), threads=threads)
    np.testing.assert_array_equal(base["w"], before)


@pytest.mark.parametrize("dense", [False, True], ids=["coded", "raw"])
@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC1], ids=hex)
def test_values_that_are_not_finite_are_refused_where_asked(bad: int, dense: bool) -> None:
    base, new = updated(3000, 3e-2)
    if dense:
        new["w"] = np.random.default_rng(0).integers(0, 0x7F00, 3000, dtype=np.uint16)
    new["w"][2000] = bad
    data = delta.encode(base, new)
    before = base["w"].copy()
    with pytest.raises(DecodeError) as caught:
        delta.apply(base, data, finite=True)
    assert caught.value.reason == "delta_not_finite"
    np.testing.assert_array_equal(base["w"], before)
    with pytest.raises(DecodeError):
        delta.decode(base, data, finite=True)
    np.testing.assert_array_equal(delta.decode(base, data)["w"], new["w"])
    new["w"][2000] = 0
    finite = delta.decode(base, delta.encode(base, new), finite=True)
    np.testing.assert_array_equal(finite["w"], new["w"])


def test_more_bytes_than_a_copy_are_refused_before_any_work(small: tuple[Weights, Weights, bytes]) -> None:
    base, _, data = small
    longest = delta.max_delta_bytes(base)
    assert refused(base, data + bytes(longest - len(data))) == "delta_trailing"
    assert refused(base, data + bytes(longest + 1 - len(data))) == "delta_size"


def test_tied_tensors_are_not_changed_twice() -> None:
    """Two segments at once would write to the same memory, and undo in any order."""
    base, new = updated(3000, 3e-2)
    apart = {"a": base["w"], "b": base["w"].copy()}
    data = delta.encode(apart, {"a": new["w"], "b": new["w"][::-1].copy()})
    assert refused({"a": base["w"], "b": base["w"]}, data) == "delta_shape"


def test_many_changes_are_undone_from_a_copy(small: tuple[Weights, Weights, bytes]) -> None:
    """Where notes would take more memory than the tensor."""
    base, new = updated(4000, 0.3)
    data = bytearray(delta.encode(base, new))
    data[len(delta.MAGIC) + 32] ^= 1
    assert refused(base, bytes(data)) == "delta_result"


def test_another_format_is_told_apart(small: tuple[Weights, Weights, bytes]) -> None:
    base, _, data = small
    assert refused(base, b"X" + data[1:]) == "delta_format"
    with pytest.raises(DecodeError):
        delta.read_header(b"")


def forged(base: Weights, body: bytes) -> bytes:
    return delta.MAGIC + bytes.fromhex(delta.weights_digest(base)) + bytes(32) + body


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (varint(2), "delta_shape"),
        (varint(1 << 40), "delta_bounds"),
        (varint(1) + b"\x04", "delta_shape"),  # a kind beyond the last tensor
        (varint(1) + b"\x03" + varint(0), "delta_shape"),  # tied to itself
        (varint(1) + b"\x01" + b"\xff" * 40, "delta_truncated"),
        (varint(1) + b"\x01" + bytes(40) + varint(1 << 40), "delta_bounds"),
        (varint(1) + b"\x01" + bytes(40) + b"\xff" * 9, "delta_bounds"),
        (varint(1) + b"\x02" + bytes(3), "delta_truncated"),
    ],
)
def test_forged_bodies_are_refused_before_memory_is_taken(body: bytes, reason: str) -> None:
    base = {"w": np.full(100, 0x3F80, np.uint16)}
    assert refused(base, forged(base, body)) == reason


def test_more_changes_than_values_are_refused() -> None:
    base = {"w": np.full(100, 0x3F80, np.uint16)}
    active = np.zeros(256, np.uint8)
    active[0x7F] = 1
    table = varint(0) + varint(1) + varint(1) + b"\x00"  # one class, 1
    segment = varint(100) + varint(0)
    tables = varint(1) + b"\x01" + np.packbits(active).tobytes() + bytes(8) + table
    assert refused(base, forged(base, tables + varint(len(segment)) + segment)) == "delta_result"
    segment = varint(101) + varint(0)
    assert refused(base, forged(base, tables + varint(len(segment)) + segment)) == "delta_bounds"


def test_the_rest_of_protocol_does_without_the_extra() -> None:
    """Base dependencies alone must import every other module: no numba, no range coder."""
    for path in Path(delta.__file__).parent.glob("*.py"):
        if "delta" not in path.name:
            source = path.read_text(encoding="utf-8")
            assert not re.search(r"^\s*(from|import) .*(delta|numba|constriction)", source, re.MULTILINE), (
                path
            )


def test_weights_that_may_not_be_written_are_coded_and_decoded_but_not_changed() -> None:
    base, new = updated(3000, 1e-2)
    data = delta.encode(base, new)
    for array in (base["w"], new["w"]):
        array.flags.writeable = False
    assert delta.encode(base, new) == data
    np.testing.assert_array_equal(delta.decode(base, bytearray(data))["w"], new["w"])
    with pytest.raises(LocalProtocolError, match="copy them"):
        delta.apply(base, data)


def test_our_own_mistakes_are_ours() -> None:
    base = {"w": np.zeros(4, np.uint16)}
    for other in ({"v": base["w"]}, {"w": np.zeros(5, np.uint16)}, {"w": np.zeros(4, np.int16)}):
        with pytest.raises(LocalProtocolError):
            delta.encode(base, other)  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError):
        delta.encode({"w": np.zeros((4, 4), np.uint16)[:, 1]}, base)

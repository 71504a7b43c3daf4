"""Weight deltas: exact for any bits, close to the entropy they condition on, deaf to hostile bytes."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

pytest.importorskip("constriction")
pytest.importorskip("numba")

from protocol import _delta_segments, delta
from protocol._delta_kernels import U16
from protocol._delta_tables import varint
from protocol.errors import DecodeError, LocalProtocolError, RemoteProtocolError

Weights = dict[str, U16]

SPECIAL = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x007F, 0x7F7F, 0x3F80]
"""Zeros, infinities, NaNs with payloads, denormals, the largest number, one."""

PAYLOAD = len(delta.MAGIC) + 64


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    """The kernels, compiled or read from numba's cache, before a test's time counts."""
    base, new = updated(1000, 0.3)
    delta.decode(base, delta.encode(base, new))
    noise = {"w": np.arange(100, dtype=np.uint16)}
    delta.encode(noise, {"w": noise["w"] ^ np.uint16(0x5A5A)})


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
    monkeypatch.setattr(delta, "SEGMENT_VALUES", 500)
    base: Weights = {}
    new: Weights = {}
    for k in range(9):
        one, two = updated(100 + 50 * k, 1e-2, seed=k)
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


GOLDEN_BASE = "050ab056c902736f7866a75c233b7c32b00de76c686c390d8f6f8898450e3e50"
GOLDEN_BODY = bytes.fromhex(
    "04c5018000000000000000000000000000003f0000000000000000000000000000000000000880000000000000000000"
    "0000000008032704030200010000000000000000000001020100020209000000013b2700010201000102000001020000"
    "05000109070100000000010002130100006b080202280201010520b9cb094005002e8ad96f4c326cabf9bc61cc9cb31e"
    "eb091ad6736104d99a6a16d7e25cdc8b8371314ec6cd381a57e36cdc8dc371394ec7ed381ed7e37cdc8f0372414ec80d"
    "392257e48cdc914372494ec92d3926d7e49cdc938372514eca4d994102"
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
    monkeypatch.setattr(delta, "SEGMENT_VALUES", 500)
    base, new = updated(5000, 3e-2)
    data = bytearray(delta.encode(base, new))
    data[-8:] = b"\xff" * 8
    before = base["w"].copy()
    with pytest.raises(DecodeError):
        delta.apply(base, bytes(data), threads=threads)
    np.testing.assert_array_equal(base["w"], before)


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
        (varint(1) + b"\x01" + b"\xff" * 48, "delta_truncated"),
        (varint(1) + b"\x01" + bytes(48) + varint(1 << 40), "delta_truncated"),
        (varint(1) + b"\x01" + bytes(48) + b"\xff" * 9, "delta_bounds"),
        (varint(1) + b"\x02" + bytes(3), "delta_truncated"),
    ],
)
def test_forged_bodies_are_refused_before_memory_is_taken(body: bytes, reason: str) -> None:
    base = {"w": np.full(10, 0x3F80, np.uint16)}
    assert refused(base, forged(base, body)) == reason


def test_more_changes_than_values_are_refused() -> None:
    base = {"w": np.full(10, 0x3F80, np.uint16)}
    active = np.zeros(256, np.uint8)
    active[0x7F] = 1
    table = varint(0) + varint(1) + varint(1) + varint(0)  # one class, 1, once
    segment = varint(10) + varint(0)
    tables = varint(1) + b"\x01" + np.packbits(active).tobytes() + bytes(16) + table
    assert refused(base, forged(base, tables + varint(len(segment)) + segment)) == "delta_result"
    segment = varint(11) + varint(0)
    assert refused(base, forged(base, tables + varint(len(segment)) + segment)) == "delta_bounds"


def test_the_rest_of_protocol_does_without_the_extra() -> None:
    """Base dependencies alone must import every other module: no numba, no range coder."""
    for path in Path(delta.__file__).parent.glob("*.py"):
        if "delta" not in path.name:
            source = path.read_text(encoding="utf-8")
            assert not re.search(r"^\s*(from|import) .*(delta|numba|constriction)", source, re.MULTILINE), (
                path
            )


def test_our_own_mistakes_are_ours() -> None:
    base = {"w": np.zeros(4, np.uint16)}
    for other in ({"v": base["w"]}, {"w": np.zeros(5, np.uint16)}, {"w": np.zeros(4, np.int16)}):
        with pytest.raises(LocalProtocolError):
            delta.encode(base, other)  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError):
        delta.encode({"w": np.zeros((4, 4), np.uint16)[:, 1]}, base)

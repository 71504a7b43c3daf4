"""Blobs on disk: verified chunks, restarts, eviction, few descriptors."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from node.weights.exchange.store import WeightsStore
from protocol.chunks import describe
from protocol.errors import DecodeError, LimitError, LocalProtocolError, OurFault

CHUNK = 16 * 1024
DATA = random.Random(3).randbytes(5 * CHUNK + 10)
CHUNKS = [DATA[at : at + CHUNK] for at in range(0, len(DATA), CHUNK)]
BLOB, HASHES = describe(len(DATA), CHUNKS)


def blob_of(seed: int, size: int = 2 * CHUNK) -> bytes:
    return random.Random(seed).randbytes(size)


def test_added_blob_is_whole_and_survives_a_restart(tmp_path):
    stored = WeightsStore(tmp_path, 1 << 20).add(DATA)
    assert (stored.blob, stored.hashes, stored.complete, stored.missing) == (BLOB, HASHES, True, 0)
    again = WeightsStore(tmp_path, 1 << 20).get(BLOB.root)
    assert again is not None
    assert bytes(again.data()) == DATA
    assert [again.read(index) for index in range(6)] == CHUNKS
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".blob", ".hashes"]


def test_chunks_in_any_order_make_the_blob(tmp_path):
    stored = WeightsStore(tmp_path, 1 << 20).open(BLOB, HASHES)
    for index in (5, 0, 3):
        assert stored.write(index, CHUNKS[index])
    assert not stored.write(3, CHUNKS[3])
    assert stored.here() == [0, 3, 5]
    assert (stored.missing, stored.complete, stored.missing_indices()) == (3, False, [1, 2, 4])
    with pytest.raises(LocalProtocolError, match="lacks 3"):
        stored.data()
    with pytest.raises(LocalProtocolError, match="lacks 3"):
        stored.seal()
    with pytest.raises(OurFault, match=r"chunk 1 .* is not here"):
        stored.read(1)
    for index in (1, 2, 4):
        stored.write(index, CHUNKS[index])
    stored.seal()
    stored.seal()
    assert bytes(stored.data()) == DATA


@pytest.mark.parametrize(
    ("index", "data", "reason"),
    [
        (6, CHUNKS[0], "chunk_index"),
        (-1, CHUNKS[0], "chunk_index"),
        (0, CHUNKS[0][:-1], "chunk_size"),
        (5, CHUNKS[0], "chunk_size"),
        (0, CHUNKS[1], "chunk_digest"),
        (0, CHUNKS[0][:-1] + bytes((CHUNKS[0][-1] ^ 1,)), "chunk_digest"),
    ],
)
def test_wrong_chunk_is_refused_and_not_kept(tmp_path, index, data, reason):
    stored = WeightsStore(tmp_path, 1 << 20).open(BLOB, HASHES)
    with pytest.raises(DecodeError) as refused:
        stored.write(index, data)
    assert refused.value.reason == reason
    assert stored.missing == 6


def test_interrupted_blob_is_taken_up_again_without_what_is_damaged(tmp_path):
    stored = WeightsStore(tmp_path, 1 << 20).open(BLOB, HASHES)
    for index in (0, 2, 4):
        stored.write(index, CHUNKS[index])
    with (tmp_path / f"{BLOB.root}.part").open("r+b") as file:
        file.seek(2 * CHUNK + 5)
        file.write(b"damaged")
    store = WeightsStore(tmp_path, 1 << 20)
    assert store.get(BLOB.root) is None
    leftover = store.leftover(BLOB.root)
    assert leftover is not None
    assert leftover.hashes == HASHES
    again = store.open(BLOB, HASHES)
    assert again.here() == [0, 4]
    assert store.leftover(BLOB.root) is None
    assert store.open(BLOB, HASHES) is again


def test_hashes_of_another_blob_are_refused(tmp_path):
    with pytest.raises(DecodeError) as refused:
        WeightsStore(tmp_path, 1 << 20).open(BLOB, bytes(len(HASHES)))
    assert refused.value.reason == "chunk_hashes"
    assert list(tmp_path.iterdir()) == []


def test_oldest_blobs_leave_but_not_pinned_or_used_ones(tmp_path):
    store = WeightsStore(tmp_path, 4 * 2 * CHUNK)
    roots = [store.add(blob_of(seed)).blob.root for seed in range(4)]
    store.pin([roots[0]])
    with store.get(roots[1]).used():
        newest = store.add(blob_of(4)).blob.root
        assert [store.get(root) is not None for root in roots] == [True, True, False, True]
        assert store.held_bytes == 4 * 2 * CHUNK
    store.pin([*roots, newest])
    with pytest.raises(OurFault, match="no room"):
        store.add(blob_of(5))
    assert len(list(tmp_path.iterdir())) == 8


def test_blob_above_the_whole_store_is_refused(tmp_path):
    store = WeightsStore(tmp_path, len(DATA) - 1)
    with pytest.raises(LimitError) as refused:
        store.open(BLOB, HASHES)
    assert refused.value.reason == "blob_size"
    with pytest.raises(OurFault, match="keep_gib"):
        store.add(DATA)
    assert list(tmp_path.iterdir()) == []


def test_rubbish_in_the_folder_is_deleted_and_never_served(tmp_path):
    WeightsStore(tmp_path, 1 << 20).add(DATA)
    (tmp_path / f"{'0' * 64}.hashes").write_bytes(b"\xff\xffrubbish")
    (tmp_path / f"{'1' * 64}.blob").write_bytes(b"no hashes")
    (tmp_path / f"{'2' * 64}.hashes").write_bytes((tmp_path / f"{BLOB.root}.hashes").read_bytes())
    store = WeightsStore(tmp_path, 1 << 20)
    assert store.get(BLOB.root) is not None
    assert sorted(path.stem for path in tmp_path.iterdir()) == [BLOB.root, BLOB.root]


def test_a_blob_takes_a_descriptor_only_while_it_is_read_or_written(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store = WeightsStore(tmp_path, 1 << 20)
    for number in range(40):
        stored = store.add(blob_of(number, 100))
        assert stored.read(0) == bytes(stored.data()) == blob_of(number, 100)
    part = store.open(BLOB, HASHES)
    part.write(0, CHUNKS[0])
    assert part.read(0) == CHUNKS[0]
    assert len(os.listdir("/proc/self/fd")) == before


def test_small_blobs_are_bounded_in_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.weights.exchange.store._MAX_BLOBS", 10)
    store = WeightsStore(tmp_path, 1 << 20)
    first = store.add(blob_of(0, 100)).blob.root
    store.pin([first])
    for number in range(1, 30):
        newest = store.add(blob_of(number, 100)).blob.root
    assert len(list(tmp_path.iterdir())) == 2 * 10
    assert store.get(first) is not None
    assert store.get(newest) is not None

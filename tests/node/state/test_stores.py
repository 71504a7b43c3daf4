"""State that outlives `kill -9`: atomic files, sequence numbers, counted envelopes."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from node.state import stores as state
from node.state.stores import MemorySequence, ReplayStore, SequenceStore, remove_leftovers, write_atomically
from protocol.constants import MAX_CLOCK_SKEW_MS
from protocol.errors import FreshnessError, ReplayError
from protocol.replay import ReplayCache
from tests.node.runtimes import ManualClock

ROOT = Path(__file__).parents[3]
NOW_MS = 1_700_000_000_000
PEER = "1" * 52
RECORD_BYTES = 88
"""Of the journal: one counted envelope."""


# --- write_atomically --------------------------------------------------------------------------------------


def test_file_is_replaced_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    write_atomically(path, b"new", mode=0o644)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_link_at_the_path_is_replaced_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / "file").symlink_to(target)
    write_atomically(tmp_path / "file", b"new")
    assert target.read_bytes() == b"precious"
    assert not (tmp_path / "file").is_symlink()


def test_leftovers_of_a_kill_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "file", b"old")
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", lambda *_: None)  # killed before the rename
        write_atomically(tmp_path / "file", b"new")
    assert len(list(tmp_path.iterdir())) == 2
    assert remove_leftovers(tmp_path) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


# --- SequenceStore -----------------------------------------------------------------------------------------


def numbers_from(path: Path, now_ms: int) -> SequenceStore:
    """Of a process whose clock stands still."""
    return SequenceStore(path, lambda: now_ms)


def test_numbers_begin_at_the_clock_and_rise(tmp_path: Path) -> None:
    store = numbers_from(tmp_path / "sequence", NOW_MS)
    numbers = [store.next() for _ in range(3)]
    assert [number // 1024 for number in numbers] == [NOW_MS, NOW_MS + 1, NOW_MS + 2]
    assert max(numbers) < 2**53


def test_numbers_rise_over_restarts_even_when_the_clock_does_not(tmp_path: Path) -> None:
    numbers: list[int] = []
    for now_ms in (NOW_MS, NOW_MS, NOW_MS - 86_400_000, 0, NOW_MS + 1):
        store = numbers_from(tmp_path / "sequence", now_ms)
        numbers += [store.next() for _ in range(3)]
    assert numbers == sorted(set(numbers))


def test_blocks_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SequenceStore, "BLOCK_TICKS", 4)
    store = numbers_from(tmp_path / "sequence", 0)
    assert [store.next() // 1024 for _ in range(10)] == list(range(10))
    assert (tmp_path / "sequence").read_text() == f"{12 * 1024}\n"
    assert numbers_from(tmp_path / "sequence", 0).next() // 1024 == 12


def test_numbers_follow_the_clock_at_one_write_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[bytes] = []
    monkeypatch.setattr(state, "write_atomically", lambda path, data: writes.append(data))
    clock = ManualClock(NOW_MS)
    store = SequenceStore(tmp_path / "sequence", clock.now_ms)
    for _ in range(600):
        assert store.next() // 1024 == clock.at_ms
        clock.at_ms += 1000
    assert len(writes) == 10


@pytest.mark.parametrize("text", ["", "12", "-5\n", "x\n", "9" * 40 + "\n", "\x00" * 16, "1e5\n"])
def test_damaged_or_lost_file_is_made_up_for_by_the_clock(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sequence"
    before = numbers_from(path, NOW_MS).next()
    path.write_text(text)
    assert numbers_from(path, NOW_MS + 1000).next() > before
    path.unlink()
    assert numbers_from(path, NOW_MS + 2000).next() > before


def test_full_disk_uses_up_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = numbers_from(tmp_path / "sequence", 0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(state, "write_atomically", full)
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                store.next()
    assert store.next() // 1024 == 0


def test_memory_sequence_counts() -> None:
    sequence = MemorySequence(5)
    assert [sequence.next(), sequence.next()] == [5, 6]


# --- ReplayStore -------------------------------------------------------------------------------------------


def admitted(store: ReplayStore, sequence: int, now_ms: int = NOW_MS, created_at: int = NOW_MS) -> bool:
    try:
        store.admit(PEER, sequence, created_at, created_at + 600_000, now_ms)
    except ReplayError:
        return False
    return True


def opened(folder: Path, now_ms: int = NOW_MS, **options: int) -> ReplayStore:
    return ReplayStore(folder, ReplayCache(capacity=1000), now_ms, **options)


def killed(store: ReplayStore, folder: Path) -> None:
    """Leave in `folder` what is there when the process is killed now, without what `close` does."""
    files = {path: path.read_bytes() for path in folder.iterdir()}
    store.close()
    for path, data in files.items():
        path.write_bytes(data)


def test_a_journal_that_cannot_be_folded_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written there is counted; the fold is tried again now and then."""
    tries: list[Path] = []

    def full(path: Path, *_: object) -> None:
        tries.append(path)
        raise OSError(28, "No space left on device")

    store = opened(tmp_path, journal_records=32)
    with monkeypatch.context() as patched:
        patched.setattr(state, "write_atomically", full)
        assert all(admitted(store, sequence) for sequence in range(100))
    assert 10 <= len(tries) <= 25
    assert all(admitted(store, sequence) for sequence in range(100, 110))
    assert (tmp_path / "replay.journal").stat().st_size < 32 * RECORD_BYTES
    killed(store, tmp_path)
    again = opened(tmp_path)
    assert not any(admitted(again, sequence) for sequence in range(110))
    again.close()


def test_counted_stays_counted_after_a_kill(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert all(admitted(store, sequence) for sequence in range(50))
    for restart in range(3):
        killed(store, tmp_path)
        store = opened(tmp_path, NOW_MS + restart)
        assert not any(admitted(store, sequence) for sequence in range(50 + restart))
        assert admitted(store, 50 + restart)
        assert not store.damaged
    store.close()


def test_journal_is_folded_and_stays_short(tmp_path: Path) -> None:
    store = opened(tmp_path, journal_records=10)
    assert all(admitted(store, sequence) for sequence in range(47))
    assert (tmp_path / "replay.journal").stat().st_size == 7 * RECORD_BYTES
    killed(store, tmp_path)
    store = opened(tmp_path)
    assert not any(admitted(store, sequence) for sequence in range(47))
    store.close()


def test_kill_between_snapshot_and_new_journal_changes_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert admitted(store, 1)
    journal = (tmp_path / "replay.journal").read_bytes()
    store.close()
    assert (tmp_path / "replay.journal").stat().st_size == 0
    (tmp_path / "replay.journal").write_bytes(journal)
    store = opened(tmp_path)
    assert not admitted(store, 1)
    assert admitted(store, 2)
    store.close()


@pytest.mark.parametrize("cut", [1, 40, 87])
def test_record_cut_by_a_kill_was_not_counted(tmp_path: Path, cut: int) -> None:
    store = opened(tmp_path)
    assert admitted(store, 1)
    assert admitted(store, 2)
    killed(store, tmp_path)
    journal = (tmp_path / "replay.journal").read_bytes()
    (tmp_path / "replay.journal").write_bytes(journal[:-cut])
    store = opened(tmp_path)
    assert not store.damaged
    assert not admitted(store, 1)
    assert admitted(store, 2)
    store.close()


@pytest.mark.parametrize("name", ["replay.snapshot", "replay.journal"])
def test_damaged_state_refuses_the_past(tmp_path: Path, name: str) -> None:
    store = opened(tmp_path)
    assert admitted(store, 1)
    store.close()
    store = opened(tmp_path)
    assert admitted(store, 2)
    killed(store, tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    data[30] ^= 1
    (tmp_path / name).write_bytes(data)

    later = NOW_MS + 1000
    store = opened(tmp_path, later)
    assert store.damaged
    assert not any(admitted(store, sequence, later) for sequence in range(10))
    created_at = later + MAX_CLOCK_SKEW_MS
    assert not admitted(store, 11, created_at, created_at)
    assert admitted(store, 12, created_at + 1, created_at + 1)
    store.close()


def test_full_disk_is_an_error_and_the_envelope_never_counts(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert admitted(store, 1)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (RECORD_BYTES + 20, hard))
    try:
        with pytest.raises(OSError, match=f"20 of {RECORD_BYTES} bytes"):
            admitted(store, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not admitted(store, 2)
    assert admitted(store, 3)
    killed(store, tmp_path)
    store = opened(tmp_path)
    assert not store.damaged
    assert not admitted(store, 3)
    store.close()


def test_refused_envelope_leaves_no_trace(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(FreshnessError):
        store.admit(PEER, 1, NOW_MS, NOW_MS, NOW_MS)
    assert (tmp_path / "replay.journal").stat().st_size == 0
    store.close()
    store.close()


def test_files_are_closed_to_others(tmp_path: Path) -> None:
    store = opened(tmp_path / "state")
    store.close()
    for path in (tmp_path / "state", *(tmp_path / "state").iterdir()):
        assert path.stat().st_mode & 0o077 == 0


KILLED = """
import os, signal, sys
from pathlib import Path
from node.state.stores import ReplayStore, SequenceStore
from protocol.replay import ReplayCache
folder = Path(sys.argv[1])
SequenceStore.BLOCK_TICKS = 8
sequence = SequenceStore(folder / "sequence", lambda: 0)
store = ReplayStore(folder, ReplayCache(), {now_ms}, journal_records=7)
while True:
    number = sequence.next()
    store.admit("{peer}", number, {now_ms}, {now_ms} + 600_000, {now_ms})
    print(number, flush=True)
"""


@pytest.mark.slow
def test_real_kill_at_any_point_repeats_nothing(tmp_path: Path) -> None:
    """Each process counts until it is killed in the middle of it; numbers rise through all of them."""
    source = KILLED.format(now_ms=NOW_MS, peer=PEER)
    numbers: list[int] = []
    for lines in (1, 20, 57):
        with subprocess.Popen(
            [sys.executable, "-c", source, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            numbers += [int(process.stdout.readline()) for _ in range(lines)]
            process.send_signal(signal.SIGKILL)
            numbers += [int(line) for line in process.stdout if line.endswith("\n")]
    assert len(numbers) >= 78
    assert numbers == sorted(set(numbers))
    store = opened(tmp_path)
    assert not store.damaged
    assert not any(admitted(store, number) for number in numbers)
    store.close()

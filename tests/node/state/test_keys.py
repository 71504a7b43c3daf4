"""The identity key on disk: made once, closed to others, refused with the command that mends it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from node.state.keys import create_key, load_key, load_or_create_key
from protocol.errors import KeyFileError
from protocol.identity import Identity


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "identity.key"


def test_key_is_made_once_and_then_read(path: Path) -> None:
    identity = load_or_create_key(path)
    assert load_or_create_key(path) == identity == load_key(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]


def test_file_is_what_the_network_daemon_reads(path: Path) -> None:
    identity = create_key(path)
    data = path.read_bytes()
    assert len(data) == 68
    assert data[:4] == bytes.fromhex("08011240")
    assert Identity.from_seed(data[4:36]) == identity


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_file_is_closed_to_others_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        create_key(tmp_path / "identity.key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "identity.key").stat().st_mode) == 0o600


def test_given_key_is_written(path: Path) -> None:
    identity = Identity.from_seed(bytes(32))
    assert create_key(path, identity) == identity == load_key(path)


def test_new_folder_is_closed_to_others(path: Path) -> None:
    create_key(path)
    assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0


def test_key_is_never_overwritten(path: Path) -> None:
    identity = create_key(path)
    with pytest.raises(KeyFileError, match=f"{path} already exists and a key is never overwritten"):
        create_key(path)
    assert load_key(path) == identity
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]


def test_two_processes_that_start_at_once_agree(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one makes its key after we looked and before we write."""
    link = os.link
    other: list[Identity] = []

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        other.append(create_key(path))
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    assert [load_or_create_key(path)] == other


def test_missing_key_is_a_sentence(path: Path) -> None:
    with pytest.raises(KeyFileError, match=f"no identity key at {path}"):
        load_key(path)


@pytest.mark.parametrize("mode", [0o601, 0o602, 0o604, 0o610, 0o620, 0o640, 0o660, 0o644, 0o777])
def test_key_that_others_may_touch_is_refused(path: Path, mode: int) -> None:
    create_key(path)
    path.chmod(mode)
    with pytest.raises(KeyFileError) as raised:
        load_or_create_key(path)
    assert f"{mode:04o}" in str(raised.value)
    assert f"`chmod 600 {path}`" in str(raised.value)
    path.chmod(0o600)
    load_key(path)


def test_command_in_the_sentence_is_quoted(tmp_path: Path) -> None:
    path = tmp_path / "my keys; rm" / "id"
    create_key(path)
    path.chmod(0o644)
    with pytest.raises(KeyFileError, match=r"chmod 600 '.*my keys; rm/id'"):
        load_key(path)


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o700])
def test_key_that_only_its_owner_may_touch_is_read(path: Path, mode: int) -> None:
    identity = create_key(path)
    path.chmod(mode)
    assert load_key(path) == identity


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_key_of_another_user_is_refused(path: Path) -> None:
    create_key(path)
    os.chown(path, 12345, -1)
    with pytest.raises(KeyFileError, match=f"belongs to user 12345.*chown {os.geteuid()} {path}"):
        load_key(path)


def test_symbolic_link_is_refused_also_when_dangling(path: Path, tmp_path: Path) -> None:
    create_key(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(KeyFileError, match=f"{link} is a symbolic link"):
        load_or_create_key(link)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    with pytest.raises(KeyFileError, match="symbolic link"):
        load_or_create_key(dangling)
    with pytest.raises(KeyFileError, match="already exists"):
        create_key(dangling)
    assert not (tmp_path / "nowhere").exists()


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    for path in (pipe, folder):
        with pytest.raises(KeyFileError, match=f"{path} is not a regular file"):
            load_key(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"-----BEGIN PRIVATE KEY-----\n",
        bytes.fromhex("08001240") + bytes(64),
        bytes.fromhex("08011240") + bytes(64),
        bytes(10_000_000),
    ],
    ids=["empty", "one byte", "PEM", "RSA", "halves that do not fit", "large"],
)
def test_malformed_key_is_refused_with_its_path(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match=f"{path}: .*restore it from a backup"):
        load_or_create_key(path)
    assert path.read_bytes() == data


def test_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        KeyFileError, match=r"cannot create the identity key .*/file/home/id: Not a directory"
    ):
        create_key(tmp_path / "file" / "home" / "id")


def test_full_disk_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KeyFileError, match="No space left on device"):
        load_or_create_key(path)
    assert list(path.parent.iterdir()) == []

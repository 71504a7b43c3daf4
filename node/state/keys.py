"""The identity key on disk: one file, made once, readable by its owner alone.

`load_or_create_key` is what a node calls. The file is a libp2p `PrivateKey` protobuf, the same bytes that the
network daemon reads, so there is one key and one file. It is created whole or not at all, with mode 0600 from
its first moment, and never overwritten. Not for showing or moving keys.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from shlex import quote

from node.state.stores import complete_file
from protocol.errors import KeyFileError
from protocol.identity import Identity

__all__ = ["KEY_FILE_MODE", "create_key", "load_key", "load_or_create_key"]

KEY_FILE_MODE = 0o600
_MAX_KEY_FILE_BYTES = 4096


def load_or_create_key(path: Path) -> Identity:
    """The key in `path`, made first if nothing is there. Raises `KeyFileError`."""
    if not os.path.lexists(path):
        with contextlib.suppress(FileExistsError):  # another process of ours was faster: its key is the key
            return _create(path, Identity.generate())
    return load_key(path)


def create_key(path: Path, identity: Identity | None = None) -> Identity:
    """A new key (or the given one) in a new file. Raises `KeyFileError` when the path is taken or cannot be
    written."""
    try:
        return _create(path, identity or Identity.generate())
    except FileExistsError:
        raise KeyFileError(
            f"{path} already exists and a key is never overwritten; move it away if you want a new identity"
        ) from None


def load_key(path: Path) -> Identity:
    """The key in an existing file. Raises `KeyFileError` unless it is a regular file, ours, closed to
    others, and holds an Ed25519 libp2p private key."""
    try:
        # O_NONBLOCK: a named pipe put here must not hang the start. The checks are on the open file, so that
        # nothing can be exchanged between check and reading.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise KeyFileError(f"there is no identity key at {path}; `swarm key new` makes one") from None
    except OSError as error:
        if path.is_symlink():
            raise KeyFileError(
                f"{path} is a symbolic link; put the key file itself there, or name its real path"
            ) from None
        raise KeyFileError(f"cannot read the identity key {path}: {error.strerror}") from None
    try:
        _check_file(path, os.fstat(descriptor))
        data = os.read(descriptor, _MAX_KEY_FILE_BYTES)
    finally:
        os.close(descriptor)
    try:
        return Identity.from_libp2p(data)
    except KeyFileError as error:
        data = b""  # a traceback that shows local variables must not show a damaged key
        raise KeyFileError(
            f"{path}: {error}; restore it from a backup, or move it away and let a new identity be made"
        ) from None


def _create(path: Path, identity: Identity) -> Identity:
    """The key appears complete, or the path was taken (`FileExistsError`), also when the machine stops in
    between."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with complete_file(path, identity.to_libp2p(), KEY_FILE_MODE) as temporary:
            os.link(temporary, path)  # unlike rename, this never replaces an existing file
            temporary.unlink()
    except FileExistsError:
        raise
    except OSError as error:
        raise KeyFileError(f"cannot create the identity key {path}: {error.strerror}") from None
    return identity


def _check_file(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"{path} is not a regular file; move it away and let a new identity be made")
    if status.st_uid != os.geteuid():
        raise KeyFileError(
            f"{path} belongs to user {status.st_uid}, this program runs as {os.geteuid()}: run it as the "
            f"owner, or `chown {os.geteuid()} {quote(str(path))}` if the key is yours"
        )
    if status.st_mode & 0o077:
        raise KeyFileError(
            f"{path} holds the private key and is open to others (mode {stat.S_IMODE(status.st_mode):04o}): "
            f"`chmod 600 {quote(str(path))}`, or make a new identity if somebody may have read it"
        )

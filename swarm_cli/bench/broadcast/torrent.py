"""The baseline that everybody knows: libtorrent, as one seeder and a set of leechers.

Trackerless and without discovery: all are connected to all before the start, when the leechers still want
nothing; then they want the file. No encryption, no limits on local peers (unless the network has none), a
slot for everybody, so that nothing but its own choices holds it back. Pieces of 256 KiB, about as many
requests on their way as it likes.
"""

from __future__ import annotations

import asyncio
import base64
import time
from pathlib import Path
from typing import Any

import libtorrent

from swarm_cli.bench.broadcast.member import Member, Place

__all__ = ["TorrentMember"]

_PORT = 6881
_POLL_S = 0.02
_PIECE_BYTES = 256 * 1024
_WANTED, _NOT_WANTED = 4, 0
_NOT_READY = (
    libtorrent.torrent_status.states.checking_files,
    libtorrent.torrent_status.states.checking_resume_data,
)


class TorrentMember(Member):
    """A session with one torrent."""

    def __init__(self, place: Place) -> None:
        self._place = place
        port = _PORT + (0 if place.site.namespace else place.number)
        self._address = (place.site.address, port)
        cap_bytes = round(place.cap_mbit * 1e6 / 8)
        self._session = libtorrent.session(
            {
                "listen_interfaces": f"{place.site.address}:{port}",
                "enable_dht": False,
                "enable_lsd": False,
                "enable_upnp": False,
                "enable_natpmp": False,
                "in_enc_policy": libtorrent.enc_policy.disabled,
                "out_enc_policy": libtorrent.enc_policy.disabled,
                "enable_incoming_utp": False,
                "enable_outgoing_utp": False,
                "allow_multiple_connections_per_ip": True,
                "close_redundant_connections": False,
                "unchoke_slots_limit": -1,
                "alert_mask": 0,
            }
        )
        if cap_bytes:
            self._cap(cap_bytes)
        self._torrent: libtorrent.torrent_handle | None = None

    def _cap(self, bytes_per_s: int) -> None:
        """Its global limits leave out local peers."""
        number = self._session.local_peer_class_id
        limits = self._session.get_peer_class(number)
        self._session.set_peer_class(
            number, {**limits, "upload_limit": bytes_per_s, "download_limit": bytes_per_s}
        )

    async def open(self) -> dict[str, Any]:
        offer: dict[str, Any] = {"address": self._address}
        if self._place.is_source:
            metadata = await asyncio.to_thread(_describe, self._place.blob)
            self._add(metadata, self._place.blob.parent, wanted=True)
            offer["torrent"] = base64.b64encode(metadata).decode()
        return offer

    def _add(self, metadata: bytes, folder: Path, *, wanted: bool) -> None:
        parameters = libtorrent.add_torrent_params()
        parameters.ti = libtorrent.torrent_info(metadata)
        parameters.save_path = str(folder)
        parameters.file_priorities = [_WANTED if wanted else _NOT_WANTED]
        parameters.flags &= ~libtorrent.torrent_flags.auto_managed
        parameters.flags &= ~libtorrent.torrent_flags.paused
        self._torrent = self._session.add_torrent(parameters)

    async def join(self, others: list[dict[str, Any]], timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            if not self._place.is_source:
                self._add(base64.b64decode(others[0]["torrent"]), self._place.folder, wanted=False)
            while self._status().state in _NOT_READY:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
            again_s = 0.0
            # The one with the higher number dials, again when the other side was not ready.
            while self._status().num_peers < len(others) - 1:
                if time.monotonic() > again_s:
                    again_s = time.monotonic() + 2.0
                    known = {peer.ip[0:2] for peer in self._handle().get_peer_info()}
                    for other in others[: self._place.number]:
                        if tuple(other["address"]) not in known:
                            self._handle().connect_peer(tuple(other["address"]))
                await asyncio.sleep(_POLL_S)

    async def start(self, timeout_s: float) -> Path | None:
        if self._place.is_source:
            return None
        self._handle().prioritize_files([_WANTED])
        async with asyncio.timeout(timeout_s):
            while True:
                status = self._status()
                # Pieces count once their hash matched; nothing is wanted until it saw the priority.
                if status.total_wanted and status.is_finished and status.progress >= 1.0:
                    return self._place.folder / self._place.blob.name
                await asyncio.sleep(_POLL_S)

    async def report(self) -> dict[str, Any]:
        return {"sent_bytes": self._status().total_payload_upload}

    async def close(self) -> None:
        self._session.pause()

    def _handle(self) -> libtorrent.torrent_handle:
        if self._torrent is None:
            raise RuntimeError("there is no torrent yet")
        return self._torrent

    def _status(self) -> libtorrent.torrent_status:
        return self._handle().status()


def _describe(path: Path) -> bytes:
    storage = libtorrent.file_storage()
    libtorrent.add_files(storage, str(path))
    maker = libtorrent.create_torrent(storage, _PIECE_BYTES)
    libtorrent.set_piece_hashes(maker, str(path.parent))
    data: bytes = libtorrent.bencode(maker.generate())
    return data

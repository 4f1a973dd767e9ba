"""Packed bodies are unpacked on threads, in linear time, in turns of their owners, while somebody waits for them."""

from __future__ import annotations

import asyncio
import gzip
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from server_harness import API, Person, running
from starlette.requests import Request
from waiting import HANG_S

from mint.errors import InvalidRequestError, RequestCancelledError
from mint.server.http import unpacking
from mint.server.http.bodies import Bodies
from mint.server.http.unpacking import MAX_FRAMES, SLICE_BYTES, THREADS, Unpacker, declared_size

PACKED = {"gzip": gzip.compress, "zstd": zstandard.ZstdCompressor(level=1, write_content_size=False).compress}
LIMIT = 64 << 20


@pytest.fixture(params=PACKED)
def encoding(request: pytest.FixtureRequest) -> str:
    return request.param


async def unpacked(body: bytes, encoding: str, owner: str = "ann") -> bytes:
    unpacker = Unpacker()
    try:
        await unpacker.size(owner, body, encoding, LIMIT)
        return await unpacker.content(owner, body, encoding)
    finally:
        unpacker.close()


class Watched:
    """Stands in for the beginning of frames: notes on which threads they are unpacked, and how many bytes they get."""

    def __init__(self, begin_frame: Callable[[], Any]) -> None:
        self._begin_frame = begin_frame
        self.threads: set[str] = set()
        self.taken_bytes = 0
        self.began, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def frame(self) -> Any:
        watched, inner = self, self._begin_frame()

        class Frame:
            eof = property(lambda _: inner.eof)
            unused_data = property(lambda _: inner.unused_data)

            def decompress(self, data: bytes) -> bytes:
                watched.taken_bytes += len(data)
                watched.threads.add(threading.current_thread().name)
                watched.began.set()
                assert watched.go_on.wait(HANG_S)
                return inner.decompress(data)

        return Frame()


def watch(monkeypatch: pytest.MonkeyPatch, encoding: str) -> Watched:
    watched = Watched(unpacking._FRAMES[encoding]())
    monkeypatch.setattr(unpacking, "_FRAMES", {encoding: lambda: watched.frame})
    return watched


def test_as_many_frames_as_are_allowed_are_one_body_and_one_more_is_refused(encoding: str) -> None:
    frame = PACKED[encoding](b"ab")
    assert asyncio.run(unpacked(frame * MAX_FRAMES, encoding)) == b"ab" * MAX_FRAMES
    with pytest.raises(InvalidRequestError, match=f"{MAX_FRAMES} frames") as refused:
        asyncio.run(unpacked(frame * (MAX_FRAMES + 1), encoding))
    assert refused.value.field == "body"


def test_many_frames_are_unpacked_in_linear_time(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No frame is given more of the rest of the body than a slice."""
    watched = watch(monkeypatch, encoding)
    body = PACKED[encoding](b"") * MAX_FRAMES
    asyncio.run(unpacked(body, encoding))
    passes = 2
    assert watched.taken_bytes <= passes * (len(body) + MAX_FRAMES * SLICE_BYTES[encoding])


def test_large_content_is_whole(encoding: str) -> None:
    content = bytes(range(256)) * 40_000 + bytes(20 << 20)
    assert asyncio.run(unpacked(PACKED[encoding](content), encoding)) == content


def test_even_a_small_body_is_unpacked_beside_the_event_loop(
    tmp_path: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as server:
        person = Person(server)
        watched = watch(monkeypatch, encoding)
        watched.go_on.clear()
        body = PACKED[encoding](b"{}" + b" " * 1000)
        sender = threading.Thread(
            target=person.send, args=("POST", f"{API}/create_session", body), kwargs={"content_encoding": encoding}
        )
        sender.start()
        try:
            assert watched.began.wait(HANG_S)
            assert person.send("GET", "/healthz").status_code == 200
        finally:
            watched.go_on.set()
            sender.join()
    assert all(name.startswith("mint-unpack") for name in watched.threads)


def test_a_body_whose_sender_is_gone_is_unpacked_no_further(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, encoding)
    watched.go_on.clear()
    body = PACKED[encoding](b"x") * MAX_FRAMES
    messages = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        if len(messages) == 1:
            await asyncio.to_thread(watched.began.wait, HANG_S)
        return messages.pop(0)

    async def read() -> None:
        scope = {"type": "http", "method": "POST", "headers": [(b"content-encoding", encoding.encode())]}
        with pytest.raises(RequestCancelledError):
            await bodies.read(Request(scope, receive), "ann")

    bodies = Bodies()
    asyncio.run(read())
    assert bodies.held_bytes == 0
    taken_bytes = watched.taken_bytes
    watched.go_on.set()
    bodies.close()
    bodies._unpacker._threads.shutdown(wait=True)
    assert watched.taken_bytes == taken_bytes <= SLICE_BYTES[encoding]


def test_an_owner_with_many_bodies_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = watch(monkeypatch, "gzip")
    watched.go_on.clear()
    body = gzip.compress(b"a")

    async def run() -> None:
        unpacker = Unpacker()
        first = [asyncio.create_task(unpacker.content("ann", body, "gzip")) for _ in range(3 * THREADS)]
        assert await asyncio.to_thread(watched.began.wait, HANG_S)
        watched.began.clear()
        other = asyncio.create_task(unpacker.content("bob", body, "gzip"))
        assert await asyncio.to_thread(watched.began.wait, HANG_S)
        watched.go_on.set()
        assert await asyncio.gather(*first, other) == [b"a"] * (3 * THREADS + 1)
        unpacker.close()

    asyncio.run(asyncio.wait_for(run(), 2 * HANG_S))


@pytest.mark.parametrize("declared", [0, 1, 100, 5000], ids=str)
def test_a_frame_that_declares_another_size_than_it_has_is_refused(declared: int) -> None:
    """And none unpacks to more than it declares."""
    honest = zstandard.ZstdCompressor(level=1).compress(bytes(300))
    assert honest[:6] == bytes.fromhex("28b52ffd602c")  # one segment, and a size of two bytes: 300 - 256
    forged = honest[:5] + (declared - 256).to_bytes(2, "little") + honest[7:] if declared >= 256 else b""
    forged = forged or honest[:4] + b"\x20" + declared.to_bytes(1, "little") + honest[7:]
    assert declared_size(forged, "zstd") == (declared or None)
    assert not asyncio.run(Unpacker().single_frame("ann", forged))
    with pytest.raises(InvalidRequestError, match="cannot be unpacked"):
        asyncio.run(unpacked(forged, "zstd"))


def test_only_one_whole_frame_is_a_single_frame() -> None:
    pack = zstandard.ZstdCompressor(level=1).compress
    whole = pack(b"a" * 5000)
    for body, content in ((whole, b"a" * 5000), (whole * 2, None), (whole + b"more", None), (whole[:-1], None)):
        assert declared_size(body, "zstd") == 5000
        assert asyncio.run(Unpacker().single_frame("ann", body)) == content
    stream = zstandard.ZstdCompressor(level=1).compressobj()
    assert declared_size(stream.compress(b"a") + stream.flush(), "zstd") is None
    assert declared_size(b"no frame", "zstd") is None


def test_a_frame_that_is_cut_short_is_refused(encoding: str) -> None:
    body = PACKED[encoding](b"a" * 5000 + bytes(5000))
    for cut in (1, len(body) // 2, len(body) - 1):
        with pytest.raises(InvalidRequestError, match="cannot be unpacked"):
            asyncio.run(unpacked(PACKED[encoding](b"b") + body[:cut], encoding))


def test_what_follows_the_last_frame_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="cannot be unpacked"):
        asyncio.run(unpacked(zlib.compress(b"a", wbits=31) + b"more", "gzip"))

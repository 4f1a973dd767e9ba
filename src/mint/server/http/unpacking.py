"""Unpacks bodies that came as gzip or zstd, on threads: in linear time, within limits, and no longer than needed.

A body of a few KiB may unpack to many MiB, or consist of nothing but the beginnings and ends of frames. So no body is
unpacked on the event loop.
"""

from __future__ import annotations

import asyncio
import io
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

import zstandard

from mint.errors import InvalidRequestError

T = TypeVar("T")

THREADS = 2

MAX_FRAMES = 2048
"""Members of gzip or frames of zstd in one body. Tools that write many of them write one for each 64 KiB of content."""

SLICE_BYTES: Mapping[str, int] = {"gzip": 16 * 1024, "zstd": 1024}
"""How much of a body is unpacked at once. It becomes at most 17 or 32 MiB: a block of zstd has 4 bytes for 128 KiB."""

MAX_WINDOW_BYTES = 32 << 20
"""The memory that a zstd stream may require; level 19 of the usual tools requires 8 MiB."""


class LargeContentError(Exception):
    """The unpacked body is larger than allowed."""


def declared_size(body: bytes, encoding: str) -> int | None:
    """The size of the content that the first frame of a body declares; None if it declares none, or no content."""
    if encoding != "zstd":
        return None
    try:
        size = zstandard.frame_content_size(body)
    except zstandard.ZstdError:
        return None
    return size if size > 0 else None  # zstandard believes a frame that declares no content, whatever it has


class Unpacker:
    """The threads that unpack bodies: one body of each owner at a time, in the order in which they came.

    So each owner waits for at most one body of each other owner. One event loop at a time.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="mint-unpack")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def single_frame(self, owner: str, body: bytes) -> bytes | None:
        """The content of a body that is one frame of zstd with a `declared_size`; None if it is more or damaged.

        Much faster than `size` and `content`: the interpreter's lock is given back once instead of for each slice.
        """
        return await self._run(owner, lambda _cancelled: _single_frame(body))

    async def size(self, owner: str, body: bytes, encoding: str, limit: int) -> int:
        """The size of the content of a body, whose encoding is `gzip` or `zstd`, without keeping the content.

        Raises:
            LargeContentError: the content has more than `limit` bytes.
            InvalidRequestError: the body cannot be unpacked.
        """
        return await self._run(owner, lambda cancelled: _size(_pieces(body, encoding, cancelled), limit))

    async def content(self, owner: str, body: bytes, encoding: str) -> bytes:
        """The content of a body whose `size` is known."""
        return await self._run(owner, lambda cancelled: _joined(_pieces(body, encoding, cancelled)))

    def close(self) -> None:
        """Unpacks nothing more; what runs ends once nobody waits for it."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, owner: str, step: Callable[[threading.Event], T]) -> T:
        """The result of a step. If the caller is cancelled, the step ends within milliseconds."""
        turn = self._turns.setdefault(owner, asyncio.Lock())
        async with turn:
            cancelled = threading.Event()
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, step, cancelled)
            finally:
                cancelled.set()


def _size(pieces: Iterator[bytes], limit: int) -> int:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > limit:
            raise LargeContentError
    return size


def _single_frame(body: bytes) -> bytes | None:
    try:
        return zstandard.ZstdDecompressor().decompress(body, read_across_frames=False, allow_extra_data=False)
    except zstandard.ZstdError:
        return None


def _joined(pieces: Iterator[bytes]) -> bytes:
    content = io.BytesIO()  # b"".join would hold the interpreter's lock for 40 ms for 60 MiB
    content.writelines(pieces)
    return content.getvalue()


class _Frame(Protocol):
    """A member of gzip or a frame of zstd, as it is being unpacked."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def _zstd_frames() -> Callable[[], _Frame]:
    return zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj


def _gzip_frames() -> Callable[[], _Frame]:
    return lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)


_FRAMES: Mapping[str, Callable[[], Callable[[], _Frame]]] = {"gzip": _gzip_frames, "zstd": _zstd_frames}


def _pieces(body: bytes, encoding: str, cancelled: threading.Event) -> Iterator[bytes]:
    """The content of all frames, a slice of the body at a time."""
    if not body:
        return
    begin_frame, slice_bytes = _FRAMES[encoding](), SLICE_BYTES[encoding]
    frame, frames = begin_frame(), 1
    try:
        for start in range(0, len(body), slice_bytes):
            rest = body[start : start + slice_bytes]
            while rest and not cancelled.is_set():
                if frame.eof:
                    frame, frames = begin_frame(), frames + 1
                    if frames > MAX_FRAMES:
                        raise InvalidRequestError(
                            f"has more than {MAX_FRAMES} frames of {encoding}",
                            field="body",
                            value=f"{len(body)} bytes",
                            remedy="Compress it as one frame, or send it without encoding",
                        )
                yield frame.decompress(rest)
                rest = frame.unused_data if frame.eof else b""
        if not frame.eof:
            raise EOFError("it ends too early")
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        raise InvalidRequestError(
            f"cannot be unpacked as {encoding}: {error}",
            field="body",
            value=f"{len(body)} bytes",
            remedy="Send it whole, or without encoding",
        ) from error

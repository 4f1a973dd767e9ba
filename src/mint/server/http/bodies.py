"""Bodies, read within bounds: of size as sent and as unpacked, of time, and of memory over all callers together.

What is refused is refused as early as it can be known. Knows no route and no message.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import zstandard
from starlette.requests import Request

from mint.errors import BodyTooLargeError, InvalidRequestError, OverloadedError, UnsupportedBodyError

T = TypeVar("T")

MIB = 1024 * 1024
INLINE_BYTES = 256 * 1024
"""Packed bodies up to this size are unpacked on the event loop, larger ones on a thread."""

STEP_BYTES = 256 * 1024
MAX_WINDOW_BYTES = 32 * MIB
"""The memory that a zstd stream may ask for; level 19 of the usual tools asks for 8 MiB."""


@dataclass(frozen=True)
class BodyLimits:
    """How much is read of one body, of one owner's and of everybody's at once, and how long is waited for more.

    A body must arrive within `patience_s`, and for every `slowest_bytes_s` of it there is one second more.
    """

    body_bytes: int = 64 * MIB
    owner_bytes: int = 256 * MIB
    total_bytes: int = 2048 * MIB
    patience_s: float = 30.0
    slowest_bytes_s: int = 64 * 1024


class Bodies:
    """The bodies that are being read, or worked on, at this moment. One event loop at a time."""

    def __init__(self, limits: BodyLimits | None = None) -> None:
        self.limits = limits or BodyLimits()
        self._held: Counter[str] = Counter()
        self.held_bytes = 0
        """Of everybody's bodies together."""

    @asynccontextmanager
    async def body_of(self, request: Request, owner: str) -> AsyncGenerator[bytes]:
        """The whole body, unpacked; it counts as held until the end of the block.

        Raises:
            BodyTooLargeError: it is, or says that it is, larger than allowed, or grows to be when unpacked.
            UnsupportedBodyError: its encoding is none of identity, gzip, zstd.
            InvalidRequestError: it cannot be unpacked, or broke off.
            OverloadedError: too many bodies are being read, or this one came too slowly; it may be sent again.
        """
        encoding = _encoding(request)
        self._refuse_declared(request)
        held = 0
        try:
            chunks: list[bytes] = []
            async for chunk in self._chunks(request):
                self._hold(owner, len(chunk))
                held += len(chunk)
                if held > self.limits.body_bytes:
                    raise self._too_large(f"more than {self.limits.body_bytes} bytes")
                chunks.append(chunk)
            body = b"".join(chunks)
            if encoding != "identity":
                unpacked_bytes = await self._work(_unpacked_size[encoding], body, encoding)
                self._hold(owner, unpacked_bytes)
                held += unpacked_bytes
                body = await self._work(_unpack[encoding], body, encoding)
            yield body
        finally:
            self._release(owner, held)

    def _refuse_declared(self, request: Request) -> None:
        declared = request.headers.get("content-length", "0")
        if not (declared.isascii() and declared.isdigit()):
            raise InvalidRequestError("is not a length", field="content-length", value=declared, remedy="Send a number")
        if len(declared) > 18 or int(declared) > self.limits.body_bytes:
            raise self._too_large(f"{declared} bytes")

    async def _chunks(self, request: Request) -> AsyncGenerator[bytes]:
        limits = self.limits
        started_at, received, more = time.monotonic(), 0, True
        while more:
            left_s = started_at + limits.patience_s + received / limits.slowest_bytes_s - time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, left_s)):
                    message = await request.receive()
            except TimeoutError:
                raise OverloadedError(
                    f"the body came too slowly: {received} bytes in {time.monotonic() - started_at:.0f} s",
                    remedy="Send the same request again",
                ) from None
            if message["type"] == "http.disconnect":
                raise InvalidRequestError("broke off", field="body", remedy="Send the same request again")
            chunk: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            received += len(chunk)
            if chunk:
                yield chunk

    async def _work(self, step: Callable[[bytes, int], T], body: bytes, encoding: str) -> T:
        limit = self.limits.body_bytes
        try:
            if len(body) <= INLINE_BYTES:
                return step(body, limit)
            return await asyncio.to_thread(step, body, limit)
        except (zlib.error, zstandard.ZstdError, EOFError) as error:
            raise InvalidRequestError(
                f"cannot be unpacked as {encoding}: {error}", field="body", remedy="Send it whole, or without encoding"
            ) from error
        except _BombError:
            raise self._too_large(f"more than {limit} bytes once unpacked") from None

    def _too_large(self, value: str) -> BodyTooLargeError:
        remedy = f"Send at most {self.limits.body_bytes} bytes at once: split the data into several calls"
        return BodyTooLargeError("is too large", field="body", value=value, remedy=remedy)

    def _hold(self, owner: str, count: int) -> None:
        if self.held_bytes + count > self.limits.total_bytes or self._held[owner] + count > self.limits.owner_bytes:
            raise OverloadedError("too many bodies are being read already", remedy="Send the same request again later")
        self.held_bytes += count
        self._held[owner] += count

    def _release(self, owner: str, count: int) -> None:
        self.held_bytes -= count
        self._held[owner] -= count
        if not self._held[owner]:
            del self._held[owner]


def _encoding(request: Request) -> str:
    named = [part.strip().lower() for line in request.headers.getlist("content-encoding") for part in line.split(",")]
    wanted = [name for name in named if name not in ("", "identity")]
    if not wanted:
        return "identity"
    if len(wanted) > 1 or wanted[0] not in ("gzip", "x-gzip", "zstd"):
        raise UnsupportedBodyError(
            "is not an encoding of this server",
            field="content-encoding",
            value=", ".join(wanted),
            remedy="Send the body as it is, or with one of gzip and zstd",
        )
    return "zstd" if wanted[0] == "zstd" else "gzip"


class _BombError(Exception):
    """More comes out than is allowed."""


def _gzip_size(body: bytes, limit: int) -> int:
    size = 0
    for piece in _gzip_pieces(body):
        size += len(piece)
        if size > limit:
            raise _BombError
    return size


def _gzip_pieces(body: bytes) -> Iterator[bytes]:
    """What is in all members of a gzip stream, a step at a time."""
    while body:
        member = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        is_over = False
        while not is_over:
            piece = member.decompress(body, STEP_BYTES)
            body, is_over = member.unconsumed_tail, member.eof
            if not (piece or body or is_over):
                raise EOFError("it ends too early")
            yield piece
        body = member.unused_data


def _unpack_gzip(body: bytes, _limit: int) -> bytes:
    return b"".join(_gzip_pieces(body))


def _zstd_size(body: bytes, limit: int) -> int:
    size = 0
    reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(body, read_across_frames=True)
    while piece := reader.read(STEP_BYTES):
        size += len(piece)
        if size > limit:
            raise _BombError
    return size


def _unpack_zstd(body: bytes, _limit: int) -> bytes:
    """Only after `_zstd_size`: this way of reading sees that a stream is cut short, but cannot be bounded."""
    parts: list[bytes] = []
    while body:
        frame = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
        parts.append(frame.decompress(body))
        if not frame.eof:
            raise EOFError("it ends too early")
        body = frame.unused_data
    return b"".join(parts)


_unpacked_size: Mapping[str, Callable[[bytes, int], int]] = {"gzip": _gzip_size, "zstd": _zstd_size}
_unpack: Mapping[str, Callable[[bytes, int], bytes]] = {"gzip": _unpack_gzip, "zstd": _unpack_zstd}

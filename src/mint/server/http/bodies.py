"""Reads request bodies within limits: of size as sent and as decompressed, of time, and of memory over all callers.

A request is refused as early as possible.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import zstandard
from starlette.requests import Request

from mint.errors import BodyTooLargeError, InvalidRequestError, OverloadedError, UnsupportedBodyError

T = TypeVar("T")

MIB = 1024 * 1024
INLINE_BYTES = 256 * 1024
"""Compressed bodies up to this size are decompressed on the event loop, larger ones on a thread."""

STEP_BYTES = 256 * 1024
MAX_WINDOW_BYTES = 32 * MIB
"""The memory that a zstd stream may require; level 19 of the usual tools requires 8 MiB."""


@dataclass(frozen=True)
class BodyLimits:
    """How large one body may be, and all bodies of one owner and of all owners at once; how slowly it may arrive.

    A body must arrive within `patience_s`, plus one second for every `slowest_bytes_s` of it.
    """

    body_bytes: int = 64 * MIB
    owner_bytes: int = 256 * MIB
    total_bytes: int = 2048 * MIB
    patience_s: float = 30.0
    slowest_bytes_s: int = 64 * 1024


@dataclass
class Body:
    """A body that has been read, and the memory that it counts for until `release`."""

    bodies: Bodies
    owner: str
    content: bytes = b""
    held_bytes: int = 0

    def release(self) -> None:
        """Gives the memory back; a second call does nothing."""
        self.bodies.hold(self, -self.held_bytes)


class Bodies:
    """The bodies that are being read, or worked on, at this moment. One event loop at a time."""

    def __init__(self, limits: BodyLimits | None = None) -> None:
        self.limits = limits or BodyLimits()
        self._held: Counter[str] = Counter()
        self.held_bytes = 0
        """The memory that all bodies hold together."""

    async def read(self, request: Request, owner: str, max_bytes: int | None = None) -> Body:
        """The whole body, decompressed; its memory counts until it is released. `max_bytes` may lower the limit.

        Raises:
            BodyTooLargeError: it is, or says that it is, larger than allowed, or grows to be when decompressed.
            UnsupportedBodyError: its encoding is none of identity, gzip, zstd.
            InvalidRequestError: it cannot be decompressed, or broke off.
            OverloadedError: too many bodies are being read, or this one came too slowly; it may be sent again.
        """
        encoding = _encoding(request) if "content-encoding" in request.headers else "identity"
        declared = request.headers.get("content-length", "0")
        if not (declared.isascii() and declared.isdigit()):
            raise InvalidRequestError("is not a length", field="content-length", value=declared, remedy="Send a number")
        limit = self.limits.body_bytes if max_bytes is None else min(max_bytes, self.limits.body_bytes)
        if len(declared) > 18 or int(declared) > limit:
            raise _too_large(f"{declared} bytes", limit)
        body = Body(self, owner)
        try:
            content = await self._receive(request, body, limit)
            if encoding != "identity":
                # Its size first, in steps: a bomb is refused before its content takes memory.
                self.hold(body, await _decompress(_SIZES[encoding], content, encoding, limit))
                content = await _decompress(_CONTENTS[encoding], content, encoding, limit)
        except BaseException:
            body.release()
            raise
        body.content = content
        return body

    def hold(self, body: Body, count: int) -> None:
        """Counts so many bytes more for a body, or fewer, if `count` is negative.

        Raises:
            OverloadedError: they would be too many.
        """
        limits = self.limits
        owner = body.owner
        if count > 0 and (
            self.held_bytes + count > limits.total_bytes or self._held[owner] + count > limits.owner_bytes
        ):
            raise OverloadedError("too many bodies are being read already", remedy="Send the same request again later")
        body.held_bytes += count
        self.held_bytes += count
        self._held[owner] += count
        if not self._held[owner]:
            del self._held[owner]

    async def _receive(self, request: Request, body: Body, limit: int) -> bytes:
        limits = self.limits
        started_at = time.monotonic()
        chunks = list[bytes]()
        more = True
        while more:
            left_s = started_at + limits.patience_s + body.held_bytes / limits.slowest_bytes_s - time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, left_s)):
                    message = await request.receive()
            except TimeoutError:
                raise OverloadedError(
                    f"the body came too slowly: {body.held_bytes} bytes in {time.monotonic() - started_at:.0f} s",
                    remedy="Send the same request again",
                ) from None
            if message["type"] == "http.disconnect":
                raise InvalidRequestError("broke off", field="body", remedy="Send the same request again")
            chunk: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            if chunk:
                self.hold(body, len(chunk))
                chunks.append(chunk)
            if body.held_bytes > limit:
                raise _too_large(f"more than {limit} bytes", limit)
        return b"".join(chunks)


async def _decompress(step: Callable[[bytes, int], T], body: bytes, encoding: str, limit: int) -> T:
    try:
        if len(body) <= INLINE_BYTES:
            return step(body, limit)
        return await asyncio.to_thread(step, body, limit)
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        raise InvalidRequestError(
            f"cannot be unpacked as {encoding}: {error}", field="body", remedy="Send it whole, or without encoding"
        ) from error
    except _BombError:
        raise _too_large(f"more than {limit} bytes once unpacked", limit) from None


def _too_large(value: str, limit: int) -> BodyTooLargeError:
    remedy = f"Send at most {limit} bytes at once: split the data into several calls"
    return BodyTooLargeError("is too large", field="body", value=value, remedy=remedy)


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
    """The decompressed body is larger than allowed."""


def _gzip_size(body: bytes, limit: int) -> int:
    size = 0
    for piece in _gzip_pieces(body):
        size += len(piece)
        if size > limit:
            raise _BombError
    return size


def _gzip_pieces(body: bytes) -> Iterator[bytes]:
    """The content of all members of a gzip stream, a step at a time."""
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


def _decompress_gzip(body: bytes, _limit: int) -> bytes:
    return b"".join(_gzip_pieces(body))


def _zstd_size(body: bytes, limit: int) -> int:
    size = 0
    reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(body, read_across_frames=True)
    while piece := reader.read(STEP_BYTES):
        size += len(piece)
        if size > limit:
            raise _BombError
    return size


def _decompress_zstd(body: bytes, _limit: int) -> bytes:
    """Only after `_zstd_size`: this way of reading notices that a stream is cut short, but cannot be limited."""
    parts: list[bytes] = []
    while body:
        frame = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
        parts.append(frame.decompress(body))
        if not frame.eof:
            raise EOFError("it ends too early")
        body = frame.unused_data
    return b"".join(parts)


_SIZES: Mapping[str, Callable[[bytes, int], int]] = {"gzip": _gzip_size, "zstd": _zstd_size}
_CONTENTS: Mapping[str, Callable[[bytes, int], bytes]] = {"gzip": _decompress_gzip, "zstd": _decompress_zstd}

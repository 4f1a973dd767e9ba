"""Reads request bodies within limits: of size as sent and as decompressed, of time, and of memory over all callers.

A request is refused as early as possible.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

from mint.errors import (
    BodyTooLargeError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    UnsupportedBodyError,
)
from mint.server.http.unpacking import LargeContentError, Unpacker, declared_size
from mint.server.limits import MIB

T = TypeVar("T")


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
        self._unpacker = Unpacker()

    def close(self) -> None:
        """Unpacks no more bodies."""
        self._unpacker.close()

    async def read(self, request: Request, owner: str, max_bytes: int | None = None) -> Body:
        """The whole body, decompressed; its memory counts until it is released. `max_bytes` may lower the limit.

        Raises:
            BodyTooLargeError: it is, or says that it is, larger than allowed, or grows to be when decompressed.
            UnsupportedBodyError: its encoding is none of identity, gzip, zstd.
            InvalidRequestError: it cannot be decompressed, or broke off.
            RequestCancelledError: the client disconnected while it was being decompressed.
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
                content = await unless_client_leaves(request, self._unpack(body, content, encoding, limit))
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

    async def _unpack(self, body: Body, packed: bytes, encoding: str, limit: int) -> bytes:
        declared = declared_size(packed, encoding)
        if declared is not None and declared <= limit:
            self.hold(body, declared)
            content = await self._unpacker.single_frame(body.owner, packed)
            if content is not None:
                return content
            self.hold(body, -declared)
        try:
            # Its size first: a bomb is refused before its content takes memory.
            self.hold(body, await self._unpacker.size(body.owner, packed, encoding, limit))
        except LargeContentError:
            raise _too_large(f"more than {limit} bytes once unpacked", limit) from None
        return await self._unpacker.content(body.owner, packed, encoding)

    async def _receive(self, request: Request, body: Body, limit: int) -> bytes:
        limits = self.limits
        started_at = time.monotonic()
        content = io.BytesIO()  # joining 60 MiB at the end would hold up the event loop for 40 ms
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
                content.write(chunk)
            if body.held_bytes > limit:
                raise _too_large(f"more than {limit} bytes", limit)
        return content.getvalue()


async def unless_client_leaves(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects. The request's body has been read.

    Raises:
        RequestCancelledError: the client has disconnected.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise RequestCancelledError("the client went away")
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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

"""How a request reaches a server: `Transport`, the one seam of the client, and the one to a service in this process.

The same requests go to the same application as over a socket (`http_transport`), without what only a network needs.
Knows no retries and no meaning of a body.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from mint.errors import ConnectionLostError

Message = MutableMapping[str, Any]
Application = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]
"""An ASGI application."""

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Request:
    """One request. `url` may be relative to the transport's own; the names of `headers` are in lower case.

    `content` in pieces needs a `content-length` among the headers. With a `sink`, the body of a 200 is handed to it
    piece by piece instead of being kept. `timeout_s` is the longest wait for the next bytes.
    """

    method: str
    url: str
    headers: Mapping[str, str]
    content: bytes | AsyncIterable[bytes] = b""
    timeout_s: float = TIMEOUT_S
    sink: Callable[[bytes], object] | None = None


@dataclass(frozen=True)
class Response:
    """An answer. The names of `headers` are in lower case; `url` is the absolute one that was asked."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes
    url: str


class TransportError(ConnectionLostError):
    """No answer came. `may_have_arrived`: the request may have reached the server all the same."""

    may_have_arrived = True


class Transport(Protocol):
    """Sends requests to one server."""

    async def send(self, request: Request) -> Response:
        """The answer, whatever its status; redirects are not followed.

        Raises:
            TransportError: the server cannot be reached, or the connection broke.
        """
        ...

    async def close(self) -> None:
        """Closes the connections."""
        ...


class InProcessTransport:
    """Calls an ASGI application of this process."""

    def __init__(self, app: Application, base_url: str) -> None:
        """`base_url` ends with a slash."""
        self._app = app
        self._base_url = base_url

    async def send(self, request: Request) -> Response:
        """The answer; an exception of the application is raised here. There are no time-outs."""
        url = request.url if "://" in request.url else self._base_url + request.url
        target = urlsplit(url)
        host = target.netloc.encode()
        headers = [(b"host", host)]
        for name, value in request.headers.items():
            headers.append((name.encode(), value.encode()))
        if isinstance(request.content, bytes):
            headers.append((b"content-length", str(len(request.content)).encode()))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": unquote(target.path),
            "raw_path": target.path.encode(),
            "query_string": target.query.encode(),
            "root_path": "",
            "headers": headers,
            "server": (target.netloc, None),
            "client": ("127.0.0.1", 0),
        }
        cycle = _RequestResponseCycle(request)
        await self._app(scope, cycle.receive, cycle.send)
        return Response(cycle.status_code, cycle.headers, b"".join(cycle.body), url)

    async def close(self) -> None:
        """There is nothing to close."""


class _RequestResponseCycle:
    """Both directions of one request, as ASGI has them."""

    def __init__(self, request: Request) -> None:
        self._content = request.content
        self._pieces = None if isinstance(request.content, bytes) else aiter(request.content)
        self._sink = request.sink
        self._is_sent = False
        self._is_complete = asyncio.Event()
        self.status_code = 0
        self.headers: dict[str, str] = {}
        self.body: list[bytes] = []

    async def receive(self) -> Message:
        if self._is_sent:
            # ASGI: after the body, an application waits here for the client to go away.
            await self._is_complete.wait()
            return {"type": "http.disconnect"}
        piece = self._content if self._pieces is None else await anext(self._pieces, b"")
        self._is_sent = self._pieces is None or not piece
        return {"type": "http.request", "body": piece, "more_body": not self._is_sent}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status_code = message["status"]
            for name, value in message["headers"]:
                self.headers[name.decode().lower()] = value.decode()
        elif message["type"] == "http.response.body":
            # The body of an error is kept even with a sink: it says what was wrong.
            keep = self.body.append if self._sink is None or self.status_code != 200 else self._sink
            keep(message.get("body", b""))
            if not message.get("more_body", False):
                self._is_complete.set()

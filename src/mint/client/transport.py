"""Requests to an application in this process, and what any server has replied, as the session reads it.

The same messages reach the same application as over a socket: what falls away is what only a network needs. Knows no
retries and no meaning of a body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

Message = MutableMapping[str, Any]
Application = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]
"""An ASGI application."""


@dataclass(frozen=True)
class Reply:
    """An answer, whole. The names of `headers` are in lower case."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes
    url: str


@dataclass
class _Parts:
    status_code: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: list[bytes] = field(default_factory=list)
    is_complete: asyncio.Event = field(default_factory=asyncio.Event)


class InProcess:
    """One application, as seen from below one URL."""

    def __init__(self, app: Application, url: str, headers: Mapping[str, str]) -> None:
        """`url` ends with a slash; `headers` go with every request."""
        self._app = app
        self._url = url
        parts = urlsplit(url)
        self._path = parts.path
        self._host = parts.netloc.encode()
        self._headers = {name.lower(): value for name, value in headers.items()}

    async def request(self, method: str, path: str, *, content: bytes | None, headers: Mapping[str, str]) -> Reply:
        """The answer to one request; `path` is relative to the URL. What the application raises is raised here."""
        target, _, query = f"{self._path}{path}".partition("?")
        named = {**self._headers, **headers, "content-length": str(len(content or b""))}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(target),
            "raw_path": target.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(b"host", self._host), *((name.encode(), value.encode()) for name, value in named.items())],
            "server": (self._host.decode(), None),
            "client": ("127.0.0.1", 0),
        }
        body = [content or b""]
        parts = _Parts()

        async def receive() -> Message:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await parts.is_complete.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                parts.status_code = message["status"]
                parts.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
            elif message["type"] == "http.response.body":
                parts.body.append(message.get("body", b""))
                if not message.get("more_body", False):
                    parts.is_complete.set()

        await self._app(scope, receive, send)
        return Reply(parts.status_code, parts.headers, b"".join(parts.body), f"{self._url}{path}")

"""One request and its answer, as logs and metrics see it: numbers and names, never what was said.

Gives every request an id, which the answer carries too. Knows no route; the application fills in which one it was.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from random import getrandbits

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NO_ROUTE = "(none)"
CLIENT_LEFT = 499
"""Stands for the status where the client left before there was one."""

_SANE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}", re.ASCII)
_SCOPE_KEY = "mint.exchange"

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that is being answered; None outside of requests."""


@dataclass
class Exchange:
    """`route` is the template, without the values in it; bodies count as sent, packed or not."""

    request_id: str
    method: str
    route: str = NO_ROUTE
    owner: str | None = None
    status: int = CLIENT_LEFT
    seconds: float = 0.0
    received_bytes: int = 0
    sent_bytes: int = 0


Observer = Callable[[Exchange], None]
"""Is told of every exchange once it is over."""


def exchange_of(scope: Scope) -> Exchange:
    """The exchange that a request is part of."""
    return scope[_SCOPE_KEY]


class Observed:
    """Middleware that follows every exchange and tells the observers."""

    def __init__(self, app: ASGIApp, observers: Sequence[Observer]) -> None:
        self._app = app
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes everything on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        exchange = Exchange(given if _SANE_ID.fullmatch(given) else f"{getrandbits(128):032x}", scope["method"])
        scope[_SCOPE_KEY] = exchange
        started_at = time.perf_counter()

        async def counted_receive() -> Message:
            message = await receive()
            exchange.received_bytes += len(message.get("body", b""))
            return message

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = exchange.request_id
            exchange.sent_bytes += len(message.get("body", b""))
            await send(message)

        token = request_id.set(exchange.request_id)
        try:
            await self._app(scope, counted_receive, counted_send)
        finally:
            exchange.seconds = time.perf_counter() - started_at
            for observe in self._observers:
                observe(exchange)
            request_id.reset(token)

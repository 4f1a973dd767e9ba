"""A record of each request and its response, as logs and metrics see it: numbers and names, no content.

Gives every request an id, which the response carries too. The application writes into the request's scope which route
it was and who asked.
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
"""The status in the record if the client left before the response began."""

_VALID_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}", re.ASCII)
ROUTE_KEY, OWNER_KEY = "mint.route", "mint.owner"
"""Where the application writes the route's path and the owner in a request's scope."""

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the request that is being answered; None outside of requests."""


@dataclass
class AccessRecord:
    """`route` is the template, without the values in it; bodies count as sent, compressed or not."""

    request_id: str
    method: str
    route: str = NO_ROUTE
    owner: str | None = None
    status: int = CLIENT_LEFT
    seconds: float = 0.0
    received_bytes: int = 0
    sent_bytes: int = 0


AccessObserver = Callable[[AccessRecord], None]
"""Is called with every record, once its response has been sent."""


class AccessLog:
    """Middleware that makes the record of every request and passes it to the observers."""

    def __init__(self, app: ASGIApp, observers: Sequence[AccessObserver]) -> None:
        self._app = app
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        record = AccessRecord(given if _VALID_ID.fullmatch(given) else f"{getrandbits(128):032x}", scope["method"])
        started_at = time.perf_counter()

        async def counted_receive() -> Message:
            message = await receive()
            record.received_bytes += len(message.get("body", b""))
            return message

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            record.sent_bytes += len(message.get("body", b""))
            await send(message)

        token = request_id.set(record.request_id)
        try:
            await self._app(scope, counted_receive, counted_send)
        finally:
            record.seconds = time.perf_counter() - started_at
            record.route, record.owner = scope.get(ROUTE_KEY, NO_ROUTE), scope.get(OWNER_KEY)
            for observe in self._observers:
                observe(record)
            request_id.reset(token)

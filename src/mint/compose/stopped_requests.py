"""Requests that a server answers while it stops: their senders are told to send them again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from mint.errors import JournalError
from mint.wire import encode_error

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class StoppedRequests:
    """An application whose requests are answered with 503 if the server stops before they are done.

    uvicorn cancels such a request when the time for open responses is over, and would answer 500, which clients take
    for final. All requests of the protocol may be sent again unchanged.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        has_started = False

        async def noted_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, noted_send)
        except asyncio.CancelledError:
            if has_started:
                raise
            error = JournalError("the server stops", remedy="Send the same request again")
            body = encode_error(error)
            headers = {"content-type": "application/json", "content-length": str(len(body)), "retry-after": "1"}
            fields = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": error.status, "headers": fields})
            await send({"type": "http.response.body", "body": body})

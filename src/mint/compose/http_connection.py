"""A connection of the HTTP server: uvicorn's, with limits on what a request makes the event loop do.

Each header, each piece of a body and each request is a call from the parser, on the event loop, before anybody is asked
for a key. So their numbers are limited, and not only their bytes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEADERS_TIMEOUT_S = 30.0
MAX_HEADERS_BYTES = 64 * 1024
MAX_HEADERS = 128
KEEP_ALIVE_S = 75.0
"""Longer than clients keep unused connections, so that the client closes them and no request is lost."""

MAX_PIPELINED = 16
"""Requests that a client may send on a connection before it has the response to the first of them."""

SMALL_PIECES = 1024
PIECE_BYTES = 64
"""A body may come in so many pieces (chunks, or what a network packet holds of one), and one more for so many bytes."""


class _TooManyError(Exception):
    """A request is beyond a limit; it is answered with this status and sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class IdleConnections:
    """The connections of a server that have no request. The one that was idle for longest makes room for a new one.

    So whoever keeps connections open, with or without a key, leaves descriptors for the requests of others.
    """

    def __init__(self, max_open: int) -> None:
        """Idle connections are closed while more than `max_open` are open, idle or not."""
        self._max_open = max_open
        self._idle: dict[Connection, None] = {}

    def add(self, connection: Connection, open_now: int) -> None:
        """The connection is idle from now on; `open_now` connections are open."""
        self._idle.pop(connection, None)
        if open_now > self._max_open and self._idle:
            oldest = next(iter(self._idle))
            self.remove(oldest)
            oldest.transport.close()
        self._idle[connection] = None

    def remove(self, connection: Connection) -> None:
        """The connection has a request, or is closed."""
        self._idle.pop(connection, None)


class Connection(HttpToolsProtocol):
    """A connection with limits on the time and size of headers, and on the numbers of headers, requests and pieces."""

    def __init__(self, *arguments: Any, idle: IdleConnections, **named: Any) -> None:
        """`idle` is shared by all connections of a server; the other arguments are uvicorn's."""
        super().__init__(*arguments, **named)
        self._idle = idle
        self._timer: asyncio.TimerHandle | None = None
        self._in_headers = False
        self._headers_bytes = 0
        self._body_bytes = 0
        self._body_pieces = 0
        self._refusal: _TooManyError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Starts to wait for a request."""
        super().connection_made(transport)
        self._idle.add(self, len(self.connections))
        self._start_timer(HEADERS_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer."""
        self._stop_timer()
        self._idle.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts the bytes of headers that are not complete yet."""
        super().data_received(data)
        if self._in_headers:
            self._headers_bytes += len(data)
            if self._headers_bytes > MAX_HEADERS_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        """Headers begin."""
        self._in_headers = True
        self._headers_bytes = self._body_bytes = self._body_pieces = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts headers; those behind a chunked body, too."""
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(431, f"The request has too many headers: at most {MAX_HEADERS} are read.")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The headers are complete."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(400, f"At most {MAX_PIPELINED} requests may wait for the response to an earlier one.")
        self._in_headers = False
        self._idle.remove(self)
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Counts the pieces of a body."""
        self._body_pieces += 1
        self._body_bytes += len(body)
        if self._body_pieces > SMALL_PIECES + self._body_bytes // PIECE_BYTES:
            self._refuse(400, f"The body comes in too many pieces: send chunks of {PIECE_BYTES} bytes or more.")
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Starts to wait for the next request, unless it is here already."""
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()  # uvicorn goes on reading, and so would keep any number of requests
        elif not self.transport.is_closing():
            self._idle.add(self, len(self.connections))
        if self.cycle.response_complete and not self.transport.is_closing():
            self._start_timer(KEEP_ALIVE_S + HEADERS_TIMEOUT_S)

    def send_400_response(self, msg: str) -> None:
        """Closes the connection; says why, if that cannot be taken for the response to an earlier request."""
        refusal = self._refusal or _TooManyError(400, msg)
        if self._awaits_response():
            sentence = str(refusal).encode()
            head = [b"content-type: text/plain; charset=utf-8", b"content-length: %d" % len(sentence)]
            lines = [*head, b"connection: close", b"", sentence]
            self.transport.write(STATUS_LINE[refusal.status] + b"\r\n".join(lines))
        self.transport.close()

    def _refuse(self, status: int, sentence: str) -> None:
        """Makes the parser stop; it then calls `send_400_response`."""
        self._refusal = _TooManyError(status, sentence)
        raise self._refusal

    def _awaits_response(self) -> bool:
        """Whether the next bytes on the connection would be the response to the request that is being parsed."""
        if self.cycle is None:  # ty: ignore[redundant-condition-strict]  # before the first request
            return True
        if self._in_headers:
            return self.cycle.response_complete
        return self.cycle.more_body and not self.cycle.response_started and not self.pipeline

    def _start_timer(self, timeout_s: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(timeout_s, self.timeout_keep_alive_handler)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

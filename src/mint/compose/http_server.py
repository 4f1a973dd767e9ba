"""uvicorn as mint's servers use it: graceful shutdown, limits on the headers of requests, enough connections."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mint.compose.event_loop import new_event_loop
from mint.server.ops.open_files import raise_open_files

HEADERS_TIMEOUT_S = 30.0
MAX_HEADERS_BYTES = 64 * 1024
KEEP_ALIVE_S = 75.0
"""Longer than clients keep unused connections, so that the client closes them and no request is lost."""

WAITING_CONNECTIONS = 2048
"""Connections that the kernel keeps until they are accepted."""

ACCEPTED_AT_ONCE = 16
"""Connections that the event loop accepts before it looks for other work."""

FAILURE_LOGGED_S = 60.0
"""How often the log says that no connection can be accepted."""

OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

log = logging.getLogger("mint.serving")


def url_of(host: str, bound: socket.socket) -> str:
    """The address of a bound socket."""
    name = f"[{host}]" if ":" in host else host or "0.0.0.0"
    return f"http://{name}:{bound.getsockname()[1]}"


def http_config(app: Any, *, drain_s: float) -> uvicorn.Config:
    """The settings of uvicorn for an application; at shutdown, open responses get `drain_s` seconds."""
    raise_open_files()
    return uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        backlog=ACCEPTED_AT_ONCE,  # asyncio accepts so many at once, and also tells the kernel: see `startup`
        access_log=False,
        server_header=False,
        headers=[("x-content-type-options", "nosniff")],
        timeout_keep_alive=int(KEEP_ALIVE_S),
        timeout_graceful_shutdown=max(1, int(drain_s)),
    )


class AcceptFailures:
    """Handles the errors of an event loop: says in one line a minute that no connection can be accepted.

    asyncio tries again a second later, and reports each attempt with a traceback, several times.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds and does not jump."""
        self._clock = clock
        self._logged_at = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Logs an error."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in OUT_OF_RESOURCES and "accept" in context["message"]):
            loop.default_exception_handler(context)
            return
        if self._clock() - self._logged_at < FAILURE_LOGGED_S:
            return
        self._logged_at = self._clock()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        log.error(
            "new connections cannot be accepted, and wait: %s (%d files may be open). Raise the hard limit: "
            "ulimit -Hn, or LimitNOFILE= of systemd",
            error.strerror,
            limit,
        )


class HttpServer(uvicorn.Server):
    """uvicorn's server; before it waits for open responses, it calls `release_clients`, so that pending polls end."""

    def __init__(self, config: uvicorn.Config, release_clients: Callable[[], None]) -> None:
        super().__init__(config)
        self._release_clients = release_clients
        self.on_started: Callable[[], None] = lambda: None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers until a signal, on an event loop of its own."""
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self.serve(sockets=sockets))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to answer."""
        asyncio.get_running_loop().set_exception_handler(AcceptFailures())
        await super().startup(sockets)
        for bound in sockets or ():
            bound.listen(WAITING_CONNECTIONS)
        self.on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal shuts down gracefully; a second interrupt ends the server at once.

        uvicorn's own handler raises the signal again at the end, which would end the process before the journal is
        closed.
        """
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops listening, and waits for open responses."""
        self._release_clients()
        await super().shutdown(sockets)


class _Connection(HttpToolsProtocol):
    """uvicorn's connection, with limits on the time and the size of a request's headers."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._timer: asyncio.TimerHandle | None = None
        self._in_headers = False
        self._headers_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Starts to wait for a request."""
        super().connection_made(transport)
        self._start_timer(HEADERS_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer."""
        self._stop_timer()
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
        self._headers_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The headers are complete."""
        self._in_headers = False
        self._stop_timer()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Starts to wait for the next request, unless it is here already."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._start_timer(KEEP_ALIVE_S + HEADERS_TIMEOUT_S)

    def _start_timer(self, timeout_s: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(timeout_s, self.timeout_keep_alive_handler)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

"""uvicorn as mint's servers use it: graceful shutdown, limits on each connection, enough connections."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from mint.compose.event_loop import new_event_loop
from mint.compose.http_connection import KEEP_ALIVE_S, Connection, IdleConnections
from mint.compose.stopped_requests import StoppedRequests
from mint.server.ops.open_files import max_connections, raise_open_files

WAITING_CONNECTIONS = 2048
"""Connections that the kernel keeps until they are accepted."""

ACCEPTED_AT_ONCE = 16
"""Connections that the event loop accepts before it looks for other work."""

INTERRUPT_S = 0.1
"""How soon a second interrupt is noticed while the server finishes."""

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
    connection: Any = partial(Connection, idle=IdleConnections(max_connections()))
    return uvicorn.Config(
        StoppedRequests(app),
        http=connection,
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
    """uvicorn's server. Once it is told to end, it awaits `finish` and still takes connections, for as long as the
    configuration allows or until a second interrupt. Before it waits for open responses, it calls `release_clients`,
    so that pending polls end."""

    def __init__(
        self,
        config: uvicorn.Config,
        release_clients: Callable[[], None] = lambda: None,
        finish: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        super().__init__(config)
        self._release_clients = release_clients
        self._finish = finish
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
        """Finishes, stops listening, and waits for open responses."""
        if self._finish is not None:
            await self._wait_for(asyncio.ensure_future(self._finish()))
        self._release_clients()
        await super().shutdown(sockets)

    async def _wait_for(self, finished: asyncio.Future[None]) -> None:
        give_up_at = time.monotonic() + (self.config.timeout_graceful_shutdown or 0)
        while not finished.done() and not self.force_exit and time.monotonic() < give_up_at:
            await asyncio.wait({finished}, timeout=INTERRUPT_S)
        finished.cancel()
        self.config.timeout_graceful_shutdown = max(1, round(give_up_at - time.monotonic()))  # one time limit for all

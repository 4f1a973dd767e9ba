"""uvicorn as mint's servers use it: an orderly end, bounded patience with the heads of requests, enough connections.

Knows no route and no service: what has to be let go before a shutdown is a callable.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_PATIENCE_S = 30.0
MAX_HEAD_BYTES = 64 * 1024
KEEP_ALIVE_S = 75.0
"""Longer than clients keep unused connections, so that it is they who close them, not a request in flight."""

MAX_OPEN_FILES = 65_536


def url_of(host: str, bound: socket.socket) -> str:
    """The address under which a bound socket is reached."""
    name = f"[{host}]" if ":" in host else host or "0.0.0.0"
    return f"http://{name}:{bound.getsockname()[1]}"


def http_config(app: Any, *, drain_s: float) -> uvicorn.Config:
    """How an application is served; at the end, the answers under way get `drain_s` seconds."""
    _allow_connections()
    return uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        headers=[("x-content-type-options", "nosniff")],
        timeout_keep_alive=int(KEEP_ALIVE_S),
        timeout_graceful_shutdown=max(1, int(drain_s)),
    )


def _allow_connections() -> None:
    """Every result that is waited for holds a connection, and the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class HttpServer(uvicorn.Server):
    """uvicorn's server, which lets those go who wait for something before it waits for them."""

    def __init__(self, config: uvicorn.Config, let_go: Callable[[], None]) -> None:
        """`let_go` is called in the event loop, once, when the server is to end."""
        super().__init__(config)
        self._let_go = let_go
        self.on_started: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to answer."""
        await super().startup(sockets)
        self.on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends the server in order; a second interrupt, at once.

        uvicorn's own would raise the signal again at the end, and so end the process before the journal is closed.
        """
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops listening, and waits for the answers under way."""
        self._let_go()
        await super().shutdown(sockets)


class _Connection(HttpToolsProtocol):
    """uvicorn's connection, which does not wait for ever for the head of a request, nor keep one of any size."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._patience: asyncio.TimerHandle | None = None
        self._in_head = False
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begins to wait for a request."""
        super().connection_made(transport)
        self._wait_for_head(HEAD_PATIENCE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no longer."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts what belongs to a head that is not whole yet."""
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        """A head begins."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Waits for the next request, unless it is here already."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._wait_for_head(KEEP_ALIVE_S + HEAD_PATIENCE_S)

    def _wait_for_head(self, patience_s: float) -> None:
        self._stop_waiting()
        self._patience = self.loop.call_later(patience_s, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

"""The composition root of the server process: settings → engine + service + app, behind a socket, until a signal.

A shutdown stops listening, lets waiting clients go (they ask again, and find the next process), finishes the request
that is running and leaves the rest to the journal. What does not end in time is cut off: the journal has it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mint.config import ServeSettings, read_settings
from mint.embedded import torch_engine
from mint.engine.protocol import Engine
from mint.errors import InvalidRequestError
from mint.models.registry import available
from mint.server import auth, preflight
from mint.server.app import create_app
from mint.server.bodies import MIB, Bodies, BodyLimits
from mint.server.keys import Keys
from mint.server.logs import configure_logs, log_exchange
from mint.server.metrics import Metrics
from mint.server.preflight import Door, Finding
from mint.server.readiness import Readiness
from mint.server.service import Service

log = logging.getLogger("mint.serving")

HEAD_PATIENCE_S = 30.0
MAX_HEAD_BYTES = 64 * 1024
KEEP_ALIVE_S = 75.0
"""Longer than clients keep unused connections, so that it is they who close them, not a request in flight."""

MAX_OPEN_FILES = 65_536

DRAIN_SHARE = 0.4
"""How much of the time for a shutdown the answers under way may take; the rest is for the running request."""


def check(settings: ServeSettings) -> list[Finding]:
    """Whether a server with these settings would start. Changes nothing."""
    return preflight.examine(
        data_dir=settings.folder,
        host=settings.host,
        port=settings.port,
        api_keys=settings.api_keys,
        insecure=settings.insecure,
        offered=settings.offered,
        aliases=read_settings().model_aliases,
    )


def serve(settings: ServeSettings, *, announce: Callable[[str], None], engine: Engine | None = None) -> None:
    """Serves until a signal ends it; `announce` is told where, once it answers. `engine` None is torch's.

    Raises:
        InvalidRequestError: the settings cannot be used together, or the address not at all.
        JournalError: the data directory cannot be used.
    """
    configure_logs(format=settings.log_format, level=settings.log_level)
    server = Server(settings, engine=engine)
    server.run(announce)


class Server:
    """A service behind a socket. It takes requests from the start; they are answered once `run` is called."""

    def __init__(self, settings: ServeSettings, *, engine: Engine | None = None) -> None:
        """Opens everything, as `serve` says."""
        self._settings = settings
        folder = settings.folder
        door = preflight.decide_door(
            settings.host,
            api_keys=settings.api_keys,
            insecure=settings.insecure,
            keys=preflight.count_keys(folder),
        )
        if not door.is_local and not door.asks_keys:
            log.warning("--insecure: WHOEVER reaches %s can use this server, and read all it has", settings.host)
        self._socket = preflight.open_socket(settings.host, settings.port)
        try:
            self.service = _open_service(settings, metrics := Metrics(), engine)
        except BaseException:
            self._socket.close()
            raise
        self.keys = Keys(self.service.journal.database)
        app = _app(settings, self.service, door, self.keys, metrics)
        self._uvicorn = _Server(_uvicorn_config(settings, app), self.service)
        self.url = f"http://{_in_url(settings.host)}:{self._socket.getsockname()[1]}"
        self.line = (
            f"mint serves {self.url} · {'keys' if door.asks_keys else 'no keys'} asked for · "
            f"models: {', '.join(self.service.bases.names)} · data: {folder} · about the API: {self.url}/docs"
        )

    def run(self, announce: Callable[[str], None] = log.info) -> None:
        """Answers until a signal, or `stop`; `announce` is told as soon as it does."""
        self._uvicorn.on_started = lambda: announce(self.line)
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            _stop(self.service, self._settings.stop_within_s * (1 - DRAIN_SHARE))

    def stop(self) -> None:
        """Makes `run` return, as a signal would."""
        self._uvicorn.should_exit = True


def _open_service(settings: ServeSettings, metrics: Metrics, engine: Engine | None) -> Service:
    folder, base, offered = settings.folder, read_settings(), settings.offered
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(f"cannot be made: {error}", field="--data-dir", value=folder) from error
    service = Service(
        metrics.metered(engine or torch_engine(base)),
        folder,
        aliases={**base.model_aliases, **{name: target for name, target in offered.items() if target != name}},
        offered=offered or available(base.model_aliases),
        is_server=True,
    )
    for name in service.bases.names:
        service.bases.folder(name)
    metrics.watch(service)
    service.start()
    return service


def _app(settings: ServeSettings, service: Service, door: Door, keys: Keys, metrics: Metrics) -> Any:
    limits = BodyLimits(body_bytes=settings.max_body_mb * MIB, patience_s=settings.body_timeout_s)
    return create_app(
        service,
        authenticate=auth.by_key(keys) if door.asks_keys else auth.everyone_is_local,
        screen=auth.everything_passes if door.asks_keys else auth.no_foreign_pages(any_host=not door.is_local),
        bodies=Bodies(limits),
        observers=(metrics.observe, log_exchange),
        metrics=metrics,
        readiness=Readiness(service, stuck_after_s=settings.stuck_after_s),
    )


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host or "0.0.0.0"


def _uvicorn_config(settings: ServeSettings, app: Any) -> uvicorn.Config:
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
        timeout_graceful_shutdown=max(1, int(settings.stop_within_s * DRAIN_SHARE)),
    )


def _allow_connections() -> None:
    """Every result that is waited for holds a connection, and the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _stop(service: Service, within_s: float) -> None:
    """Stops the service; a request that goes on for longer is left to the next process, which runs it again."""
    stopping = threading.Thread(target=service.stop, name="mint-stop", daemon=True)
    started_at = time.monotonic()
    stopping.start()
    stopping.join(within_s)
    if stopping.is_alive():
        log.warning("the running request goes on after %.0f s; the next start runs it again", within_s)
        logging.shutdown()
        os._exit(0)  # the engine's thread cannot be interrupted, and nothing that was promised is lost by this
    log.info("stopped within %.1f s", time.monotonic() - started_at)


class _Server(uvicorn.Server):
    """uvicorn's server, which lets those go who wait for results before it waits for them."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
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
        self._service.release_waiters()
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

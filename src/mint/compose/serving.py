"""Builds the server process from its settings: engine, service and application behind a socket, until a signal.

A shutdown stops listening, answers waiting clients with "try again" (they reconnect to the next process), finishes the
request that is running, saves the models, and leaves the rest in the journal. A request that does not end in time is
cut off; the next process runs it again.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from mint.compose.dashboard_server import is_operator, key_or_session, over_service, screen_of
from mint.compose.embedded import end_ranks, limits_of, watched_engine
from mint.compose.http_server import HttpServer, http_config, url_of
from mint.compose.owner_quotas import default_quotas
from mint.config import ServeSettings, read_settings
from mint.dashboard.app import routes
from mint.dashboard.login import Visitor
from mint.engine.bases.lora_layers import lora_layers
from mint.engine.protocol import Engine
from mint.errors import InvalidRequestError
from mint.models.registry import available
from mint.server.all_routes import ROUTES
from mint.server.disk_space import folder_bytes
from mint.server.http.app import create_app
from mint.server.http.auth import recall_by_key
from mint.server.http.bodies import Bodies, BodyLimits
from mint.server.http.key_guesses import GuardedKeys
from mint.server.limits import MIB
from mint.server.mirror.mirror import Mirror
from mint.server.mirror.objects import open_objects, without_secrets
from mint.server.ops import preflight
from mint.server.ops.logs import configure_logs, log_access
from mint.server.ops.metrics import Metrics
from mint.server.ops.open_files import raise_open_files, require_open_files
from mint.server.ops.preflight import CheckResult
from mint.server.ops.readiness import Readiness
from mint.server.private_files import open_data_dir
from mint.server.service.service import Service
from mint.server.store.instances import ServerLock
from mint.server.store.keys import count_keys

log = logging.getLogger("mint.serving")

DRAIN_SHARE = 0.4
"""How much of the time for a shutdown the open responses may take; the rest is for the running request."""

SAVE_SHARE = 0.8
"""The part of the time for the running request in which models are saved, too; the next process replays what is not."""

DEVICE_LOST_STATUS = 70
"""The exit status of a server whose GPU has failed (`EX_SOFTWARE`)."""

MIRROR_SHARE = 0.25
"""How much of the time for a shutdown the mirror may take to send the last state."""

MAX_THREADS = 16
"""Threads for requests that write to the journal: most of them wait for the disk, and share its fsyncs. As many again
for the others, which so are answered while those wait."""


MIDDLE_COLLECTIONS = 100
"""Collections of the middle generation before a full one; Python's own 10 bring a full one every few seconds."""

SWITCH_INTERVAL_S = 0.001
"""How long a thread may keep the interpreter's lock while others want it. At Python's own 5 ms, the event loop waits
that long after each system call while two threads compute."""


def check(settings: ServeSettings) -> list[CheckResult]:
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
    """Serves until a signal; calls `announce` with one line once it answers. `engine` None is torch's.

    Raises:
        InvalidRequestError: the settings contradict each other, the address cannot be used, or the process may open too
            few files.
        JournalError: the data directory cannot be used.
    """
    configure_logs(format=settings.log_format, level=settings.log_level, on_thread=True)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    server = Server(settings, engine=engine)
    _spare_collections()
    server.run(announce)


def _spare_collections() -> None:
    """Makes full collections of garbage shorter and rarer: each holds the interpreter's lock until it has looked at
    every object.

    The libraries have more than 200,000 objects, none of which ever goes: they are left out from now on. 10,000 open
    requests have as many, and nearly all garbage goes without a collection.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, MIDDLE_COLLECTIONS)


class Server:
    """A service behind a socket. The socket accepts connections at once; `run` answers them."""

    def __init__(self, settings: ServeSettings, *, engine: Engine | None = None) -> None:
        """Opens everything, as `serve` says."""
        self._settings = settings
        require_open_files()
        raise_open_files()
        folder = settings.folder
        access = preflight.decide_access(
            settings.host,
            api_keys=settings.api_keys,
            insecure=settings.insecure,
            keys=count_keys(folder),
        )
        if not access.is_local and not access.asks_keys:
            log.warning("--insecure: EVERYBODY who reaches %s can use this server and read all its data", settings.host)
        with ExitStack() as opened:
            _make_folder(folder)
            self._lock = opened.enter_context(closing(ServerLock(folder)))
            self._socket = opened.enter_context(preflight.open_socket(settings.host, settings.port))
            self._metrics = metrics = Metrics()
            self.service = _open_service(settings, metrics, engine, opened)
            defaults = default_quotas(
                settings,
                free_bytes=self.service.disk.free_bytes,
                stored_bytes=self.service.checkpoints.used_bytes() + folder_bytes(folder / "snapshots"),
            )
            self.keys = self.service.api_keys(defaults=defaults)
            self._mirror = None if settings.mirror is None else _open_mirror(settings.mirror, folder, metrics)
            self.service.start(self.keys.quotas_of if access.asks_keys else None)
            if self._mirror is not None:
                self._mirror.start()
            opened.pop_all()  # all is open: `run` closes it
        self._bodies = Bodies(BodyLimits(body_bytes=settings.max_body_mb * MIB, patience_s=settings.body_timeout_s))
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="mint-http")
        self._disk_threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="mint-accept")
        guarded = GuardedKeys(self.keys)
        self._dashboard = over_service(self.service, metrics, access=access, keys=guarded, admits=self._is_operator)
        authenticate = key_or_session(guarded, self._dashboard) if access.asks_keys else None
        app = create_app(
            self.service,
            ROUTES,
            authenticate=authenticate,
            recall=recall_by_key(guarded),
            is_operator=self._is_operator,
            public_url=settings.public_url,
            screen=screen_of(access),
            pages=routes(self._dashboard),
            bodies=self._bodies,
            observers=(metrics.observe, log_access),
            metrics=metrics,
            readiness=Readiness(self.service, stuck_after_s=settings.stuck_after_s, mirror=self._mirror),
            executor=self._threads,
            disk_executor=self._disk_threads,
        )
        self._uvicorn = HttpServer(
            http_config(app, drain_s=settings.stop_within_s * DRAIN_SHARE), self._release_clients
        )
        self.url = url_of(settings.host, self._socket)
        self.line = (
            f"mint serves {self.url} · {'keys' if access.asks_keys else 'no keys'} asked for · "
            f"models: {', '.join(self.service.base_models.names)} · data: {folder} · dashboard: {self.url}/ · "
            f"about the API: {self.url}/docs"
        )

    def run(self, announce: Callable[[str], None] = log.info) -> None:
        """Answers until a signal or `stop`; calls `announce` with one line when it starts to."""

        def started() -> None:
            self._metrics.loop_pauses.start()
            announce(self.line)

        self._uvicorn.on_started = started
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            self._metrics.loop_pauses.stop()
            self._bodies.close()
            self._disk_threads.shutdown(wait=False)
            self._threads.shutdown(wait=False)  # the responses have been sent, or cut off
            mirror_s = 0.0 if self._mirror is None else self._settings.stop_within_s * MIRROR_SHARE
            _stop(self.service, self._settings.stop_within_s * (1 - DRAIN_SHARE) - mirror_s)
            if self._mirror is not None:
                self._mirror.close(within_s=mirror_s)
            self._lock.close()

    def stop(self) -> None:
        """Makes `run` return, as a signal would."""
        self._uvicorn.should_exit = True

    def _is_operator(self, caller: Visitor) -> bool:
        return is_operator(caller.owner, self.keys, self._settings.operators)

    def _release_clients(self) -> None:
        self.service.release_waiters()
        self._dashboard.close()


def _make_folder(folder: Path) -> None:
    try:
        open_data_dir(folder)
    except OSError as error:
        remedy = "Free disk space, or choose another one"
        raise InvalidRequestError(
            f"cannot be made: {error}", field="--data-dir", value=folder, remedy=remedy
        ) from error


def _open_mirror(url: str, folder: Path, metrics: Metrics) -> Mirror:
    mirror = Mirror(folder, open_objects(url, field="--mirror"), address=without_secrets(url))
    metrics.watch_mirror(mirror)
    return mirror


def _open_service(settings: ServeSettings, metrics: Metrics, engine: Engine | None, opened: ExitStack) -> Service:
    """The service and its engine, which `opened` closes if the server does not start."""
    base = settings.with_cluster(read_settings())
    offered = settings.offered

    def end_process(reason: str) -> None:
        """Ends the process without a device, as a crash would: a process manager starts it again, with a device."""
        log.critical("%s; this process ends, to be started again", reason)
        service.note_death()
        logging.shutdown()
        os._exit(DEVICE_LOST_STATUS)

    own = watched_engine(base, end_process, engine, data_dir=settings.folder)
    opened.callback(end_ranks, own)
    service = Service(
        metrics.metered(own),
        settings.folder,
        aliases={**base.model_aliases, **{name: target for name, target in offered.items() if target != name}},
        offered=offered or available(base.model_aliases),
        is_server=True,
        limits=replace(limits_of(base), max_sessions=settings.max_sessions, max_models=settings.max_models),
        logprobs_mode=settings.logprobs_mode,
        layers_of=lora_layers,
    )
    opened.callback(service.stop)
    for name in service.base_models.names:
        service.base_models.require_readable(name)
    check_at_start = getattr(own, "check_at_start", None)
    if check_at_start is not None:
        check_at_start([service.base_models.key(name) for name in service.base_models.names])
    metrics.watch(service)
    return service


def _stop(service: Service, within_s: float) -> None:
    """Stops the service. If the running request takes longer, the process ends, and the next one runs it again."""
    stop = partial(service.stop, save_within_s=within_s * SAVE_SHARE)
    stopping = threading.Thread(target=stop, name="mint-stop", daemon=True)
    started_at = time.monotonic()
    stopping.start()
    stopping.join(within_s)
    if stopping.is_alive():
        log.warning("the running request goes on after %.0f s; the next start runs it again", within_s)
        logging.shutdown()
        os._exit(0)  # the engine's thread cannot be interrupted; the journal has all that was acknowledged
    log.info("stopped within %.1f s", time.monotonic() - started_at)

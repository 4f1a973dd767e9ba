"""Builds the dashboard: over the service of `mint serve`, or alone over run folders.

Alone, it serves the pages, and OpenAI's routes for the chat box; the engine is loaded at the first chat. Runs belong to
the operator of the server: if it asks for keys, only operators see them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import webbrowser
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from starlette.requests import Request
from starlette.types import ASGIApp

from mint.client.service_client import ServiceClient
from mint.compose.embedded import EmbeddedService, open_embedded
from mint.compose.http_server import HttpServer, http_config, url_of
from mint.config import environment_of
from mint.dashboard.app import create_app
from mint.dashboard.jobs.bisect_jobs import Search
from mint.dashboard.jobs.launches import PageCommands
from mint.dashboard.login import AccessCheck, Login, Visitor
from mint.dashboard.state import DashboardState
from mint.errors import InvalidRequestError
from mint.recipes.task_registry import RECIPES, SOURCES, open_task_of_run
from mint.rl.analysis.bisect import Regression
from mint.rl.analysis.run_analysis import bisect_run
from mint.rl.heldout_evaluation import evaluate_checkpoint
from mint.runs.damage import read_config
from mint.server.all_routes import ROUTES
from mint.server.callers import LOCAL, Caller
from mint.server.http import auth
from mint.server.http.app import create_app as create_service_app
from mint.server.http.key_guesses import GuardedKeys
from mint.server.ops import preflight
from mint.server.ops.metrics import Metrics
from mint.server.ops.overview import Overview
from mint.server.service.service import Service
from mint.server.store.database import Database
from mint.server.store.journal import JOURNAL_FILE
from mint.server.store.keys import ApiKeys, count_keys

log = logging.getLogger("mint.dashboard")

DRAIN_S = 3.0


def over_service(
    service: Service,
    metrics: Metrics,
    *,
    access: preflight.Access,
    keys: GuardedKeys,
    admits: Callable[[Visitor], bool],
) -> DashboardState:
    """The dashboard of a server: the runs in its data directory, and its service's numbers, for those it `admits`."""
    login = Login(keys, admits=admits)

    def open_client(visitor: Visitor | None) -> ServiceClient:
        caller = cast("Caller", visitor) if visitor is not None else LOCAL
        return ServiceClient(open_embedded=lambda: _AsCaller(service, caller))

    return DashboardState(
        [service.data_dir],
        access=AccessCheck(screen_of(access), login if access.asks_keys else None),
        service=Overview(service, metrics),
        search=_search(open_client),
    )


def screen_of(access: preflight.Access) -> auth.Screen:
    """Without keys, refuses requests from web pages of other addresses."""
    return auth.accept_all if access.asks_keys else auth.refuse_foreign_pages(any_host=not access.is_local)


def key_or_session(keys: GuardedKeys, dashboard: DashboardState) -> auth.Authenticate:
    """Asks for a key as `auth.by_key` does; for sampling, a browser's session replaces the key."""
    by_key = auth.by_key(keys)
    login = dashboard.access.login

    def authenticate(request: Request) -> Caller:
        shows_key = "x-api-key" in request.headers or "authorization" in request.headers
        if login is None or shows_key or not request.url.path.startswith("/v1/"):
            return by_key(request)
        visitor = login.session_of(request)
        return by_key(request) if visitor is None else cast("Caller", visitor)

    return authenticate


def is_operator(owner: str, keys: ApiKeys, operators: Collection[str]) -> bool:
    """Whether an owner may see the runs of the data directory, and the metrics.

    If no `operators` are named, it is the owner of all keys, if all are of one.
    """
    return owner in operators if operators else keys.active_owners() == {owner}


class _AsCaller:
    """A service in this process for the `ServiceClient` of one caller, who cannot stop it."""

    def __init__(self, service: Service, caller: Caller) -> None:
        self.app = create_service_app(service, ROUTES, authenticate=lambda _request: caller)

    def release(self) -> None:
        """Does nothing: the service goes on."""


# --- by itself -------------------------------------------------------------------------------------------------------


def serve_dashboard(
    data_dir: Path,
    extra: Sequence[Path] = (),
    *,
    host: str,
    port: int,
    open_browser: bool = False,
    commands: PageCommands | None = None,
    announce: Callable[[str], None],
) -> None:
    """Serves the pages over the runs of a data directory and further folders, until a signal. With `commands` the
    pages start, resume and evaluate runs.

    On this machine it asks for no key. Elsewhere for those of the data directory, and it does not start without any.

    Raises:
        InvalidRequestError: others could reach it and no key would keep them out; or the address cannot be used.
    """
    server = DashboardServer(data_dir, extra, host=host, port=port, commands=commands)

    def started() -> None:
        announce(server.line)
        if open_browser:
            # On a thread: a browser in the terminal runs until it is closed.
            threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()

    server.run(started)


class DashboardServer:
    """The pages behind a socket."""

    def __init__(
        self,
        data_dir: Path,
        extra: Sequence[Path] = (),
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        commands: PageCommands | None = None,
    ) -> None:
        """Same as `serve_dashboard`."""
        folder = data_dir.expanduser().resolve()
        is_local = auth.is_loopback(host)
        access = preflight.decide_access(
            host, api_keys=False if is_local else None, insecure=False, keys=count_keys(folder)
        )
        self._socket: socket.socket = preflight.open_socket(host, port)
        self._database = Database(folder / JOURNAL_FILE) if access.asks_keys else None
        login = None if self._database is None else _operators_login(ApiKeys(self._database))
        self._embedded = LazyEmbedded(folder)
        self.dashboard = DashboardState(
            [folder, *extra],
            access=AccessCheck(screen_of(access), login),
            search=_search(lambda _visitor: ServiceClient(data_dir=folder)),
            commands=commands,
            environment=lambda: environment_of(folder),
        )
        app = create_app(self.dashboard, sampling=self._embedded)
        self._http = HttpServer(http_config(app, drain_s=DRAIN_S), self.dashboard.close)
        self.url = url_of(host, self._socket)
        places = " · ".join(str(place) for place in (folder, *extra))
        self.line = (
            f"mint shows {self.url}/ · {'keys' if access.asks_keys else 'no keys'} asked for · runs in: {places}"
        )

    def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Serves requests until a signal or `stop`; calls `started` once it accepts them."""
        self._http.on_started = started
        try:
            self._http.run(sockets=[self._socket])
        finally:
            self._embedded.close()
            if self._database is not None:
                self._database.close()

    def stop(self) -> None:
        """Makes `run` return, as a signal does."""
        self._http.should_exit = True


def _operators_login(keys: ApiKeys) -> Login:
    return Login(GuardedKeys(keys), admits=lambda visitor: is_operator(visitor.owner, keys, ()))


class LazyEmbedded:
    """The application over a data directory, opened by the first request.

    Another process may use the same directory; the checkpoints that it saves are found here too.
    """

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._opening = threading.Lock()
        self._opened: EmbeddedService | None = None
        self._app: ASGIApp | None = None
        self._threads = ThreadPoolExecutor(thread_name_prefix="mint-http")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Passes a request on."""
        app = await asyncio.to_thread(self._open)
        await app(scope, receive, send)

    def close(self) -> None:
        """Stops the service, if it was opened."""
        with self._opening:
            if self._opened is not None:
                self._opened.release()
                self._opened = self._app = None

    def _open(self) -> ASGIApp:
        with self._opening:
            if self._opened is None or self._app is None:
                self._opened = open_embedded(data_dir=self._data_dir)
                self._app = create_service_app(self._opened.service, ROUTES, executor=self._threads)
            return self._app


# --- searching -------------------------------------------------------------------------------------------------------


def _search(open_client: Callable[[Visitor | None], ServiceClient]) -> Search:
    """The bisection of a run, which samples as its visitor."""

    def search(folder: Path, metric: str, visitor: Visitor | None, tell: Callable[[str], None]) -> Regression:
        _require_own_task(folder, metric)
        with open_task_of_run(folder, None) as choice, closing(open_client(visitor)) as client:

            def read(path: str) -> Any:
                tell(path)
                return evaluate_checkpoint(path, choice.adapter, config=choice.config, service=client)

            return bisect_run(folder, metric, read)

    return search


def _require_own_task(folder: Path, metric: str) -> None:
    """Checks that grading runs only code of mint: a run's folder may come from anywhere, and may name other code.

    Raises:
        InvalidRequestError: it names a task outside mint, or asks to run code without the sandbox.
    """
    spec = read_config(folder).get("task_spec") or {}
    task = str(spec.get("task", ""))
    source, _, rest = task.partition(":")
    is_known = task in RECIPES or (source in SOURCES and bool(rest))
    if not is_known or spec.get("options", {}).get("unsafe_sandbox"):
        raise InvalidRequestError(
            "is not graded from a page, for it runs code of its own",
            field="task",
            value=task or "(not named)",
            remedy=f"Run it yourself: mint bisect {folder} --metric {metric}",
        )

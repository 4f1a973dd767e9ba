"""The ASGI application over a service: a table of routes, who may call them, and how errors become responses.

The embedded client calls it in process, and the server puts it behind a socket: the same object. Decides nothing: a
row of the table names an operation.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import mint.wire as wire
from mint.engine.protocol import is_out_of_memory
from mint.errors import (
    AuthenticationError,
    InvalidRequestError,
    JournalError,
    MintError,
    NotFoundError,
    OverloadedError,
    RequestFailedError,
)
from mint.server.callers import LOCAL, Caller
from mint.server.http.access_log import OWNER_KEY, ROUTE_KEY, AccessLog, AccessObserver
from mint.server.http.auth import Admit, Authenticate, OpenKeys, Recall, Screen, require_operator
from mint.server.http.bodies import Bodies
from mint.server.http.route_table import Call, RouteRow, RunBlocking, respond_json
from mint.server.service.service import Service

log = logging.getLogger("mint.app")

T = TypeVar("T")

DELAYED_STATUS = 500
"""Errors of this status and above are answered after `SLOW_ERROR_S`: some clients send the request again at once."""

SLOW_ERROR_S = 1.0

OWNER_THREADS = 4
"""Of the 16 that decode, tokenize and list: a long text takes one for seconds."""

OWNER_DISK_THREADS = 12
"""Of the 16 that accept requests: most of them wait together for the same fsync."""

Endpoint = Callable[[Request], Awaitable[Response]]
Identify = Callable[[Request], Awaitable[Caller]]


class Exposition(Protocol):
    """Numbers for a monitoring system."""

    def render(self) -> bytes:
        """All of them, in Prometheus' text format."""
        ...


class ReadinessProbe(Protocol):
    """Whether requests are being worked on."""

    async def problems(self) -> Sequence[str]:
        """The reasons why the service is not ready; empty if it is."""
        ...

    async def warnings(self) -> Sequence[str]:
        """What will be wrong soon unless somebody sees to it."""
        ...


def create_app(
    service: Service,
    routes: tuple[RouteRow, ...],
    *,
    authenticate: Authenticate | None = None,
    recall: Recall = lambda _request: None,
    is_operator: Admit = lambda _caller: False,
    public_url: str | None = None,
    screen: Screen | None = None,
    bodies: Bodies | None = None,
    observers: Sequence[AccessObserver] = (),
    metrics: Exposition | None = None,
    readiness: ReadinessProbe | None = None,
    pages: Sequence[Route] = (),
    executor: Executor | None = None,
    disk_executor: Executor | None = None,
) -> Starlette:
    """The application over a service that the caller starts and stops.

    `authenticate` None asks for no key, and then everybody is an operator. `recall` names a sender who was verified a
    moment ago, without a change of threads. `public_url` begins links to files. `screen` sees every request before its
    sender is known. `observers` get the record of every request; without any, there are no records, and responses carry
    no request id. `pages` are further routes, which check themselves who may call them.

    What takes time (decoding a body, the journal) runs on the threads of `executor`, so that the event loop goes on
    answering; None runs it on the event loop, which suits an application with one client in its own process. Rows that
    wait for the disk run on the threads of `disk_executor`, so that a slow disk delays only those who need it.
    """
    bodies = bodies or Bodies()
    run_check = _at_once if executor is None else _on_threads(executor)
    quick = _everybody_at_once if executor is None else OwnerThreads(executor, OWNER_THREADS).run_for
    slow = quick if disk_executor is None else OwnerThreads(disk_executor, OWNER_DISK_THREADS).run_for

    identify = None if authenticate is None else _identification(authenticate, recall, run_check)
    open_keys = OpenKeys(identify)

    def route(row: RouteRow) -> Route:
        run_for = slow if row.waits_for_disk else quick
        endpoint = _endpoint(service, row, identify, open_keys, is_operator, screen, bodies, run_check, run_for)
        return Route(row.path, endpoint, methods=[row.method])

    app = Starlette(
        routes=[*(route(row) for row in routes), *(_named(page) for page in pages)],
        middleware=[Middleware(AccessLog, observers)] if observers else [],
        exception_handlers={404: _no_route, 405: _wrong_method},
    )
    app.router.redirect_slashes = False
    app.state.rows = routes
    app.state.bodies = bodies
    app.state.asks_keys = authenticate is not None
    app.state.public_url = public_url
    app.state.metrics = metrics
    app.state.readiness = readiness
    return app


async def _at_once(function: Callable[..., T], /, *arguments: object) -> T:
    return function(*arguments)


def _everybody_at_once(_owner: str) -> RunBlocking:
    return _at_once


def _on_threads(executor: Executor) -> RunBlocking:
    async def run(function: Callable[..., T], /, *arguments: object) -> T:
        context = contextvars.copy_context()  # the request's id, for the log
        work: Any = asyncio.get_running_loop().run_in_executor(executor, context.run, function, *arguments)
        return await work

    return run


class OwnerThreads:
    """Threads that owners share: at most `most` calls of each owner are on them, the others wait for these.

    A call counts until its thread is free again, also after its client has left. One event loop at a time.
    """

    def __init__(self, executor: Executor, most: int) -> None:
        self._executor = executor
        self._most = most
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def run_for(self, owner: str) -> RunBlocking:
        """Runs functions of an owner."""

        async def run(function: Callable[..., T], /, *arguments: object) -> T:
            turn = self._turns.setdefault(owner, asyncio.Semaphore(self._most))
            loop = asyncio.get_running_loop()

            def give_back(_work: object) -> None:
                with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                    loop.call_soon_threadsafe(turn.release)

            await turn.acquire()
            try:
                context = contextvars.copy_context()  # the request's id, for the log
                work: Future[Any] = self._executor.submit(context.run, function, *arguments)
            except BaseException:
                turn.release()
                raise
            work.add_done_callback(give_back)
            result: Any = await asyncio.wrap_future(work)
            return result

        return run


def _identification(authenticate: Authenticate, recall: Recall, run_blocking: RunBlocking) -> Identify:
    async def identify(request: Request) -> Caller:
        return recall(request) or await run_blocking(authenticate, request)

    return identify


def _endpoint(
    service: Service,
    row: RouteRow,
    identify: Identify | None,
    open_keys: OpenKeys,
    is_operator: Admit,
    screen: Screen | None,
    bodies: Bodies,
    run_check: RunBlocking,
    run_for: Callable[[str], RunBlocking],
) -> Endpoint:
    refuse = row.refuse or _respond_error
    operation: Any = row.operation
    is_coroutine = inspect.iscoroutinefunction(operation)

    async def endpoint(request: Request) -> Response:
        request.scope[ROUTE_KEY] = row.path
        caller = LOCAL
        body = None
        try:
            if screen is not None:
                screen(request)
            if identify is not None and not row.is_open:
                caller = await identify(request)
                if row.for_operators:
                    await run_check(require_operator, caller, is_operator)
            if not row.is_open:  # open rows read no body: a sender without a key gets no memory
                request.scope[OWNER_KEY] = caller.owner
                body = None if row.streams_body else await bodies.read(request, caller.owner, row.max_body_bytes)
            run_blocking = run_for(caller.owner)
            call = Call(
                service,
                request,
                caller,
                run_blocking,
                runs=service.training_runs,
                checkpoints=service.checkpoints,
                sessions=service.stored_sessions,
                use_key=partial(open_keys.use, request),
            )
            if body is not None:
                call = replace(call, body=body.content, release_body=body.release)
            return await (operation(call) if is_coroutine else run_blocking(operation, call))
        except MintError as error:
            if error.status >= DELAYED_STATUS:
                await asyncio.sleep(SLOW_ERROR_S)
            return refuse(error)
        except Exception as error:  # the boundary: a route must answer, and the log must know why
            if is_out_of_memory(error):
                log.warning("no memory for a request: %r", error)
                return refuse(OverloadedError("memory is short for this request", remedy="Send the same request again"))
            log.exception("%s %s failed", row.method, row.path)
            return refuse(RequestFailedError(f"{type(error).__name__}: {error}", remedy="See the server's log"))
        finally:
            if body is not None:
                body.release()

    return endpoint


def _named(page: Route) -> Route:
    """The same route, with its path in the access record."""

    async def endpoint(request: Request) -> Response:
        request.scope[ROUTE_KEY] = page.path
        return await page.endpoint(request)

    return Route(page.path, endpoint, methods=list(page.methods or ()))


def _respond_error(error: MintError, *, status: int | None = None) -> Response:
    response = respond_json(wire.encode_error(error), status=status or error.status)
    if isinstance(error, OverloadedError):
        response.headers["retry-after"] = str(math.ceil(error.retry_after_s))
    elif isinstance(error, JournalError):
        response.headers["retry-after"] = "1"
    if type(error) is AuthenticationError:
        response.headers["www-authenticate"] = "Bearer"
    return response


async def _no_route(request: Request, _error: Exception) -> Response:
    remedy = "See /docs for those there are; those of the training protocol begin with /api/v1"
    return _refuse_of(request)(
        NotFoundError("is not a route of this server", field="path", value=request.url.path, remedy=remedy)
    )


async def _wrong_method(request: Request, error: Exception) -> Response:
    headers = (error.headers or {}) if isinstance(error, HTTPException) else {}
    remedy = f"Use {headers.get('Allow', 'another one')}"
    refusal = InvalidRequestError("is not taken by this route", field="method", value=request.method, remedy=remedy)
    response = _refuse_of(request)(refusal)
    response.status_code = 405
    response.headers.update(headers)
    return response


def _refuse_of(request: Request) -> Callable[[MintError], Response]:
    """How the routes whose path begins alike write an error: a protocol has its own shape below its prefix."""
    parts = request.url.path.split("/")[1:]
    refuse: Callable[[MintError], Response] = _respond_error
    most_alike = 0
    for row in request.app.state.rows:
        alike = _common_beginning(parts, row.path.split("/")[1:])
        if row.refuse is not None and alike > most_alike:
            refuse, most_alike = row.refuse, alike
    return refuse


def _common_beginning(one: Sequence[str], other: Sequence[str]) -> int:
    """How many parts two paths have in common before they differ."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))

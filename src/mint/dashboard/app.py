"""The routes of the dashboard, and what all of them share: access, headers, errors, and threads for reading files.

The answers come from run folders (`api`, `pages`, `run_downloads`), from live streams (`event_streams`), and from
callables that the composition root passes in. Knows neither the service nor its engine.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlencode

import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mint.dashboard import api, pages, run_downloads
from mint.dashboard.login import AccessCheck, Visitor, require_own_page, set_cookie
from mint.dashboard.response_encoding import conditional_response, json_bytes
from mint.dashboard.state import DashboardState
from mint.errors import AuthenticationError, MintError, NotFoundError, OverloadedError, RequestFailedError
from mint.server.http.auth import sender_of

log = logging.getLogger("mint.dashboard")

API = api.ROOT
_RUN = "runs/{run}"

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    # Not `no-referrer`: with that, browsers do not send the Origin of a form on this server's own page.
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}

MAX_FORM_BYTES = 16 * 1024

Kind = Literal["json", "page", "text"]


def routes(dashboard: DashboardState) -> list[Route]:
    """All pages and their JSON, for the application that answers at this address."""
    threading.Thread(target=pages.compile_templates, name="mint-dashboard-templates", daemon=True).start()
    return [Route(row.path, _endpoint(dashboard, row), methods=[row.method]) for row in ROUTES]


@dataclass(frozen=True)
class DashboardRoute:
    """One route. `is_open`: it answers without a key. `kind` says how an error is shown."""

    method: str
    path: str
    operation: Callable[[DashboardState, Request, Visitor | None], Awaitable[Response]]
    kind: Kind = "json"
    is_open: bool = False


def _endpoint(dashboard: DashboardState, row: DashboardRoute) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            response = await _answer(dashboard, row, request)
        except MintError as error:
            response = _refuse(row, request, error)
        except Exception as error:  # the boundary: a route must answer, and the log must say why
            log.exception("%s %s failed", row.method, row.path)
            remedy = "See the server's log"
            response = _refuse(row, request, RequestFailedError(f"{type(error).__name__}: {error}", remedy=remedy))
        if request.method == "HEAD" and isinstance(response, StreamingResponse):
            response = Response(status_code=response.status_code, headers=dict(response.headers))
        for name, value in HEADERS.items():
            response.headers[name] = value
        response.headers.setdefault("cache-control", "no-store")
        return response

    return endpoint


async def _answer(dashboard: DashboardState, row: DashboardRoute, request: Request) -> Response:
    if row.is_open:
        dashboard.access.screen(request)
        return await row.operation(dashboard, request, None)
    # In a thread, because a key is looked up in a database.
    visitor = await anyio.to_thread.run_sync(dashboard.access.visitor_of, request)
    return await row.operation(dashboard, request, visitor)


def _refuse(row: DashboardRoute, request: Request, error: MintError) -> Response:
    if row.kind == "page" and type(error) is AuthenticationError and row.method == "GET":
        return RedirectResponse(f"/login?{urlencode({'next': _place(request)})}", status_code=303)
    return _refused(error, row.kind)


def _refused(error: MintError, kind: Kind) -> Response:
    if kind == "page":
        response = Response(pages.error_page(error), error.status, media_type="text/html")
    else:
        response = Response(json_bytes(error.to_wire()), error.status, media_type="application/json")
    if isinstance(error, OverloadedError):
        response.headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if kind != "page" and type(error) is AuthenticationError:
        response.headers["www-authenticate"] = "Bearer"
    return response


def _place(request: Request) -> str:
    return f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path


# --- kinds of routes -------------------------------------------------------------------------------------------------


def _json(method: str, path: str, read: Callable[[DashboardState, Request], Any]) -> DashboardRoute:
    """A route that answers with JSON; `read` runs in a thread, because it reads files."""

    async def operation(dashboard: DashboardState, request: Request, _visitor: Visitor | None) -> Response:
        def work() -> Response:
            return conditional_response(request, json_bytes(read(dashboard, request)), "application/json")

        return await anyio.to_thread.run_sync(work, limiter=dashboard.threads)

    return DashboardRoute(method, f"{API}/{path}", operation)


def _page(path: str, write: Callable[[DashboardState, Request], str], *, is_open: bool = False) -> DashboardRoute:
    """A route that answers with a page."""

    async def operation(dashboard: DashboardState, request: Request, _visitor: Visitor | None) -> Response:
        def work() -> Response:
            # A run may hold half of a surrogate pair, which UTF-8 cannot encode.
            html = write(dashboard, request).encode("utf-8", "replace")
            return conditional_response(request, html, "text/html; charset=utf-8")

        return await anyio.to_thread.run_sync(work, limiter=dashboard.threads)

    return DashboardRoute("GET", path, operation, "page", is_open)


def _download(file: str, write: Callable[[DashboardState, Request], Response]) -> DashboardRoute:
    """A route that sends a file of a run."""

    async def operation(dashboard: DashboardState, request: Request, _visitor: Visitor | None) -> Response:
        return await anyio.to_thread.run_sync(write, dashboard, request, limiter=dashboard.threads)

    return DashboardRoute("GET", f"{API}/{_RUN}/{file}", operation, "text")


def _change(path: str, change: Callable[[DashboardState, Request, bytes], Any]) -> DashboardRoute:
    """A route that changes something and answers with JSON. Access is checked as for all routes that are not `GET`: a
    key, or the page of this very server."""

    async def operation(dashboard: DashboardState, request: Request, _visitor: Visitor | None) -> Response:
        body = await _small_body(request)
        answer = await anyio.to_thread.run_sync(change, dashboard, request, body, limiter=dashboard.threads)
        return Response(json_bytes(answer), media_type="application/json")

    return DashboardRoute("POST", f"{API}/{path}", operation)


# --- other operations ----------------------------------------------------------------------------------


async def _asset(dashboard: DashboardState, request: Request, _visitor: Visitor | None) -> Response:
    """A script or style. One asked for with the version that it has stays in the browser's cache."""
    response = await _file(dashboard, request, request.path_params["file"])
    if request.path_params.get("version") == pages.assets_version():
        response.headers["cache-control"] = "public, max-age=31536000, immutable"
    return response


async def _favicon(dashboard: DashboardState, request: Request, _visitor: Visitor | None) -> Response:
    return await _file(dashboard, request, "favicon.svg")


async def _file(dashboard: DashboardState, request: Request, name: str) -> Response:
    try:
        response = await dashboard.assets.get_response(name, request.scope)
    except HTTPException as error:
        raise NotFoundError("is not a file of the dashboard", field="path", value=request.url.path) from error
    response.headers["cache-control"] = "no-cache"
    return response


async def _enter(dashboard: DashboardState, request: Request, _visitor: Visitor | None) -> Response:
    """Logs in with the key from the form of the login page."""
    login = dashboard.access.login
    place = pages.safe_place(request.query_params.get("next", ""))
    if login is None:
        return RedirectResponse(place, status_code=303)
    require_own_page(request)
    form = api.parse_form((await _small_body(request)).decode("utf-8", "replace"))
    try:
        token = await anyio.to_thread.run_sync(login.enter, form.get("key", "").strip(), sender_of(request))
    except AuthenticationError as error:
        page = pages.login_page(asks_keys=True, place=place, problem=str(error))
        return Response(page, error.status, media_type="text/html")
    response = RedirectResponse(place, status_code=303)
    set_cookie(response, request, token)
    return response


async def _leave(dashboard: DashboardState, request: Request, _visitor: Visitor | None) -> Response:
    """Ends a browser's session."""
    require_own_page(request)
    if dashboard.access.login is not None:
        dashboard.access.login.leave(request)
    response = RedirectResponse("/login", status_code=303)
    set_cookie(response, request, "")
    return response


async def _small_body(request: Request) -> bytes:
    """The body of a request that should be small.

    Raises:
        BodyTooLargeError: it is larger than `MAX_FORM_BYTES`.
    """
    parts: list[bytes] = []
    async for part in request.stream():
        parts.append(part)
        if sum(map(len, parts)) > MAX_FORM_BYTES:
            raise api.too_large(MAX_FORM_BYTES)
    return b"".join(parts)


async def _bisect(dashboard: DashboardState, request: Request, visitor: Visitor | None) -> Response:
    """Starts a search for the checkpoint where a metric fell; `GET` returns its progress."""
    wanted = api.parse_metric(await _small_body(request))
    run = request.path_params["run"]
    state = await anyio.to_thread.run_sync(dashboard.bisections.begin, run, wanted, visitor)
    return Response(json_bytes(state), 202, media_type="application/json")


async def _run_events(dashboard: DashboardState, request: Request, _visitor: Visitor | None) -> Response:
    run = request.path_params["run"]
    reader = await anyio.to_thread.run_sync(dashboard.readers.of, run)
    since = request.headers.get("last-event-id") or request.query_params.get("since", "")
    return dashboard.streams.of_run(run, reader, api.parse_cursor(since))


async def _all_events(dashboard: DashboardState, _request: Request, _visitor: Visitor | None) -> Response:
    return dashboard.streams.of_all()


ROUTES: tuple[DashboardRoute, ...] = (
    _page("/", pages.runs),
    _page("/compare", pages.compare),
    _page("/service", pages.service),
    _page("/login", pages.login, is_open=True),
    DashboardRoute("POST", "/login", _enter, "page", is_open=True),
    DashboardRoute("POST", "/logout", _leave, "page", is_open=True),
    _page(f"/{_RUN}", pages.run),
    _page(f"/{_RUN}/rollouts", pages.rollouts),
    _page(f"/{_RUN}/diagnosis", pages.diagnosis),
    _page(f"/{_RUN}/checkpoints", pages.checkpoints),
    DashboardRoute("GET", "/assets/{file}", _asset, "text", is_open=True),
    DashboardRoute("GET", "/assets/{version}/{file}", _asset, "text", is_open=True),
    DashboardRoute("GET", "/favicon.ico", _favicon, "text", is_open=True),
    _json("GET", "runs", api.runs),
    DashboardRoute("GET", f"{API}/runs/events", _all_events),
    _json("GET", _RUN, api.run),
    _json("GET", f"{_RUN}/columns", api.columns),
    DashboardRoute("GET", f"{API}/{_RUN}/events", _run_events),
    _json("GET", f"{_RUN}/rollouts", api.rollouts),
    _json("GET", f"{_RUN}/rollouts/{{step:int}}/{{row:int}}", api.rollout),
    _json("GET", f"{_RUN}/steps", api.steps),
    _json("GET", f"{_RUN}/steps/{{step:int}}/groups", api.groups),
    _json("GET", f"{_RUN}/steps/{{step:int}}/groups/{{group:int}}", api.group),
    _json("GET", f"{_RUN}/items/{{item:int}}", api.item),
    _json("GET", f"{_RUN}/evaluations/{{place:int}}/examples", api.examples),
    _json("GET", f"{_RUN}/findings", api.findings),
    _json("GET", f"{_RUN}/checkpoints", api.checkpoints),
    _json("GET", f"{_RUN}/bisect", api.bisection),
    DashboardRoute("POST", f"{API}/{_RUN}/bisect", _bisect),
    _change(f"{_RUN}/labels", api.label),
    _change(f"{_RUN}/stop", api.stop),
    _change(f"{_RUN}/resume", api.resume),
    _change(f"{_RUN}/evaluate", api.evaluate),
    _change(f"{_RUN}/delete", api.delete),
    _change("deleted/{entry}/restore", api.restore),
    _change("launches", api.start),
    _json("GET", "launches", api.launches),
    _json("GET", "service", api.service),
    _download("metrics.csv", run_downloads.metrics_csv),
    _download("metrics.json", run_downloads.metrics_json),
    _download("rollouts.jsonl", run_downloads.rollouts_file),
)


def create_app(dashboard: DashboardState, *, sampling: ASGIApp) -> Starlette:
    """An application with the pages; `sampling` answers paths below `/v1` for visitors who may see the pages."""

    async def no_route(request: Request, _error: Exception) -> Response:
        remedy = "The list of runs is at /"
        error = NotFoundError("is not a page here", field="path", value=request.url.path, remedy=remedy)
        is_page = not request.url.path.startswith(f"{API}/")
        response = _refused(error, "page" if is_page else "json")
        response.headers.update(HEADERS)
        return response

    guarded = Route("/v1/{rest:path}", _Guarded(dashboard.access, sampling))
    app = Starlette(routes=[*routes(dashboard), guarded], exception_handlers={404: no_route})
    app.router.redirect_slashes = False
    return app


class _Guarded:
    """An application behind the access check of the pages."""

    def __init__(self, access: AccessCheck, app: ASGIApp) -> None:
        self._access = access
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on if its sender has access."""
        try:
            await anyio.to_thread.run_sync(self._access.visitor_of, Request(scope))
            await self._app(scope, receive, send)
        except MintError as error:  # access was refused, or the application could not be opened
            await _refused(error, "json")(scope, receive, send)

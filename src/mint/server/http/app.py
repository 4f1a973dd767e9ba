"""The HTTP face of the service: every route, who may call it, and how errors become answers.

Thin on purpose: a row names an operation; nothing is decided here. Mounted in process by the embedded client, and
behind a socket by the server: the same object.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

import mint.wire as wire
from mint.errors import (
    AuthenticationError,
    InvalidRequestError,
    MintError,
    NotFoundError,
    OverloadedError,
    RequestFailedError,
)
from mint.server.callers import LOCAL
from mint.server.http import file_routes, management_routes, operations_routes, protocol_routes, tokenizer_routes
from mint.server.http.access_log import Observed, Observer, exchange_of
from mint.server.http.auth import Authenticate, Screen, everyone_is_local, everything_passes
from mint.server.http.bodies import Bodies
from mint.server.http.route_table import Call, RouteRow, answer_json
from mint.server.openai import routes as openai_routes
from mint.server.ops.readiness import Readiness
from mint.server.service.service import Service

log = logging.getLogger("mint.app")

ROUTES: tuple[RouteRow, ...] = (
    *protocol_routes.ROUTES,
    *file_routes.ROUTES,
    *management_routes.ROUTES,
    *openai_routes.ROUTES,
    *operations_routes.ROUTES,
    *tokenizer_routes.ROUTES,
)


class Exposition(Protocol):
    """Numbers for a monitoring system."""

    def render(self) -> bytes:
        """All of them, in Prometheus' text format."""
        ...


Endpoint = Callable[[Request], Awaitable[Response]]


class Shortcut:
    """Middleware that finds routes without variables by their address, instead of trying one after another."""

    def __init__(self, app: ASGIApp, endpoints: Mapping[tuple[str, str], Endpoint]) -> None:
        """`endpoints` by method and path; they answer whatever happens."""
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, or passes on."""
        is_plain = scope["type"] == "http" and not scope.get("root_path")
        endpoint = self._endpoints.get((scope["method"], scope["path"])) if is_plain else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


def create_app(
    service: Service,
    *,
    authenticate: Authenticate = everyone_is_local,
    screen: Screen = everything_passes,
    bodies: Bodies | None = None,
    observers: Sequence[Observer] = (),
    metrics: Exposition | None = None,
    readiness: Readiness | None = None,
    pages: Sequence[Route] = (),
) -> Starlette:
    """The ASGI application over a service that the caller starts and stops.

    `screen` sees every request before its sender is known; `observers` see every exchange when it is over. `pages` are
    further routes, which see to it themselves who may come in.
    """
    rooms = bodies or Bodies()
    endpoints = [(row, _endpoint(service, row, authenticate, screen, rooms)) for row in ROUTES]
    routes: list[BaseRoute] = [Route(row.path, endpoint, methods=[row.method]) for row, endpoint in endpoints]
    fixed = {(row.method, row.path): endpoint for row, endpoint in endpoints if "{" not in row.path}
    app = Starlette(
        routes=[*routes, *(_named(page) for page in pages)],
        middleware=[Middleware(Observed, observers), Middleware(Shortcut, fixed)],
        exception_handlers={404: _no_route, 405: _wrong_method},
    )
    app.router.redirect_slashes = False
    app.state.rows = ROUTES
    app.state.bodies = rooms
    app.state.asks_keys = authenticate is not everyone_is_local
    app.state.metrics = metrics
    app.state.readiness = readiness or Readiness(service)
    return app


def _endpoint(service: Service, row: RouteRow, authenticate: Authenticate, screen: Screen, bodies: Bodies) -> Endpoint:
    refuse = row.refuse or _answer_error

    async def endpoint(request: Request) -> Response:
        exchange = exchange_of(request.scope)
        exchange.route = row.path
        try:
            screen(request)
            caller = LOCAL if row.is_open else authenticate(request)
            exchange.owner = None if row.is_open else caller.owner
            # whoever needs no key gets no memory either
            if row.streams_body or row.is_open:
                return await row.operation(Call(service, request, b"", caller))
            async with AsyncExitStack() as held:
                body = await held.enter_async_context(bodies.body_of(request, caller.owner))
                return await row.operation(Call(service, request, body, caller, held.aclose))
        except MintError as error:
            return refuse(error)
        except Exception as error:  # the boundary: a route must answer, and the log must know why
            log.exception("%s %s failed", row.method, row.path)
            return refuse(RequestFailedError(f"{type(error).__name__}: {error}", remedy="See the server's log"))

    return endpoint


def _named(page: Route) -> Route:
    """The same route, which logs and metrics know by its path."""

    async def endpoint(request: Request) -> Response:
        exchange_of(request.scope).route = page.path
        return await page.endpoint(request)

    return Route(page.path, endpoint, methods=list(page.methods or ()))


def _answer_error(error: MintError, *, status: int | None = None) -> Response:
    response = answer_json(wire.encode_error(error), status=status or error.status)
    if isinstance(error, OverloadedError):
        response.headers["retry-after"] = "1"
    if type(error) is AuthenticationError:
        response.headers["www-authenticate"] = "Bearer"
    return response


async def _no_route(request: Request, _error: Exception) -> Response:
    remedy = "See /docs for those there are; those of the training protocol begin with /api/v1"
    return _answer_error(
        NotFoundError("is not a route of this server", field="path", value=request.url.path, remedy=remedy)
    )


async def _wrong_method(request: Request, error: Exception) -> Response:
    headers = (error.headers or {}) if isinstance(error, HTTPException) else {}
    remedy = f"Use {headers.get('Allow', 'another one')}"
    refusal = InvalidRequestError("is not taken by this route", field="method", value=request.method, remedy=remedy)
    response = _answer_error(refusal, status=405)
    response.headers.update(headers)
    return response

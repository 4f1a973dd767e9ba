"""The HTTP face of the service: every route, who may call it, and how errors become answers.

Thin on purpose: a row names an operation; nothing is decided here. Mounted in process by the embedded client, and
behind a socket by the server: the same object.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import mint.wire as wire
from mint.errors import InvalidRequestError, MintError, RequestFailedError
from mint.server import operations_routes, protocol_routes
from mint.server.callers import LOCAL, Caller
from mint.server.calls import Call, RouteRow, answer_json
from mint.server.service import Service

log = logging.getLogger("mint.app")

MAX_BODY_BYTES = 64 * 1024 * 1024

ROUTES: tuple[RouteRow, ...] = (*protocol_routes.ROUTES, *operations_routes.ROUTES)

Authenticate = Callable[[Request], Caller]
"""Says who sends a request, or raises `AuthenticationError`."""


def everyone_is_local(_request: Request) -> Caller:
    """Asks for no key."""
    return LOCAL


def create_app(service: Service, *, authenticate: Authenticate = everyone_is_local) -> Starlette:
    """The ASGI application over a service that the caller starts and stops."""
    routes = [Route(row.path, _endpoint(service, row, authenticate), methods=[row.method]) for row in ROUTES]
    return Starlette(routes=routes)


def _endpoint(service: Service, row: RouteRow, authenticate: Authenticate) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            caller = LOCAL if row.is_open else authenticate(request)
            body = b"" if row.streams_body else await request.body()
            if len(body) > MAX_BODY_BYTES:
                remedy = f"Send at most {MAX_BODY_BYTES} bytes at once: split the data into several calls"
                raise InvalidRequestError("is too large", field="body", value=f"{len(body)} bytes", remedy=remedy)
            return await row.operation(Call(service, request, body, caller))
        except MintError as error:
            return answer_json(wire.encode_error(error), status=error.status)
        except Exception as error:  # the boundary: a route must answer, and the log must know why
            log.exception("route %s failed", request.url.path)
            failure = RequestFailedError(f"{type(error).__name__}: {error}", remedy="See the server's log")
            return answer_json(wire.encode_error(failure), status=failure.status)

    return endpoint

"""The HTTP face of the service: one table of routes, and how errors become answers.

Thin on purpose: a row names an operation of `Service`; nothing is decided here. Mounted in process by the embedded
client, and behind a socket by the server: the same object.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import mint.wire as wire
from mint.errors import InvalidRequestError, MintError, NotFoundError, RequestFailedError
from mint.server.identities import RequestName
from mint.server.service import Service
from mint.wire import RetrieveFutureRequest

log = logging.getLogger("mint.app")

Operation = Callable[[Service, Request, bytes], Awaitable[Response]]

MAX_BODY_BYTES = 64 * 1024 * 1024
TRY_AGAIN = b'{"type":"try_again","queue_state":"active"}'


async def client_config(_service: Service, _request: Request, _body: bytes) -> Response:
    """Every flag keeps the client's default."""
    return _json(b"{}")


async def create_session(service: Service, _request: Request, body: bytes) -> Response:
    """Opens a session."""
    return _json(wire.encode(service.create_session(body)))


async def session_heartbeat(service: Service, _request: Request, body: bytes) -> Response:
    """Keeps a session alive."""
    service.heartbeat(body)
    return _json(b"{}")


async def finish_session(service: Service, request: Request, _body: bytes) -> Response:
    """Ends a session."""
    service.finish_session(request.path_params["session_id"])
    return _json(b"{}")


def submit(kind: str) -> Operation:
    """The operation that accepts requests of a kind that is journaled."""

    async def operation(service: Service, _request: Request, body: bytes) -> Response:
        return _json(wire.encode(service.submit(kind, body)))

    return operation


async def get_info(service: Service, _request: Request, body: bytes) -> Response:
    """What a model is."""
    return _json(wire.encode(service.get_info(body)))


async def create_sampling_session(service: Service, _request: Request, body: bytes) -> Response:
    """A new sampler."""
    return _json(wire.encode(service.create_sampling_session(body)))


async def sampler_info(service: Service, request: Request, _body: bytes) -> Response:
    """What a sampler samples from."""
    return _json(wire.encode(service.sampler_info(request.path_params["sampler_id"])))


async def sample(service: Service, _request: Request, body: bytes) -> Response:
    """Accepts a sample request."""
    return _json(wire.encode(service.sample(body)))


async def retrieve_future(service: Service, _request: Request, body: bytes) -> Response:
    """Long poll: the result, the error (200 too: it is final), 408 for "ask again", 410 for a lost sample."""
    try:
        answer = await service.retrieve(body)
    except NotFoundError as error:
        name = RequestName.parse(wire.decode(RetrieveFutureRequest, body).request_id)
        lost = name is not None and name.is_sample
        return _json(wire.encode_error(error), status=410 if lost else 200)
    if answer is None:
        return _json(TRY_AGAIN, status=408)
    return _json(answer.body)


async def weights_info(service: Service, _request: Request, body: bytes) -> Response:
    """What a checkpoint was saved from."""
    return _json(wire.encode(service.weights_info(body)))


async def get_server_capabilities(service: Service, _request: Request, _body: bytes) -> Response:
    """The base models on offer."""
    return _json(wire.encode(service.capabilities()))


async def healthz(service: Service, _request: Request, _body: bytes) -> Response:
    """Whether requests are being worked on."""
    return _json(b'{"status":"ok"}') if service.is_working else _json(b'{"status":"stopped"}', status=503)


ROUTES: tuple[tuple[str, str, Operation], ...] = (
    ("POST", "client/config", client_config),
    ("POST", "create_session", create_session),
    ("POST", "session_heartbeat", session_heartbeat),
    ("POST", "sessions/{session_id}/finish", finish_session),
    ("POST", "create_model", submit("create_model")),
    ("POST", "get_info", get_info),
    ("POST", "forward", submit("forward")),
    ("POST", "forward_backward", submit("forward_backward")),
    ("POST", "optim_step", submit("optim_step")),
    ("POST", "save_weights", submit("save_weights")),
    ("POST", "save_weights_for_sampler", submit("save_weights_for_sampler")),
    ("POST", "load_weights", submit("load_weights")),
    ("POST", "create_sampling_session", create_sampling_session),
    ("GET", "samplers/{sampler_id}", sampler_info),
    ("POST", "asample", sample),
    ("POST", "retrieve_future", retrieve_future),
    ("POST", "weights_info", weights_info),
    ("GET", "get_server_capabilities", get_server_capabilities),
    ("GET", "healthz", healthz),
)
"""Method, path below `/api/v1`, operation."""


def create_app(service: Service) -> Starlette:
    """The ASGI application over a service that the caller starts and stops."""
    routes = [
        Route(f"{wire.API_PREFIX}/{path}", _endpoint(service, operation), methods=[method])
        for method, path, operation in ROUTES
    ]
    return Starlette(routes=routes)


def _endpoint(service: Service, operation: Operation) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            body = await request.body()
            if len(body) > MAX_BODY_BYTES:
                remedy = f"Send at most {MAX_BODY_BYTES} bytes at once: split the data into several calls"
                raise InvalidRequestError("is too large", field="body", value=f"{len(body)} bytes", remedy=remedy)
            return await operation(service, request, body)
        except MintError as error:
            return _json(wire.encode_error(error), status=error.status)
        except Exception as error:  # the boundary: a route must answer, and the log must know why
            log.exception("route %s failed", request.url.path)
            failure = RequestFailedError(f"{type(error).__name__}: {error}", remedy="See the server's log")
            return _json(wire.encode_error(failure), status=failure.status)

    return endpoint


def _json(body: bytes, *, status: int = 200) -> Response:
    return Response(body, status_code=status, media_type=wire.MEDIA_TYPE)

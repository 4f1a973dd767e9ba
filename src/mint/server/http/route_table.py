"""A row of the route table, and the call that its operation gets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

import mint.wire as wire
from mint.errors import MintError
from mint.server.callers import Caller
from mint.server.http.auth import OpenKey
from mint.server.service.service import Service
from mint.server.store.checkpoint_catalog import CheckpointCatalog
from mint.server.store.session_catalog import SessionCatalog
from mint.server.store.training_run_catalog import TrainingRunCatalog

T = TypeVar("T")


class RunBlocking(Protocol):
    """Runs a function that may take time, as the application was told to: on a thread, or at once."""

    async def __call__(self, function: Callable[..., T], /, *arguments: object) -> T: ...


@dataclass(frozen=True)
class Call:
    """A request whose sender is known and whose body is complete, decompressed and within its limits.

    `runs`, `checkpoints` and `sessions` are what is stored, for management. What takes long is done under `use_key`,
    and ends when the key is revoked. `release_body` gives the memory of the body back before the call is over.
    """

    service: Service
    request: Request
    caller: Caller
    run_blocking: RunBlocking
    runs: TrainingRunCatalog
    checkpoints: CheckpointCatalog
    sessions: SessionCatalog
    use_key: Callable[[], AbstractContextManager[OpenKey]]
    body: bytes = b""
    release_body: Callable[[], None] = lambda: None


SMALL_BODY_BYTES = 1024 * 1024
"""The largest body of a route that carries no data: a thread that decodes it delays the event loop by milliseconds."""

Operation = Callable[[Call], Response] | Callable[[Call], Awaitable[Response]]
"""A coroutine runs on the event loop, and hands what takes time to `Call.run_blocking`; a plain function runs in it."""


@dataclass(frozen=True)
class RouteRow:
    """One route. `request` and `response` describe the bodies; the operation's docstring says what it is for.

    `is_open` rows answer without a key, `for_operators` rows only with an operator's. `streams_body` rows read the body
    themselves, and get it empty; others get at most `max_body_bytes`, and never more than the server allows. Rows that
    write to the journal, as most do, have `waits_for_disk`; the others are answered while those wait. `refuse` is for
    rows whose protocol writes errors in a shape of its own, which `refusal` describes. A row that `streams` may answer
    with server-sent events instead of one message.
    """

    method: str
    path: str
    operation: Operation
    request: type[BaseModel] | None = None
    response: type[BaseModel] | None = None
    is_open: bool = False
    for_operators: bool = False
    streams_body: bool = False
    max_body_bytes: int | None = SMALL_BODY_BYTES
    waits_for_disk: bool = True
    refuse: Callable[[MintError], Response] | None = None
    refusal: type[BaseModel] | None = None
    streams: bool = False


def respond(message: BaseModel, *, status: int = 200) -> Response:
    """A message as JSON."""
    return respond_json(wire.encode(message), status=status)


def respond_json(body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Bytes that are JSON already."""
    return Response(body, status_code=status, media_type=wire.MEDIA_TYPE, headers=headers)

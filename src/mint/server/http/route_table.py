"""One HTTP call as operations see it, and a row of the route table. Decides nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

import mint.wire as wire
from mint.errors import MintError
from mint.server.callers import Caller
from mint.server.service.service import Service


@dataclass(frozen=True)
class Call:
    """A call whose sender is known and whose body is whole, decompressed and within bounds.

    `let_go` gives the memory of the body back before the call is over.
    """

    service: Service
    request: Request
    body: bytes
    caller: Caller
    let_go: Callable[[], Awaitable[None]] | None = None

    @property
    def encoding(self) -> wire.Encoding:
        """How the body is written, by its header; JSON unless it says protobuf."""
        media_type = self.request.headers.get("content-type", "").partition(";")[0].strip().lower()
        return wire.Encoding.PROTO if media_type == wire.Encoding.PROTO.value else wire.Encoding.JSON

    @property
    def prefers_to_wait(self) -> bool:
        """Whether the sender wants the result itself, instead of a promise that he would have to come back with."""
        return self.request.headers.get(wire.PREFER) == wire.WAIT

    @property
    def accepts_proto(self) -> bool:
        """Whether the sender can read a protobuf answer."""
        return wire.Encoding.PROTO.value in self.request.headers.get("accept", "")


Operation = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True)
class RouteRow:
    """One route. `request` and `response` describe the bodies; the operation's docstring says what it is for.

    `is_open` rows answer without a key. `streams_body` rows read the body themselves, and get it empty.
    `refuse` is for rows whose protocol writes errors in a shape of its own, which `refusal` describes. What `streams`
    may answer with server-sent events instead of one message.
    """

    method: str
    path: str
    operation: Operation
    request: type[BaseModel] | None = None
    response: type[BaseModel] | None = None
    is_open: bool = False
    streams_body: bool = False
    refuse: Callable[[MintError], Response] | None = None
    refusal: type[BaseModel] | None = None
    streams: bool = False


def answer(message: BaseModel, *, status: int = 200) -> Response:
    """A message as JSON."""
    return answer_json(wire.encode(message), status=status)


def answer_json(body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Bytes that are JSON already."""
    return Response(body, status_code=status, media_type=wire.MEDIA_TYPE, headers=headers)

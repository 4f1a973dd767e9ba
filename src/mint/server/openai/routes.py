"""The routes of OpenAI's protocol, below `/v1` and, as Tinker and MinT have them, below `/oai/api/v1`.

Completions leave whole, or as server-sent events while they are sampled. A client that goes away ends its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

import mint.wire as wire
from mint.errors import MintError, OverloadedError, RequestCancelledError
from mint.server.http.route_table import Call, Operation, RouteRow
from mint.server.openai.completions import Order, Piece, order_chat, order_completion, pieces
from mint.server.openai.messages import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    ErrorBody,
    Model,
    ModelList,
)
from mint.server.openai.models import find_model, list_models
from mint.server.openai.responses import ChatWriter, CompletionWriter, describe_error
from mint.types import invalid_request

PREFIXES = ("/v1", "/oai/api/v1")
RETRY_AFTER_S = 1

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
Writer = CompletionWriter | ChatWriter


def models(call: Call) -> Response:
    """Everything that the caller can sample from by name: bases, training runs, checkpoints."""
    return _respond(ModelList(data=list_models(call.service, call.caller)))


def model(call: Call) -> Response:
    """One of them."""
    return _respond(find_model(call.service, call.caller, call.request.path_params["model"]))


async def completions(call: Call) -> Response:
    """Continues text or token ids; with `stream`, as server-sent events."""
    request = await call.run_blocking(_read, CompletionRequest, call.body)
    order = await call.run_blocking(order_completion, call.service, call.caller, request)
    return await _carry_out(
        call, order, CompletionWriter(request, order), stream=request.stream, usage=request.wants_usage
    )


async def chat_completions(call: Call) -> Response:
    """The next message of a conversation; with `stream`, as server-sent events."""
    request = await call.run_blocking(_read, ChatRequest, call.body)
    order = await call.run_blocking(order_chat, call.service, call.caller, request)
    return await _carry_out(call, order, ChatWriter(request, order), stream=request.stream, usage=request.wants_usage)


async def _carry_out(call: Call, order: Order, writer: Writer, *, stream: bool, usage: bool) -> Response:
    source = pieces(call.service, order, live=stream)
    if not stream:
        return _respond(await _unless_client_leaves(call.request, _whole(source, writer)))
    # what is refused is refused with its status, before a stream begins
    first = await _unless_client_leaves(call.request, anext(source))
    return StreamingResponse(_events(source, first, writer, usage=usage), media_type="text/event-stream")


async def _whole(source: AsyncGenerator[Piece], writer: Writer) -> BaseModel:
    async with aclosing(source):
        return writer.whole([_noted(writer, piece) async for piece in source])


async def _unless_client_leaves(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result; a client that goes away before it is there ends the work.

    Raises:
        RequestCancelledError: it has gone away.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise RequestCancelledError("the client went away")
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(source: AsyncGenerator[Piece], first: Piece, writer: Writer, *, usage: bool) -> AsyncGenerator[bytes]:
    """Server-sent events; an error in the midst is one, too. Leaving early cancels the samples."""
    opened: set[int] = set()
    async with aclosing(source):
        try:
            async for piece in _chain(first, source):
                if isinstance(writer, ChatWriter) and piece.choice not in opened:
                    opened.add(piece.choice)
                    yield _event(writer.first(piece.choice))
                event = writer.event(_noted(writer, piece))
                if event is not None:
                    yield _event(event)
            if usage:
                yield _event(writer.last())
        except MintError as error:
            yield _event(describe_error(error))
        yield b"data: [DONE]\n\n"


async def _chain(first: Piece, rest: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    yield first
    async for piece in rest:
        yield piece


def _noted(writer: Writer, piece: Piece) -> Piece:
    writer.counts.note(piece)
    return piece


def _read(kind: type[M], body: bytes) -> M:
    """Not by `wire.decode`: whoever speaks this protocol sends fields that nobody knows, and need not be logged."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid_request(error, kind.__name__) from error


def _event(message: BaseModel) -> bytes:
    return b"data: " + message.model_dump_json().encode() + b"\n\n"


def _respond(message: BaseModel) -> Response:
    return Response(message.model_dump_json().encode(), media_type=wire.MEDIA_TYPE)


def refuse(error: MintError) -> Response:
    """An error as clients of OpenAI's protocol read it."""
    response = Response(
        describe_error(error).model_dump_json().encode(), status_code=error.status, media_type=wire.MEDIA_TYPE
    )
    if isinstance(error, OverloadedError):
        response.headers["retry-after"] = str(RETRY_AFTER_S)
    return response


def _row(
    method: str,
    path: str,
    operation: Operation,
    response: type[BaseModel],
    request: type[BaseModel] | None = None,
) -> RouteRow:
    return RouteRow(
        method, path, operation, request, response, refuse=refuse, refusal=ErrorBody, streams=request is not None
    )


ROUTES: tuple[RouteRow, ...] = tuple(
    row
    for prefix in PREFIXES
    for row in (
        _row("GET", f"{prefix}/models", models, ModelList),
        _row("GET", f"{prefix}/models/{{model:path}}", model, Model),
        _row("POST", f"{prefix}/completions", completions, Completion, CompletionRequest),
        _row("POST", f"{prefix}/chat/completions", chat_completions, ChatCompletion, ChatRequest),
    )
)

"""The routes of OpenAI's protocol, below `/v1` and, as Tinker and MinT have them, below `/oai/api/v1`.

A completion is sent whole, or as server-sent events while it is sampled. If the client disconnects, its request is
cancelled.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.responses import Response, StreamingResponse

import mint.wire as wire
from mint.errors import MintError, OverloadedError
from mint.server.http.bodies import unless_client_leaves
from mint.server.http.route_table import Call, Operation, RouteRow
from mint.server.openai.generation import ChoiceDelta, generate
from mint.server.openai.generation_requests import GenerationRequest, read_chat, read_completion
from mint.server.openai.models import find_model, list_models
from mint.server.openai.responses import ChatWriter, CompletionWriter, describe_error
from mint.server.openai.schemas import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizedText,
    DetokenizeRequest,
    ErrorBody,
    ModelCard,
    ModelList,
    TokenizedText,
    TokenizeRequest,
)
from mint.server.openai.tokens import detokenize, tokenize
from mint.types import invalid_request

PREFIXES = ("/v1", "/oai/api/v1")

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
    generation = await call.run_blocking(read_completion, call.service, call.caller, request)
    return await _send(
        call, generation, CompletionWriter(request, generation), stream=request.stream, usage=request.wants_usage
    )


async def chat_completions(call: Call) -> Response:
    """The next message of a conversation; with `stream`, as server-sent events."""
    request = await call.run_blocking(_read, ChatRequest, call.body)
    generation = await call.run_blocking(read_chat, call.service, call.caller, request)
    return await _send(
        call, generation, ChatWriter(request, generation), stream=request.stream, usage=request.wants_usage
    )


async def tokens_of_text(call: Call) -> Response:
    """The tokens of a text or a conversation."""
    request = await call.run_blocking(_read, TokenizeRequest, call.body)
    return _respond(await call.run_blocking(tokenize, call.service, call.caller, request))


async def text_of_tokens(call: Call) -> Response:
    """The text of tokens."""
    request = await call.run_blocking(_read, DetokenizeRequest, call.body)
    return _respond(await call.run_blocking(detokenize, call.service, call.caller, request))


async def _send(call: Call, generation: GenerationRequest, writer: Writer, *, stream: bool, usage: bool) -> Response:
    source = generate(call.service, generation, live=stream)
    if not stream:
        return _respond(await unless_client_leaves(call.request, _whole(source, writer)))
    # errors before the first token have a status of their own, so the stream begins after it
    first = await unless_client_leaves(call.request, anext(source))
    return StreamingResponse(_events(source, first, writer, usage=usage), media_type="text/event-stream")


async def _whole(source: AsyncGenerator[ChoiceDelta], writer: Writer) -> BaseModel:
    async with aclosing(source):
        return writer.whole([_counted(writer, delta) async for delta in source])


async def _events(
    source: AsyncGenerator[ChoiceDelta], first: ChoiceDelta, writer: Writer, *, usage: bool
) -> AsyncGenerator[bytes]:
    """Server-sent events; an error after the first token is an event, too."""
    started: set[int] = set()
    async with aclosing(source):
        try:
            async for delta in _chain(first, source):
                if isinstance(writer, ChatWriter) and delta.choice not in started:
                    started.add(delta.choice)
                    yield _event(writer.first(delta.choice))
                event = writer.event(_counted(writer, delta))
                if event is not None:
                    yield _event(event)
            if usage:
                yield _event(writer.last())
        except MintError as error:
            yield _event(describe_error(error))
        yield b"data: [DONE]\n\n"


async def _chain(first: ChoiceDelta, rest: AsyncIterator[ChoiceDelta]) -> AsyncIterator[ChoiceDelta]:
    yield first
    async for delta in rest:
        yield delta


def _counted(writer: Writer, delta: ChoiceDelta) -> ChoiceDelta:
    writer.counts.add(delta)
    return delta


def _read(kind: type[M], body: bytes) -> M:
    """Not by `wire.decode`, which logs unknown fields: clients of this protocol send many."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid_request(error, kind.__name__) from error


def _event(message: BaseModel) -> bytes:
    return b"data: " + message.model_dump_json().encode() + b"\n\n"


def _respond(message: BaseModel) -> Response:
    return Response(message.model_dump_json().encode(), media_type=wire.MEDIA_TYPE)


def refuse(error: MintError) -> Response:
    """An error in OpenAI's shape."""
    response = Response(
        describe_error(error).model_dump_json().encode(), status_code=error.status, media_type=wire.MEDIA_TYPE
    )
    if isinstance(error, OverloadedError):
        response.headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return response


def _row(
    method: str,
    path: str,
    operation: Operation,
    response: type[BaseModel],
    request: type[BaseModel] | None = None,
) -> RouteRow:
    return RouteRow(
        method,
        path,
        operation,
        request,
        response,
        refuse=refuse,
        refusal=ErrorBody,
        streams=operation in (completions, chat_completions),
        waits_for_disk=False,
    )


ROUTES: tuple[RouteRow, ...] = (
    _row("POST", "/tokenize", tokens_of_text, TokenizedText, TokenizeRequest),
    _row("POST", "/detokenize", text_of_tokens, DetokenizedText, DetokenizeRequest),
    *(
        row
        for prefix in PREFIXES
        for row in (
            _row("GET", f"{prefix}/models", models, ModelList),
            _row("GET", f"{prefix}/models/{{model:path}}", model, ModelCard),
            _row("POST", f"{prefix}/completions", completions, Completion, CompletionRequest),
            _row("POST", f"{prefix}/chat/completions", chat_completions, ChatCompletion, ChatRequest),
        )
    ),
)

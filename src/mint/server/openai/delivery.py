"""Sends a generated reply: whole, or as server-sent events while it is sampled.

If the client disconnects, or its key is revoked, its request is cancelled. A writer gives the messages their form.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import Protocol

from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse

import mint.wire as wire
from mint.errors import MintError, OverloadedError
from mint.server.http.bodies import unless_client_leaves
from mint.server.http.route_table import Call
from mint.server.openai.generation import ChoiceDelta, generate
from mint.server.openai.generation_requests import GenerationRequest

END_OF_STREAM = b"data: [DONE]\n\n"


class ReplyWriter(Protocol):
    """Writes one reply in the form of a protocol. It gets every delta, in order."""

    def whole(self, deltas: list[ChoiceDelta]) -> BaseModel:
        """The whole response."""
        ...

    def events(self, delta: ChoiceDelta) -> Iterator[bytes]:
        """The events of a stream for the next delta; before the first, those that begin the stream."""
        ...

    def end(self) -> Iterator[bytes]:
        """The events that end a stream."""
        ...

    def fail(self, error: MintError) -> Iterator[bytes]:
        """The events that end a stream with an error."""
        ...


def respond(message: BaseModel) -> Response:
    """A message as a response."""
    return Response(message.model_dump_json().encode(), media_type=wire.MEDIA_TYPE)


def respond_error(error: MintError, body: BaseModel) -> Response:
    """An error as a response, in the form that a protocol gives it."""
    response = Response(body.model_dump_json().encode(), status_code=error.status, media_type=wire.MEDIA_TYPE)
    if isinstance(error, OverloadedError):
        response.headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return response


def event(message: BaseModel, *, name: str | None = None) -> bytes:
    """A message as one server-sent event."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + message.model_dump_json().encode() + b"\n\n"


async def deliver(call: Call, generation: GenerationRequest, writer: ReplyWriter, *, stream: bool) -> Response:
    """Samples, and sends what the writer writes.

    Raises:
        MintError: what the sampling failed with, in a stream only before the first token.
    """
    source = generate(call.service, generation, live=stream, run_blocking=call.run_blocking)
    with call.use_key() as key, key.waiting():
        if not stream:
            return await unless_client_leaves(call.request, _whole(call, source, writer))
        # errors before the first token have a status of their own, so the stream begins after it
        first = await unless_client_leaves(call.request, anext(source))
    return StreamingResponse(_events(call, source, first, writer), media_type="text/event-stream")


async def _whole(call: Call, source: AsyncGenerator[ChoiceDelta], writer: ReplyWriter) -> Response:
    async with aclosing(source):
        deltas = [delta async for delta in source]
    return await call.run_blocking(lambda: respond(writer.whole(deltas)))


async def _events(
    call: Call, source: AsyncGenerator[ChoiceDelta], first: ChoiceDelta, writer: ReplyWriter
) -> AsyncIterator[bytes]:
    async with aclosing(source):
        try:
            with call.use_key() as key:
                for written in writer.events(first):
                    yield written
                async for delta in source:
                    key.require_valid()
                    for written in writer.events(delta):
                        yield written
        except MintError as error:
            for written in writer.fail(error):
                yield written
            return
        for written in writer.end():
            yield written

"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from functools import partial

from starlette.responses import Response

from mint.server.http.route_table import Call, RouteRow
from mint.server.messages_api.conversation import read_message_request
from mint.server.messages_api.errors import refuse
from mint.server.messages_api.schemas import (
    MessageError,
    MessagesRequest,
    ReplyMessage,
    TokenCount,
    TokenCountRequest,
)
from mint.server.messages_api.writer import MessageWriter
from mint.server.openai.delivery import deliver, respond
from mint.server.openai.routes import PREFIXES
from mint.server.strict_fields import read_json


async def messages(call: Call) -> Response:
    """The next message of a conversation; with `stream`, as server-sent events."""
    request = await call.run_blocking(read_json, MessagesRequest, call.body)
    generation = await call.run_blocking(read_message_request, call.service, call.caller, request)
    return await deliver(call, generation, MessageWriter(request, generation), stream=request.stream)


async def count_tokens(call: Call) -> Response:
    """The number of tokens of a conversation."""
    request = await call.run_blocking(read_json, TokenCountRequest, call.body)
    generation = await call.run_blocking(read_message_request, call.service, call.caller, request)
    return respond(TokenCount(input_tokens=len(generation.prompts[0])))


_row = partial(RouteRow, "POST", refuse=refuse, refusal=MessageError, waits_for_disk=False)

ROUTES: tuple[RouteRow, ...] = tuple(
    row
    for prefix in PREFIXES
    for row in (
        _row(f"{prefix}/messages", messages, MessagesRequest, ReplyMessage, streams=True),
        _row(f"{prefix}/messages/count_tokens", count_tokens, TokenCountRequest, TokenCount),
    )
)

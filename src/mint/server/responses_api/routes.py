"""The routes of OpenAI's Responses API. No response is stored, so there are no routes to read or delete one."""

from __future__ import annotations

from functools import partial

from starlette.responses import Response

from mint.server.http.route_table import Call, RouteRow
from mint.server.openai.delivery import deliver, respond
from mint.server.openai.errors import refuse
from mint.server.openai.routes import PREFIXES
from mint.server.openai.schemas import ErrorBody
from mint.server.responses_api.conversation import read_response_request
from mint.server.responses_api.schemas import InputTokens, InputTokensRequest, ModelResponse, ResponsesRequest
from mint.server.responses_api.writer import ResponseWriter
from mint.server.strict_fields import read_json


async def responses(call: Call) -> Response:
    """The next message, or the next calls, of a conversation; with `stream`, as server-sent events."""
    request = await call.run_blocking(read_json, ResponsesRequest, call.body)
    generation = await call.run_blocking(read_response_request, call.service, call.caller, request)
    return await deliver(call, generation, ResponseWriter(request, generation), stream=request.stream)


async def input_tokens(call: Call) -> Response:
    """The number of tokens of a conversation."""
    request = await call.run_blocking(read_json, InputTokensRequest, call.body)
    generation = await call.run_blocking(read_response_request, call.service, call.caller, request)
    return respond(InputTokens(input_tokens=len(generation.prompts[0])))


_row = partial(RouteRow, "POST", refuse=refuse, refusal=ErrorBody, waits_for_disk=False)

ROUTES: tuple[RouteRow, ...] = tuple(
    row
    for prefix in PREFIXES
    for row in (
        _row(f"{prefix}/responses", responses, ResponsesRequest, ModelResponse, streams=True),
        _row(f"{prefix}/responses/input_tokens", input_tokens, InputTokensRequest, InputTokens),
    )
)

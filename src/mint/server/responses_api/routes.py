"""The route of OpenAI's Responses API. No response is stored, so there are no routes to read or delete one."""

from __future__ import annotations

from starlette.responses import Response

from mint.server.http.route_table import Call, RouteRow
from mint.server.openai.delivery import deliver
from mint.server.openai.errors import refuse
from mint.server.openai.routes import PREFIXES
from mint.server.openai.schemas import ErrorBody
from mint.server.responses_api.conversation import read_response_request
from mint.server.responses_api.schemas import ModelResponse, ResponsesRequest
from mint.server.responses_api.writer import ResponseWriter
from mint.server.strict_fields import read_json


async def responses(call: Call) -> Response:
    """The next message, or the next calls, of a conversation; with `stream`, as server-sent events."""
    request = await call.run_blocking(read_json, ResponsesRequest, call.body)
    generation = await call.run_blocking(read_response_request, call.service, call.caller, request)
    return await deliver(call, generation, ResponseWriter(request, generation), stream=request.stream)


ROUTES: tuple[RouteRow, ...] = tuple(
    RouteRow(
        "POST",
        f"{prefix}/responses",
        responses,
        ResponsesRequest,
        ModelResponse,
        refuse=refuse,
        refusal=ErrorBody,
        streams=True,
        waits_for_disk=False,
    )
    for prefix in PREFIXES
)

"""The routes of OpenAI's protocol, below `/v1` and, as Tinker and MinT have them, below `/oai/api/v1`."""

from __future__ import annotations

from pydantic import BaseModel
from starlette.responses import Response

from mint.server.http.route_table import Call, Operation, RouteRow
from mint.server.openai.delivery import deliver, respond
from mint.server.openai.errors import refuse
from mint.server.openai.generation_requests import read_chat, read_completion
from mint.server.openai.models import find_model, list_models
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
from mint.server.openai.writers import ChatWriter, CompletionWriter
from mint.server.strict_fields import read_json

PREFIXES = ("/v1", "/oai/api/v1")


def models(call: Call) -> Response:
    """Everything that the caller can sample from by name: bases, training runs, checkpoints."""
    return respond(ModelList(data=list_models(call.service, call.caller)))


def model(call: Call) -> Response:
    """One of them."""
    return respond(find_model(call.service, call.caller, call.request.path_params["model"]))


async def completions(call: Call) -> Response:
    """Continues text or token ids; with `stream`, as server-sent events."""
    request = await call.run_blocking(read_json, CompletionRequest, call.body)
    generation = await call.run_blocking(read_completion, call.service, call.caller, request)
    return await deliver(call, generation, CompletionWriter(request, generation), stream=request.stream)


async def chat_completions(call: Call) -> Response:
    """The next message of a conversation; with `stream`, as server-sent events."""
    request = await call.run_blocking(read_json, ChatRequest, call.body)
    generation = await call.run_blocking(read_chat, call.service, call.caller, request)
    return await deliver(call, generation, ChatWriter(request, generation), stream=request.stream)


async def tokens_of_text(call: Call) -> Response:
    """The tokens of a text or a conversation."""
    request = await call.run_blocking(read_json, TokenizeRequest, call.body)
    return respond(await call.run_blocking(tokenize, call.service, call.caller, request))


async def text_of_tokens(call: Call) -> Response:
    """The text of tokens."""
    request = await call.run_blocking(read_json, DetokenizeRequest, call.body)
    return respond(await call.run_blocking(detokenize, call.service, call.caller, request))


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

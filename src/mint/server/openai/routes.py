"""The routes of OpenAI's protocol, below `/v1` and, as Tinker and MinT have them, below `/oai/api/v1`."""

from __future__ import annotations

from pydantic import BaseModel
from starlette.responses import PlainTextResponse, Response

from mint.errors import NotFoundError
from mint.server.http.route_table import Call, Operation, RouteRow
from mint.server.openai.delivery import deliver, respond
from mint.server.openai.errors import refuse
from mint.server.openai.generation_requests import read_chat, read_completion
from mint.server.openai.lora_adapters import load_lora, unload_lora
from mint.server.openai.models import find_model, list_models
from mint.server.openai.schemas import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizedText,
    DetokenizeRequest,
    ErrorBody,
    LoadLoraRequest,
    ModelCard,
    ModelList,
    TokenizedText,
    TokenizeRequest,
    UnloadLoraRequest,
)
from mint.server.openai.tokens import detokenize, tokenize
from mint.server.openai.writers import ChatWriter, CompletionWriter
from mint.server.strict_fields import read_json

PREFIXES = ("/v1", "/oai/api/v1")

_ONLY_TEXT = "Use another server: only text goes in and out here"
_NO_FILES = "Send the data with each request: no files are stored"
_NO_STATE = "Send the whole conversation with each request: none is stored"

NOT_OFFERED = {
    "assistants": _NO_STATE,
    "audio/speech": _ONLY_TEXT,
    "audio/transcriptions": _ONLY_TEXT,
    "audio/translations": _ONLY_TEXT,
    "batches": "Send the requests at once: they are sampled in one batch",
    "conversations": _NO_STATE,
    "embeddings": "Use another server: the models here continue texts",
    "files": _NO_FILES,
    "fine_tuning/jobs": "Train with the SDK (docs/sdk.md) or `mint train`",
    "images/edits": _ONLY_TEXT,
    "images/generations": _ONLY_TEXT,
    "images/variations": _ONLY_TEXT,
    "moderations": "Check the text on your side",
    "rerank": "Use another server: the models here continue texts",
    "score": "Use another server: the models here continue texts",
    "threads": _NO_STATE,
    "uploads": _NO_FILES,
    "vector_stores": _NO_FILES,
    "videos": _ONLY_TEXT,
}
"""Routes of OpenAI's protocol and of vLLM that are refused by name, and what to do instead."""


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


async def load_lora_adapter(call: Call) -> Response:
    """Gives a name to a checkpoint: it is a `model` from then on."""
    request = await call.run_blocking(read_json, LoadLoraRequest, call.body)
    return PlainTextResponse(await call.run_blocking(load_lora, call.service, call.caller, request))


async def unload_lora_adapter(call: Call) -> Response:
    """Takes a name back; the checkpoint stays."""
    request = await call.run_blocking(read_json, UnloadLoraRequest, call.body)
    return PlainTextResponse(await call.run_blocking(unload_lora, call.service, call.caller, request))


def _row(
    method: str,
    path: str,
    operation: Operation,
    response: type[BaseModel] | None,
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


def _not_offered(path: str, remedy: str) -> RouteRow:
    """A route that other servers of this protocol have, and this one has not; says what to do instead."""

    def operation(_call: Call) -> Response:
        raise NotFoundError("is not offered by this server", field="path", value=path, remedy=remedy)

    operation.__doc__ = f"Not offered: always 404. {remedy}."
    return _row("POST", path, operation, None)


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
            _row("POST", f"{prefix}/load_lora_adapter", load_lora_adapter, None, LoadLoraRequest),
            _row("POST", f"{prefix}/unload_lora_adapter", unload_lora_adapter, None, UnloadLoraRequest),
            *(_not_offered(f"{prefix}/{path}", remedy) for path, remedy in NOT_OFFERED.items()),
        )
    ),
)

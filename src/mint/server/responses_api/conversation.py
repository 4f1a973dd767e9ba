"""A request of the Responses API as a chat request: the same conversation for the same chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mint.server.callers import Caller
from mint.server.openai.generation_requests import GenerationRequest, read_chat
from mint.server.openai.schemas import (
    ChatMessage,
    ChatRequest,
    ChatTool,
    ChatToolCall,
    FunctionCall,
    FunctionDefinition,
    SamplingOptions,
)
from mint.server.responses_api.schemas import (
    LOGPROBS,
    AllowedTools,
    FunctionCallItem,
    FunctionOutputItem,
    InputItem,
    InputMessage,
    InputTokensRequest,
    NamedFunction,
    ResponsesRequest,
    TextPart,
)
from mint.server.service.service import Service
from mint.server.strict_fields import read_fields


def read_response_request(service: Service, caller: Caller, request: InputTokensRequest) -> GenerationRequest:
    """Reads a request; slow (tokenizer).

    Raises:
        NotFoundError: there is no such model for this caller.
        InvalidRequestError: the model has no chat template, or it cannot render the conversation.
    """
    return read_chat(service, caller, chat_request(request), format_name="text.format")


def chat_request(request: InputTokensRequest) -> ChatRequest:
    """The same request as `/v1/chat/completions` would have it."""
    messages = [] if request.instructions is None else [ChatMessage(role="system", content=request.instructions)]
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": [*messages, *_messages(request.input)],
        "tools": [_tool(tool.name, tool.description, tool.parameters) for tool in request.offered_tools],
        "tool_choice": _tool_choice(request),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _response_format(request),
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    if isinstance(request, ResponsesRequest):
        fields |= {name: getattr(request, name) for name in SamplingOptions.model_fields}
        fields["max_completion_tokens"] = request.max_output_tokens
        fields["logprobs"] = LOGPROBS in request.include
        fields["top_logprobs"] = request.top_logprobs
    return read_fields(ChatRequest, fields)


def _messages(items: Sequence[InputItem]) -> list[ChatMessage]:
    """A call belongs to the assistant's message before it, if there is one: the model wrote both in one turn."""
    messages: list[ChatMessage] = []
    for item in items:
        if isinstance(item, InputMessage):
            messages.append(ChatMessage(role=item.role, content=_text(item.content)))
        elif isinstance(item, FunctionOutputItem):
            told = ChatMessage(role="tool", tool_call_id=item.call_id, content=_text(item.output), name=item.name)
            messages.append(told)
        else:
            call = _call(item)
            last = messages[-1] if messages else None
            if last is not None and last.role == "assistant":
                calls = [*(last.tool_calls or ()), call]
                messages[-1] = last.model_copy(update={"tool_calls": calls})
            else:
                messages.append(ChatMessage(role="assistant", tool_calls=[call]))
    return messages


def _text(parts: Sequence[TextPart]) -> str:
    return "".join(part.text for part in parts)


def _call(item: FunctionCallItem) -> ChatToolCall:
    return ChatToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))


def _tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> ChatTool:
    function = FunctionDefinition(name=name, description=description, parameters=parameters)
    return ChatTool(type="function", function=function)


def _tool_choice(request: InputTokensRequest) -> Any:
    choice = request.tool_choice
    if isinstance(choice, NamedFunction):
        return {"type": "function", "function": {"name": choice.name}}
    return choice.mode if isinstance(choice, AllowedTools) else choice


def _response_format(request: InputTokensRequest) -> Any:
    wanted = request.text.format
    if wanted.type == "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}
    return {"type": wanted.type}

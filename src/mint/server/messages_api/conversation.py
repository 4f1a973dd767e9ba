"""A request of the Messages API as a chat request: the same conversation for the same chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from mint.server.callers import Caller
from mint.server.messages_api.schemas import (
    InputTurn,
    MessagesRequest,
    TextBlock,
    TokenCountRequest,
    ToolResultBlock,
    ToolUseBlock,
)
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
from mint.server.service.service import Service
from mint.server.strict_fields import read_fields

ERROR_MARK = "Error: "
"""Before the text of a tool's result that is an error: chat templates have no mark for it."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def read_message_request(service: Service, caller: Caller, request: TokenCountRequest) -> GenerationRequest:
    """Reads a request; slow (tokenizer).

    Raises:
        NotFoundError: there is no such model for this caller.
        InvalidRequestError: the model has no chat template, or it cannot render the conversation.
    """
    return read_chat(service, caller, chat_request(request), format_name="output_config.format")


def chat_request(request: TokenCountRequest) -> ChatRequest:
    """The same request as `/v1/chat/completions` would have it."""
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": [*_system(request.system), *(each for turn in request.messages for each in _messages(turn))],
        "tools": [
            ChatTool(
                type="function",
                function=FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.input_schema),
            )
            for tool in request.tools
        ],
        "tool_choice": _tool_choice(request),
        "parallel_tool_calls": not request.tool_choice.disable_parallel_tool_use,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    wanted = request.output_config.format
    if wanted is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}
    if isinstance(request, MessagesRequest):
        fields |= {name: getattr(request, name) for name in SamplingOptions.model_fields}
        fields["stop"] = [*request.stop_strings, *request.stop_sequences]
        fields["max_tokens"] = request.max_tokens
    return read_fields(ChatRequest, fields)


def _system(texts: Sequence[TextBlock]) -> list[ChatMessage]:
    return [ChatMessage(role="system", content=_text(texts))] if texts else []


def _messages(turn: InputTurn) -> Iterator[ChatMessage]:
    """A turn as messages: each result of a tool is one, and so are the texts between them."""
    texts: list[TextBlock] = []
    calls: list[ChatToolCall] = []
    results = 0
    for block in turn.content:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolUseBlock):
            arguments = json.dumps(block.input, ensure_ascii=False)
            calls.append(ChatToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=arguments)))
        else:
            if texts:
                yield ChatMessage(role=turn.role, content=_text(texts))
            texts = []
            results += 1
            yield _result(block)
    if texts or calls or not results:
        yield ChatMessage(role=turn.role, content=_text(texts), tool_calls=calls or None)


def _result(block: ToolResultBlock) -> ChatMessage:
    mark = ERROR_MARK if block.is_error else ""
    return ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=mark + _text(block.content))


def _text(texts: Sequence[TextBlock]) -> str:
    return "".join(text.text for text in texts)


def _tool_choice(request: TokenCountRequest) -> Any:
    choice = request.tool_choice
    if choice.name is not None:
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]

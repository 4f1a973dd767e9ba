"""Conversations as the model's own chat template writes them.

A template that came with mint is rendered here. Any other may be a stranger's program, and is rendered in a process
beside the server (`rendering_process.py`), with limits on time, memory and the length of the text.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from queue import LifoQueue
from typing import Any

from mint.errors import InvalidRequestError, OverloadedError
from mint.models.registry import BUNDLED
from mint.server.child_process import ChildProcess
from mint.server.openai.schemas import ChatMessage, ChatRequest, ChatTool
from mint.tokenizer import load_tokenizer
from mint.types.tool_call_formats import tool_call_format
from mint.types.tool_call_formats.messages import with_known_ids, with_text_arguments

LIMIT_S = 10.0
"""A template that takes longer is stopped; an honest one takes milliseconds."""

MAX_MEMORY_BYTES = 512 << 20
"""What the conversation and the template may take together."""

MAX_CHARACTERS = 16 << 20
"""A rendered conversation may have so many: several times what the longest contexts hold."""

MAX_ANSWER_BYTES = 12 * MAX_CHARACTERS
"""An answer in bytes: as JSON, a character takes at most 12."""

PROCESSES = 2
"""So that others are rendered while one template takes its time."""

_ALTERNATIVE = "Use another model, or /v1/completions with a prompt of your own"


def render_conversation(tokenizer: Any, request: ChatRequest, *, limit_s: float = LIMIT_S) -> str:
    """The text of the prompt.

    Raises:
        InvalidRequestError: the model has no chat template, or it cannot render the conversation within the limits.
        OverloadedError: the machine cannot start a process.
    """
    if tokenizer.chat_template is None:
        remedy = "Use /v1/completions, or a model whose folder has a chat template"
        raise InvalidRequestError("has no chat template", field="model", value=request.model, remedy=remedy)
    taken = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in request.chat_template_kwargs:
        if name in taken or name == "messages":
            remedy = "Pass only what the template itself reads, such as enable_thinking"
            raise InvalidRequestError("is not for templates", field="chat_template_kwargs", value=name, remedy=remedy)
    messages = [_message(message) for message in request.messages]
    tools = [tool.model_dump(exclude_none=True) for tool in request.offered_tools] or None
    variables = request.chat_template_kwargs
    try:
        template = template_text(tokenizer, request.offered_tools)
        if template in _bundled_templates():
            return tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **variables
            )
        written_as = tool_call_format(template, tokenizer.get_added_vocab())
        task = {
            "template": template,
            "conversation": with_known_ids(messages, written_as),
            "tools": tools,
            "variables": {**tokenizer.special_tokens_map, **variables},
        }
        found = _render_beside(task, limit_s)
        if "error" in found and any("tool_calls" in message for message in messages):
            # some templates, as DeepSeek V3's, take the arguments of calls as JSON in texts
            retried = _render_beside({**task, "conversation": with_text_arguments(task["conversation"])}, limit_s)
            found = found if "error" in retried else retried
    except OverloadedError:
        raise
    except Exception as error:  # the boundary: the conversation is the caller's, and a template may raise anything
        raise _refusal(request, str(error)) from error
    if "excess" in found:
        problem = f"has a chat template that takes {found['excess']}"
        raise InvalidRequestError(problem, field="model", value=request.model, remedy=_ALTERNATIVE)
    if "error" in found:
        raise _refusal(request, found["error"])
    return found["text"]


def template_text(tokenizer: Any, tools: Sequence[ChatTool]) -> str:
    """The template that renders a conversation; a model may have one of its own for conversations with tools."""
    return tokenizer.get_chat_template(tools=[tool.model_dump(exclude_none=True) for tool in tools] or None)


def _refusal(request: ChatRequest, reason: str) -> InvalidRequestError:
    roles = [message.role for message in request.messages]
    remedy = "Use roles and an order of them that the model's chat template knows"
    problem = f"cannot be rendered by the model's chat template ({reason})"
    return InvalidRequestError(problem, field="messages", value=roles, remedy=remedy)


@cache
def _bundled_templates() -> frozenset[str]:
    return frozenset(load_tokenizer(str(folder), name).chat_template for name, folder in BUNDLED.items())


@cache
def _free_processes() -> LifoQueue[ChildProcess]:
    """The processes of this process; the one that rendered last comes first, so that few are started."""
    free: LifoQueue[ChildProcess] = LifoQueue()
    for _ in range(PROCESSES):
        free.put(ChildProcess("mint.server.openai.rendering_process", str(MAX_MEMORY_BYTES), str(MAX_CHARACTERS)))
    return free


def _render_beside(task: dict[str, Any], limit_s: float) -> dict[str, str]:
    """What `rendering_process.render` says."""
    message = json.dumps(task).encode()
    process = _free_processes().get()
    try:
        try:
            process.start()
        except (EOFError, OSError) as error:
            process.close()
            problem = f"the process that renders chat templates cannot be started: {error}"
            raise OverloadedError(problem, remedy="Try again in a minute") from error
        for _ in range(2):  # it may have been ended just before
            with suppress(EOFError, OSError):
                answer = process.ask([message], 1, limit_s=limit_s, max_bytes=MAX_ANSWER_BYTES)
                if answer is None:
                    process.close()
                    return {"excess": f"more than {limit_s:g} s"}
                found: dict[str, str] = json.loads(answer[0])
                if "excess" in found:
                    process.close()  # what it has taken is free again
                return found
            process.close()
        return {"excess": "the process down that renders it"}
    finally:
        _free_processes().put(process)


def _message(message: ChatMessage) -> dict[str, Any]:
    """Converts a message for the chat template: one text, and the arguments of calls as objects."""
    shown: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": message.text}
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.tool_calls is not None:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return shown


def _arguments(text: str) -> Any:
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):  # the model's own words: templates write texts as they stand
        return text
    return arguments if isinstance(arguments, dict) else text

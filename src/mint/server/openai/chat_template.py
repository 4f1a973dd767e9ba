"""Conversations as the model's own chat template writes them.

A template comes with the model, so it may be a stranger's program. Transformers renders it in jinja's sandbox: it
cannot import, read files, or reach the attributes of Python's objects. Here its time is limited. Its memory is not.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from mint.errors import InvalidRequestError
from mint.server.openai.schemas import ChatMessage, ChatRequest

LIMIT_S = 10.0
"""A template that takes longer is stopped; an honest one takes milliseconds."""


class _TooSlow(BaseException):
    """Raised inside the template. Not an `Exception`, so that nothing on the way handles it."""


def render_conversation(tokenizer: Any, request: ChatRequest, *, limit_s: float = LIMIT_S) -> str:
    """The text of the prompt.

    Raises:
        InvalidRequestError: the model has no chat template, or it cannot render the conversation in the time.
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

    def render() -> str:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **request.chat_template_kwargs
        )

    rendered = _run_within(limit_s, render)
    if rendered is None:
        remedy = "Use another model, or /v1/completions with a prompt of your own"
        problem = f"has a chat template that takes more than {limit_s:g} s"
        raise InvalidRequestError(problem, field="model", value=request.model, remedy=remedy)
    try:
        return rendered.result()
    except Exception as error:  # the boundary: a template is a program from elsewhere and may raise anything
        roles = [message.role for message in request.messages]
        remedy = "Use roles and an order of them that the model's chat template knows"
        raise InvalidRequestError(
            f"cannot be rendered by the model's chat template ({error})", field="messages", value=roles, remedy=remedy
        ) from error


def _run_within(limit_s: float, work: Callable[[], str]) -> Future[str] | None:
    """The outcome of `work`; None if it took too long. It is stopped then, at its next step in Python."""
    outcome: Future[str] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the boundary: whatever it is, it is the outcome
            outcome.set_exception(error)

    # A thread of its own: the exception that stops it may come late, and must not hit anything else.
    thread = threading.Thread(target=run, name="mint-template", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not thread.is_alive() or outcome.done():
        return outcome
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_TooSlow))
    return None


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

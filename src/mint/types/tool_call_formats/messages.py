"""A reply with tool calls, the results of tools, and tools themselves, as messages for chat templates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from mint.types.tool_call_formats.call import ToolCall, typed_arguments
from mint.types.tool_call_formats.mistral import MISTRAL_ID_LENGTH, is_mistral_id
from mint.types.tool_call_formats.syntax import ToolCallFormat, render_tool_calls

Properties = Mapping[str, Mapping[str, Any]]
"""Of each function, the schemas of its parameters."""


def properties_of(tools: Iterable[Mapping[str, Any]]) -> Properties:
    """From the JSON schemas of tools."""
    functions = [tool.get("function", tool) for tool in tools]
    return {
        str(function.get("name")): found if isinstance(found := _parameters(function).get("properties"), dict) else {}
        for function in functions
    }


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    found = function.get("parameters")
    return found if isinstance(found, Mapping) else {}


def structured_reply(
    calls: Sequence[ToolCall],
    *,
    text: str,
    reasoning: str,
    written_as: ToolCallFormat,
    properties: Properties,
    arguments: Literal["objects", "texts"],
) -> dict[str, Any]:
    """A reply as a message with `tool_calls`. Some templates take a call's arguments as an object, some as JSON in a
    text. A call that could not be read is one without arguments."""
    message: dict[str, Any] = {"role": "assistant", "content": f"{reasoning}{text}".strip()}
    if reasoning and written_as in ("harmony", "command"):  # their templates take reasoning in a field of its own
        said = text.strip() if written_as == "command" else ""  # GPT-OSS's refuses both at once
        message |= {"content": said, **dict.fromkeys(("thinking", "reasoning_content", "tool_plan"), reasoning)}
    return {**message, "tool_calls": [_entry(call, properties, arguments) for call in calls]}


def _entry(call: ToolCall, properties: Properties, arguments: Literal["objects", "texts"]) -> dict[str, Any]:
    given = dict(call.arguments or {})
    if call.as_texts:
        given = typed_arguments(given, properties.get(call.name, {}))
    written = given if arguments == "objects" else json.dumps(given, ensure_ascii=False)
    function = {"name": call.name or "unknown", "arguments": written}
    return {"id": call.id, "type": "function", "function": function}


def with_known_ids(messages: Sequence[Mapping[str, Any]], written_as: ToolCallFormat) -> list[dict[str, Any]]:
    """The messages with ids of calls that the template of a format takes: nine letters and digits for Mistral,
    `functions.NAME:NUMBER` for Kimi. A result gets the new id of its call."""
    known: dict[str, str] = {}
    shown: list[dict[str, Any]] = []
    for message in messages:
        changed = dict(message)
        if "tool_calls" in message:
            for call in message["tool_calls"]:
                known[call["id"]] = _known_id(call["id"], call["function"]["name"], len(known), written_as)
            changed["tool_calls"] = [{**call, "id": known[call["id"]]} for call in message["tool_calls"]]
        if "tool_call_id" in message:
            changed["tool_call_id"] = known.get(message["tool_call_id"], message["tool_call_id"])
        shown.append(changed)
    return shown


def with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of calls as JSON in texts, for templates that take no objects."""
    return [
        {**message, "tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": written}}


def _known_id(call_id: str, name: str, number: int, written_as: ToolCallFormat) -> str:
    if written_as == "kimi":
        return f"functions.{name}:{number}"
    if written_as not in ("mistral", "mistral_named") or is_mistral_id(call_id):
        return call_id
    return hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:MISTRAL_ID_LENGTH]


def results_as_user(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages without the role `tool`, for templates that do not know it: a result is what a user says, between
    `<tool_response>` and `</tool_response>`. What users say in a row becomes one message."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        shown = dict(message)
        if shown["role"] == "tool":
            shown = {"role": "user", "content": f"<tool_response>\n{shown['content']}\n</tool_response>"}
        if merged and merged[-1]["role"] == shown["role"] == "user":
            merged[-1]["content"] = f"{merged[-1]['content']}\n{shown['content']}"
        else:
            merged.append(shown)
    return merged


def description_of(tools: Sequence[Mapping[str, Any]], written_as: ToolCallFormat) -> str:
    """What a policy is told about its tools, and how to call them, where the chat template does not say it."""
    example = render_tool_calls([ToolCall("NAME", {"ARGUMENT": "VALUE"}, id="0")], written_as)
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions:\n<tools>\n{schemas}\n</tools>\n\n"
        f"To call one, write its name and its arguments as here:\n{example}"
    )


def with_system_text(conversation: Sequence[Mapping[str, Any]], text: str, *, has_system: bool) -> list[dict[str, Any]]:
    """The conversation with `text` at the end of its system message; without `has_system` (the template knows none),
    at the beginning of its first message."""
    first = dict(conversation[0]) if conversation else {"role": "system", "content": ""}
    rest = [dict(message) for message in conversation[1:]]
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}".strip()}, *rest]
    if has_system:
        return [{"role": "system", "content": text}, first, *rest]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *rest]

"""One tool call that was read from a reply, and the JSON in which most families write it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

MAX_CALL_DEPTH = 64


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the policy. `error` says what is wrong with its text; then the other fields may be empty.

    `as_texts`: the format writes every argument as text, whatever its type. `id` is what the policy wrote, or empty.
    """

    name: str = ""
    arguments: Mapping[str, Any] | None = None
    error: str | None = None
    as_texts: bool = False
    id: str = ""

    def to_message(self) -> dict[str, Any]:
        """The call as an entry of `tool_calls` in an assistant's message; without an id where there is none."""
        call = {"type": "function", "function": {"name": self.name, "arguments": dict(self.arguments or {})}}
        return {"id": self.id, **call} if self.id else call


class Reasoning(str):
    """Text of a reply that is reasoning."""

    __slots__ = ()


Part = str | ToolCall
"""What a format finds in a reply, in order: text, reasoning, or a call."""


def typed_arguments(texts: Mapping[str, Any], properties: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that were all written as texts, with the types of a schema's `properties`: the text of a number, a
    list, … is read as JSON. What is not JSON stays a text."""
    arguments: dict[str, Any] = {}
    for name, text in texts.items():
        arguments[name] = text
        schema = properties.get(name)
        if not isinstance(schema, dict) or schema.get("type") != "string":
            with suppress(ValueError, RecursionError, TypeError):
                arguments[name] = strict_json(text)
    return arguments


def json_calls(text: str) -> Iterator[ToolCall]:
    """Calls in JSON that follow one another, with `;`, commas or white space between them."""
    if not text.strip():
        yield ToolCall(error="the call is empty")
    position = skip(text, 0, " \t\r\n")
    while position < len(text):
        try:
            _, end = json.JSONDecoder().raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            yield ToolCall(error=f"the call is not JSON: {error}")
            return
        yield json_call(text[position:end])
        position = skip(text, end, " \t\r\n;,")


def skip(text: str, position: int, letters: str) -> int:
    """The first position from `position` on whose letter is none of `letters`."""
    while position < len(text) and text[position] in letters:
        position += 1
    return position


def listed_calls(text: str) -> Iterator[ToolCall]:
    """Calls in JSON: a list of them, or one."""
    try:
        calls = strict_json(text)
    except (ValueError, RecursionError) as error:
        yield ToolCall(error=f"the call is not JSON: {error}")
        return
    yield from map(call_of, calls if isinstance(calls, list) else [calls])


def json_call(text: str) -> ToolCall:
    """A call from the text of one object."""
    try:
        return call_of(strict_json(text))
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the call is not JSON: {error}")


def named_call(name: str, arguments: str, id: str = "") -> ToolCall:
    """A call whose name stands outside of its arguments, which are JSON. Empty arguments are none."""
    try:
        return call_of({"name": name, "arguments": strict_json(arguments) if arguments.strip() else {}, "id": id})
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the arguments of {name} are not JSON: {error}", id=id)


def call_of(call: Any) -> ToolCall:
    """A call from its JSON. Families name the function `name` or `tool_name`, its arguments `arguments` or
    `parameters`, which may be JSON in a text, and the id `id` or `tool_call_id`."""
    try:
        call = call["function"] if isinstance(call.get("function"), dict) else call
        name = call["name"] if "name" in call else call["tool_name"]
        arguments = call["parameters"] if "parameters" in call else call.get("arguments", {})
        arguments = strict_json(arguments) if isinstance(arguments, str) else arguments
        written_id = call.get("id", call.get("tool_call_id"))
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the call is not JSON: {error}")
    except (KeyError, TypeError, AttributeError):
        return ToolCall(error='the call is not {"name": …, "arguments": {…}}')
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(error="`name` is not a string or `arguments` is not an object")
    return ToolCall(name, arguments, id=written_id if isinstance(written_id, str) else "")


def strict_json(text: str) -> Any:
    """Raises ValueError or RecursionError for what cannot be written again: NaN and infinities, lone surrogates
    ("\\ud800"), and values nested so deeply that a chat template or a log would fail on them."""
    value = json.loads(text)
    require_plain(value)
    return value


def require_plain(value: Any) -> None:
    """Raises ValueError or RecursionError as `strict_json`."""
    level = [value]
    for _ in range(MAX_CALL_DEPTH):
        level = [part for parent in level for part in _parts(parent)]
        if not level:
            break
    else:
        raise ValueError(f"nested deeper than {MAX_CALL_DEPTH} levels")
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()

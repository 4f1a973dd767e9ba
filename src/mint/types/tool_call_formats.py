"""The text of a tool call, in the formats of the model families.

| format | a call | families |
|---|---|---|
| `hermes` | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, or between the same tags `<function=NAME><parameter=KEY>VALUE</parameter></function>` | Hermes, Qwen; the second of Qwen3-Coder |
| `llama` | `{"name": …, "parameters": {…}}` as the whole reply or after `<|python_tag|>`, several with `;` between them; or `<function=NAME>{…}</function>` | Llama 3 |
| `mistral` | `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]NAME[ARGS]{…}` for each | Mistral |

Calls inside a reasoning block do not count.
"""  # noqa: E501 - a row of the table

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

ToolCallFormat = Literal["hermes", "llama", "mistral"]

CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
MAX_CALL_DEPTH = 64

_HERMES = re.compile(rf"{CALL_OPEN}(.*?)(?:{CALL_CLOSE}|(?={CALL_OPEN})|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)

PYTHON_TAG = "<|python_tag|>"
FUNCTION_OPEN = "<function="
_LLAMA_END = re.compile(r"(?:<\|eom_id\|>|<\|eot_id\|>|<\|end_of_text\|>)\s*\Z")
_LLAMA_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)

MISTRAL_OPEN = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?\s*(?:\[ARGS\])?\s*(?=\{)")


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the policy. `error` says what is wrong with its text; then the other fields may be empty.

    `as_texts`: the format writes every argument as text, whatever its type.
    """

    name: str = ""
    arguments: Mapping[str, Any] | None = None
    error: str | None = None
    as_texts: bool = False

    def to_message(self) -> dict[str, Any]:
        """The call as an entry of `tool_calls` in an assistant's message."""
        return {"type": "function", "function": {"name": self.name, "arguments": dict(self.arguments or {})}}


def tool_call_format(template: str) -> ToolCallFormat:
    """The format of a model, from the text of its chat template; `hermes` where the template says nothing else."""
    if MISTRAL_OPEN in template:
        return "mistral"
    return "llama" if PYTHON_TAG in template else "hermes"


def parse_tool_calls(content: str, written_as: ToolCallFormat = "hermes") -> list[ToolCall]:
    """The calls in a reply, in order; a call that cannot be read has an `error`."""
    return list(_PARSERS[written_as](without_reasoning(content)))


def without_reasoning(content: str) -> str:
    """The text of a reply after its reasoning block, if it has one."""
    return content.rpartition("</think>")[2].lstrip() if "</think>" in content else content


def typed_arguments(texts: Mapping[str, Any], properties: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that were all written as texts, with the types of a schema's `properties`: the text of a number, a
    list, … is read as JSON. What is not JSON stays a text."""
    arguments: dict[str, Any] = {}
    for name, text in texts.items():
        arguments[name] = text
        schema = properties.get(name)
        if not isinstance(schema, dict) or schema.get("type") != "string":
            with suppress(ValueError, RecursionError):
                arguments[name] = _strict_json(text)
    return arguments


def _hermes_calls(text: str) -> Iterator[ToolCall]:
    for match in _HERMES.finditer(text):
        if not match[0].endswith(CALL_CLOSE):
            yield ToolCall(error=f"the call is not closed by {CALL_CLOSE}")
        elif (function := _FUNCTION.fullmatch(match[1])) is not None:
            yield ToolCall(function[1].strip(), dict(_PARAMETER.findall(function[2])), as_texts=True)
        else:
            yield _json_call(match[1])


def _llama_calls(text: str) -> Iterator[ToolCall]:
    body = _LLAMA_END.sub("", text.strip())
    _, tagged, calls = body.partition(PYTHON_TAG)
    if tagged:
        yield from _json_calls(calls)
    elif functions := list(_LLAMA_FUNCTION.finditer(body)):
        yield from (_named_call(match[1].strip(), match[2]) for match in functions)
    elif body.startswith("{"):  # an answer in JSON is no call
        calls_or_answer = list(_json_calls(body))
        if all(call.error is None for call in calls_or_answer):
            yield from calls_or_answer


def _mistral_calls(text: str) -> Iterator[ToolCall]:
    _, *sections = text.removesuffix("</s>").split(MISTRAL_OPEN)
    for section in sections:
        named = _MISTRAL_NAMED.match(section)
        if named is not None:
            yield _named_call(named[1], section[named.end() :])
            continue
        try:
            calls = _strict_json(section)
        except (ValueError, RecursionError) as error:
            yield ToolCall(error=f"the call is not JSON: {error}")
            continue
        yield from map(_call_of, calls if isinstance(calls, list) else [calls])


_PARSERS: Mapping[ToolCallFormat, Callable[[str], Iterator[ToolCall]]] = {
    "hermes": _hermes_calls,
    "llama": _llama_calls,
    "mistral": _mistral_calls,
}


def _json_calls(text: str) -> Iterator[ToolCall]:
    """Calls in JSON that follow one another, with `;`, commas or white space between them."""
    rest = text.strip()
    if not rest:
        yield ToolCall(error="the call is empty")
    while rest:
        try:
            _, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError) as error:
            yield ToolCall(error=f"the call is not JSON: {error}")
            return
        yield _json_call(rest[:end])
        rest = rest[end:].lstrip(" \t\r\n;,")


def _json_call(text: str) -> ToolCall:
    try:
        return _call_of(_strict_json(text))
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the call is not JSON: {error}")


def _named_call(name: str, arguments: str) -> ToolCall:
    try:
        return _call_of({"name": name, "arguments": _strict_json(arguments)})
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the arguments of {name} are not JSON: {error}")


def _call_of(call: Any) -> ToolCall:
    """A call from its JSON. Families name the arguments `arguments` or `parameters`; they may be JSON in a text."""
    try:
        name = call["name"]
        arguments = call["parameters"] if "parameters" in call else call.get("arguments", {})
        arguments = _strict_json(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the call is not JSON: {error}")
    except (KeyError, TypeError, AttributeError):
        return ToolCall(error='the call is not {"name": …, "arguments": {…}}')
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(error="`name` is not a string or `arguments` is not an object")
    return ToolCall(name, arguments)


def _strict_json(text: str) -> Any:
    """Raises ValueError or RecursionError for what cannot be written again: NaN and infinities, lone surrogates
    ("\\ud800"), and values nested so deeply that a chat template or a log would fail on them."""
    value = json.loads(text)
    level = [value]
    for _ in range(MAX_CALL_DEPTH):
        level = [part for parent in level for part in _parts(parent)]
        if not level:
            break
    else:
        raise ValueError(f"nested deeper than {MAX_CALL_DEPTH} levels")
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()

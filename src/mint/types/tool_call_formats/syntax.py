"""How each format writes calls: the text around a name and its arguments, and the marks by which a call is known."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mint.types.tool_call_formats.call import ToolCall
from mint.types.tool_call_formats.harmony import CHANNEL, CONSTRAIN, HARMONY_ENDS, MESSAGE, START
from mint.types.tool_call_formats.llama import PYTHON_END, PYTHON_START, PYTHON_TAG
from mint.types.tool_call_formats.mistral import MISTRAL_ARGUMENTS, MISTRAL_ID, MISTRAL_OPEN
from mint.types.tool_call_formats.sections import (
    ACTION_CLOSE,
    ACTION_OPEN,
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_SEPARATOR,
    GRANITE_OPEN,
    KIMI_ARGUMENTS,
    KIMI_BEGIN,
    KIMI_CALL,
    KIMI_CALL_END,
    KIMI_END,
    PHI_CLOSE,
    RESPONSE_CLOSE,
    RESPONSE_OPEN,
    THINKING_CLOSE,
    THINKING_OPEN,
)
from mint.types.tool_call_formats.tags import (
    CALL_CLOSE,
    CALL_OPEN,
    FUNCTION_OPEN,
    KEY_CLOSE,
    KEY_OPEN,
    VALUE_CLOSE,
    VALUE_OPEN,
)

ToolCallFormat = Literal[
    "hermes",
    "qwen_coder",
    "glm",
    "glm4",
    "llama",
    "pythonic",
    "mistral",
    "mistral_named",
    "harmony",
    "deepseek_v3",
    "deepseek_v31",
    "kimi",
    "granite",
    "phi4_mini",
    "command",
]

NUMBER = "{number}"
"""Stands in a syntax for the place of a call among those of its reply, from 0."""


@dataclass(frozen=True)
class CallSyntax:
    """The text around the calls of a reply: `begin`, for each call `before_name` NAME `before_arguments` ARGUMENTS
    `after_arguments`, `between` two calls (None: a reply has one call only), and `end`. The arguments are JSON."""

    before_name: str
    before_arguments: str
    after_arguments: str = ""
    begin: str = ""
    between: str | None = ""
    end: str = ""


_HERMES = CallSyntax(f'{CALL_OPEN}\n{{"name": "', '", "arguments": ', f"}}\n{CALL_CLOSE}", between="\n")
_LLAMA = CallSyntax('{"name": "', '", "parameters": ', "}", between="; ")
_PHI = CallSyntax('{"name": "', '", "arguments": ', "}", f"{GRANITE_OPEN}[", ", ", f"]{PHI_CLOSE}")

SYNTAX: Mapping[ToolCallFormat, CallSyntax] = {
    "hermes": _HERMES,
    "qwen_coder": _HERMES,
    "glm": _HERMES,
    "glm4": CallSyntax("", "\n", between=None),
    "llama": _LLAMA,
    "pythonic": _LLAMA,
    "mistral": CallSyntax('{"name": "', '", "arguments": ', "}", f"{MISTRAL_OPEN}[", ", ", "]"),
    "mistral_named": CallSyntax(MISTRAL_OPEN, MISTRAL_ARGUMENTS),
    "harmony": CallSyntax(f"{CHANNEL}commentary to=functions.", f" {CONSTRAIN}json{MESSAGE}", between=None),
    "deepseek_v3": CallSyntax(
        f"{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}",
        "\n```json\n",
        f"\n```{DEEPSEEK_CALL_END}",
        DEEPSEEK_BEGIN,
        "\n",
        DEEPSEEK_END,
    ),
    "deepseek_v31": CallSyntax(DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END, DEEPSEEK_BEGIN, end=DEEPSEEK_END),
    "kimi": CallSyntax(f"{KIMI_CALL}functions.", f":{NUMBER}{KIMI_ARGUMENTS}", KIMI_CALL_END, KIMI_BEGIN, end=KIMI_END),
    "granite": CallSyntax('{"name": "', '", "arguments": ', "}", f"{GRANITE_OPEN}[", ", ", "]"),
    "phi4_mini": _PHI,
    "command": CallSyntax(
        f'    {{"tool_call_id": "{NUMBER}", "tool_name": "',
        '", "parameters": ',
        "}",
        f"{ACTION_OPEN}[\n",
        ",\n",
        f"\n]{ACTION_CLOSE}",
    ),
}
"""The JSON that each format can hold. `qwen_coder`, `glm` and `pythonic` also have a syntax that is no JSON."""

_TAGS = (CALL_OPEN,)
_LLAMA_MARKS = (PYTHON_TAG, PYTHON_START, FUNCTION_OPEN)
OPENING_MARKS: Mapping[ToolCallFormat, Sequence[str]] = {
    "hermes": _TAGS,
    "qwen_coder": _TAGS,
    "glm": _TAGS,
    "glm4": (),
    "llama": _LLAMA_MARKS,
    "pythonic": _LLAMA_MARKS,
    "mistral": (MISTRAL_OPEN,),
    "mistral_named": (MISTRAL_OPEN,),
    "harmony": (CHANNEL, "to=functions."),
    "deepseek_v3": (DEEPSEEK_BEGIN, DEEPSEEK_CALL),
    "deepseek_v31": (DEEPSEEK_BEGIN, DEEPSEEK_CALL),
    "kimi": (KIMI_BEGIN, KIMI_CALL),
    "granite": (GRANITE_OPEN, CALL_OPEN),
    "phi4_mini": (GRANITE_OPEN,),
    "command": (ACTION_OPEN, THINKING_OPEN, RESPONSE_OPEN),
}
"""The marks with which calls begin, or a reply whose text has marks of its own."""

MARKUP = frozenset(
    {
        *(CALL_OPEN, CALL_CLOSE, KEY_OPEN, KEY_CLOSE, VALUE_OPEN, VALUE_CLOSE),
        *(PYTHON_TAG, PYTHON_START, PYTHON_END),
        *(MISTRAL_OPEN, MISTRAL_ARGUMENTS, MISTRAL_ID),
        *(START, CHANNEL, CONSTRAIN, MESSAGE, *HARMONY_ENDS),
        *(DEEPSEEK_BEGIN, DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END, DEEPSEEK_END),
        *(KIMI_BEGIN, KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END, KIMI_END),
        *(GRANITE_OPEN, PHI_CLOSE),
        *(ACTION_OPEN, ACTION_CLOSE, THINKING_OPEN, THINKING_CLOSE, RESPONSE_OPEN, RESPONSE_CLOSE),
    }
)
"""What the parsers must see, also where a tokenizer has special tokens for it."""

CALL_ENDS: Mapping[ToolCallFormat, Sequence[str]] = {
    "harmony": HARMONY_ENDS,
    "llama": ("<|eom_id|>", "<|eot_id|>", "<|eot|>"),
    "pythonic": ("<|eom_id|>", "<|eot_id|>", "<|eot|>"),
    "glm": ("<|observation|>", "<|user|>"),
    "glm4": ("<|observation|>", "<|user|>"),
}
"""Tokens that end a turn besides the end token of the tokenizer."""


def render_tool_calls(calls: Sequence[ToolCall], written_as: ToolCallFormat) -> str:
    """The calls as a model of this format writes them; `parse_tool_calls` reads them back."""
    if written_as == "pythonic":
        return f"[{', '.join(map(_as_python, calls))}]"
    if written_as in ("qwen_coder", "glm"):
        write = _as_function if written_as == "qwen_coder" else _as_keys
        return "\n".join(f"{CALL_OPEN}{write(call)}\n{CALL_CLOSE}" for call in calls)
    syntax = SYNTAX[written_as]
    texts = [
        f"{syntax.before_name}{json.dumps(call.name)[1:-1]}{syntax.before_arguments}".replace(NUMBER, str(number))
        + json.dumps(dict(call.arguments or {}), ensure_ascii=False)
        + syntax.after_arguments
        for number, call in enumerate(calls)
    ]
    return f"{syntax.begin}{(syntax.between or '').join(texts)}{syntax.end}"


def _as_python(call: ToolCall) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in (call.arguments or {}).items())
    return f"{call.name}({arguments})"


def _as_function(call: ToolCall) -> str:
    parameters = "".join(
        f"<parameter={name}>\n{_as_text(value)}\n</parameter>\n" for name, value in (call.arguments or {}).items()
    )
    return f"\n{FUNCTION_OPEN}{call.name}>\n{parameters}</function>"


def _as_keys(call: ToolCall) -> str:
    arguments = "".join(
        f"\n{KEY_OPEN}{name}{KEY_CLOSE}\n{VALUE_OPEN}{_as_text(value)}{VALUE_CLOSE}"
        for name, value in (call.arguments or {}).items()
    )
    return f"{call.name}{arguments}"


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

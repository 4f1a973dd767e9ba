"""The text of a tool call, in the formats of the model families.

| format | a call | families |
|---|---|---|
| `hermes` | `<tool_call>{"name": …, "arguments": {…}}</tool_call>` | Hermes 2 and 3, Qwen 2.5 and 3, Granite 4, SmolLM3 |
| `qwen_coder` | between the same tags `<function=NAME><parameter=KEY>VALUE</parameter></function>` | Qwen3-Coder, Qwen 3.5 |
| `glm` | between the same tags `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` | GLM-4.5 and later |
| `glm4` | `NAME`, a new line, `{…}`, as the whole reply | GLM-4 |
| `llama` | `{"name": …, "parameters": {…}}` as the whole reply or after `<|python_tag|>`, several with `;` between them; `<function=NAME>{…}</function>`; as `pythonic` | Llama 3.1 to 3.3, Llama 4 |
| `pythonic` | `[NAME(KEY=VALUE, …), …]`, also between `<|python_start|>` and `<|python_end|>`; as `llama` | Llama 3.2 and 4, templates of vLLM |
| `mistral` | `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]` | Mistral v3, Nemo |
| `mistral_named` | `[TOOL_CALLS]NAME[ARGS]{…}` for each, also `NAME[CALL_ID]ID[ARGS]{…}` | Mistral Small 3.2, Devstral, Ministral |
| `harmony` | `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>` | GPT-OSS |
| `deepseek_v3` | `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, the arguments in a fence, `<｜tool▁call▁end｜>` | DeepSeek V3, R1 |
| `deepseek_v31` | `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` | DeepSeek V3.1 |
| `kimi` | `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` | Kimi K2 |
| `granite` | `<|tool_call|>[{"name": …, "arguments": {…}}, …]` | Granite 3 |
| `phi4_mini` | the same, closed by `<|/tool_call|>` | Phi-4-mini |
| `command` | `<|START_ACTION|>[{"tool_name": …, "parameters": {…}}, …]<|END_ACTION|>` | Command R7B, Command A |

Calls inside a reasoning block do not count.
"""  # noqa: E501 - rows of the table

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mint.types.tool_call_formats.call import MAX_CALL_DEPTH, Part, Reasoning, ToolCall, named_call, typed_arguments
from mint.types.tool_call_formats.harmony import harmony_calls
from mint.types.tool_call_formats.llama import PYTHON_START, PYTHON_TAG, llama_calls
from mint.types.tool_call_formats.mistral import MISTRAL_ARGUMENTS, MISTRAL_OPEN, mistral_calls
from mint.types.tool_call_formats.sections import (
    ACTION_OPEN,
    DEEPSEEK_CALL,
    GRANITE_OPEN,
    KIMI_CALL,
    command_calls,
    deepseek_calls,
    granite_calls,
    kimi_calls,
)
from mint.types.tool_call_formats.syntax import (
    CALL_ENDS,
    MARKUP,
    NUMBER,
    OPENING_MARKS,
    SYNTAX,
    CallSyntax,
    ToolCallFormat,
    render_tool_calls,
)
from mint.types.tool_call_formats.tags import CALL_CLOSE, CALL_OPEN, KEY_OPEN, glm_calls, tagged_calls

__all__ = [
    "CALL_CLOSE",
    "CALL_ENDS",
    "CALL_OPEN",
    "MARKUP",
    "MAX_CALL_DEPTH",
    "NUMBER",
    "OPENING_MARKS",
    "SYNTAX",
    "CallSyntax",
    "ParsedReply",
    "ToolCall",
    "ToolCallFormat",
    "other_format",
    "parse_tool_calls",
    "read_reply",
    "render_tool_calls",
    "tool_call_format",
    "typed_arguments",
    "with_ids",
    "without_reasoning",
]

_OF_TEMPLATE: Sequence[tuple[Sequence[str], ToolCallFormat]] = (
    (("<|channel|>", "<|call|>"), "harmony"),
    ((DEEPSEEK_CALL, "```json"), "deepseek_v3"),
    ((DEEPSEEK_CALL,), "deepseek_v31"),
    ((KIMI_CALL,), "kimi"),
    ((ACTION_OPEN,), "command"),
    ((MISTRAL_OPEN, MISTRAL_ARGUMENTS), "mistral_named"),
    ((MISTRAL_OPEN,), "mistral"),
    ((KEY_OPEN,), "glm"),
    (("<|/tool_call|>",), "phi4_mini"),
    (("<|/tool|>",), "phi4_mini"),
    ((GRANITE_OPEN,), "granite"),
    (("[func_name1(",), "pythonic"),
    ((PYTHON_TAG,), "llama"),
    ((PYTHON_START,), "llama"),
    (("<function=", "<parameter="), "qwen_coder"),
    ((CALL_OPEN,), "hermes"),
    (("<|start_header_id|>ipython",), "llama"),
    (("<|observation|>",), "glm4"),
)
"""The first row whose marks are all in a chat template names its format."""


@dataclass(frozen=True)
class ParsedReply:
    """A reply of a model: its reasoning, its text, and its calls in order."""

    reasoning: str
    text: str
    calls: Sequence[ToolCall]


def tool_call_format(template: str, vocabulary: Collection[str] = ()) -> ToolCallFormat:
    """The format of a model, from the text of its chat template; where that says nothing, from the added tokens of its
    `vocabulary`. `hermes` where neither says anything."""
    for marks, written_as in _OF_TEMPLATE:
        if all(mark in template for mark in marks):
            return written_as
    for marks, written_as in _OF_TEMPLATE:
        if all(mark in vocabulary for mark in marks):
            return written_as
    return "hermes"


def parse_tool_calls(
    content: str, written_as: ToolCallFormat = "hermes", names: Collection[str] | None = None
) -> list[ToolCall]:
    """The calls in a reply, in order; a call that cannot be read has an `error`.

    `names` are those of the tools. A call without marks, as `{"name": …}`, counts only if its name is one of them.
    """
    return list(read_reply(content, written_as, names).calls)


def read_reply(
    content: str, written_as: ToolCallFormat = "hermes", names: Collection[str] | None = None
) -> ParsedReply:
    """What a reply holds; `names` as in `parse_tool_calls`."""
    said = without_reasoning(content)
    parts = list(_PARSERS[written_as](said, names))
    reasoning = [content[: len(content) - len(said)], *(part for part in parts if isinstance(part, Reasoning))]
    text = [part for part in parts if isinstance(part, str) and not isinstance(part, Reasoning)]
    return ParsedReply("".join(reasoning), "".join(text), [part for part in parts if isinstance(part, ToolCall)])


def other_format(content: str, written_as: ToolCallFormat, names: Collection[str] = ()) -> ToolCallFormat | None:
    """The format in which a reply without calls seems to hold one; `names` are those of the tools."""
    said = without_reasoning(content)
    if parse_tool_calls(said, written_as, names):
        return None
    for other, marks in OPENING_MARKS.items():
        if any(mark in said and mark not in OPENING_MARKS[written_as] for mark in marks):
            return other
    if names and any(call.name in names for call in parse_tool_calls(said, "llama", names)):
        return "llama"
    return None


def without_reasoning(content: str) -> str:
    """The text of a reply after its reasoning block, if it has one."""
    for close in ("</think>", "[/THINK]"):
        if close in content:
            return content.rpartition(close)[2].lstrip()
    return content


def with_ids(calls: Sequence[ToolCall], first: int) -> list[ToolCall]:
    """The calls with an id each: what the policy wrote, or nine letters and digits. `first` calls came before."""
    return [
        call if call.id else dataclasses.replace(call, id=f"call{number:05d}")
        for number, call in enumerate(calls, first)
    ]


def _glm4_calls(text: str, names: Collection[str] | None = None) -> Iterator[Part]:
    """A name of a tool on a line of its own, and then its arguments."""
    name, _, arguments = text.strip().removesuffix("<|observation|>").partition("\n")
    is_name = name.strip().replace("-", "_").isidentifier() if names is None else name.strip() in names
    yield named_call(name.strip(), arguments) if is_name and arguments.lstrip().startswith("{") else text


_PARSERS: Mapping[ToolCallFormat, Callable[[str, Collection[str] | None], Iterator[Part]]] = {
    "hermes": tagged_calls,
    "qwen_coder": tagged_calls,
    "glm": glm_calls,
    "glm4": _glm4_calls,
    "llama": llama_calls,
    "pythonic": llama_calls,
    "mistral": mistral_calls,
    "mistral_named": mistral_calls,
    "harmony": harmony_calls,
    "deepseek_v3": deepseek_calls,
    "deepseek_v31": deepseek_calls,
    "kimi": kimi_calls,
    "granite": granite_calls,
    "phi4_mini": granite_calls,
    "command": command_calls,
}

"""Calls between marks that are special tokens: DeepSeek, Kimi K2, Granite and Phi-4-mini, Command."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mint.types.tool_call_formats.call import Part, Reasoning, ToolCall, listed_calls, named_call

DEEPSEEK_BEGIN, DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```"

KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

GRANITE_OPEN, PHI_CLOSE = "<|tool_call|>", "<|/tool_call|>"

ACTION_OPEN, ACTION_CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
THINKING_OPEN, THINKING_CLOSE = "<|START_THINKING|>", "<|END_THINKING|>"
RESPONSE_OPEN, RESPONSE_CLOSE = "<|START_RESPONSE|>", "<|END_RESPONSE|>"


def deepseek_calls(text: str, names: Collection[str] | None = None) -> Iterator[Part]:
    """DeepSeek V3 and R1 (`function<sep>NAME` and arguments in a fence) and V3.1 (`NAME<sep>{…}`)."""
    for part in _between(text, DEEPSEEK_BEGIN, DEEPSEEK_END, DEEPSEEK_CALL, DEEPSEEK_CALL_END):
        yield _deepseek_call(part) if isinstance(part, _Inner) else part


def _deepseek_call(inner: str) -> ToolCall:
    head, separated, tail = inner.partition(DEEPSEEK_SEPARATOR)
    if not separated:
        return ToolCall(error=f"the call has no {DEEPSEEK_SEPARATOR}")
    if head.strip() != "function" or tail.lstrip().startswith("{"):
        return named_call(head.strip(), tail)
    name, _, arguments = tail.strip().partition("\n")
    fenced = arguments.strip().removeprefix(_FENCE).removeprefix("json").removesuffix(_FENCE)
    return named_call(name.strip(), fenced)


def kimi_calls(text: str, names: Collection[str] | None = None) -> Iterator[Part]:
    """Kimi K2: `functions.NAME:NUMBER`, which is the id, too, and the arguments."""
    for part in _between(text, KIMI_BEGIN, KIMI_END, KIMI_CALL, KIMI_CALL_END):
        yield _kimi_call(part) if isinstance(part, _Inner) else part


def _kimi_call(inner: str) -> ToolCall:
    written_id, separated, arguments = inner.partition(KIMI_ARGUMENTS)
    name, _, number = written_id.strip().removeprefix("functions.").rpartition(":")
    if not separated or not name or not number.isdecimal():
        return ToolCall(error=f"the call is not functions.NAME:NUMBER{KIMI_ARGUMENTS}{{…}}")
    return named_call(name, arguments, written_id.strip())


def granite_calls(text: str, names: Collection[str] | None = None) -> Iterator[Part]:
    """Granite 3 (`<|tool_call|>[…]`, also with `<tool_call>`) and Phi-4-mini (closed by `<|/tool_call|>`)."""
    text = text.replace("<tool_call>", GRANITE_OPEN).replace("</tool_call>", PHI_CLOSE)
    before, *sections = text.split(GRANITE_OPEN)
    yield before
    for section in sections:
        inner, _, after = section.partition(PHI_CLOSE)
        yield from listed_calls(inner.removesuffix("<|end_of_text|>"))
        yield after


def command_calls(text: str, names: Collection[str] | None = None) -> Iterator[Part]:
    """Command R7B and A: a JSON list of actions; thinking and response have marks, too."""
    before, *sections = text.split(ACTION_OPEN)
    yield from _said(before)
    for section in sections:
        inner, _, after = section.partition(ACTION_CLOSE)
        yield from listed_calls(inner)
        yield from _said(after)


def _said(text: str) -> Iterator[Part]:
    thought, ended, rest = text.rpartition(THINKING_CLOSE)
    if ended:
        yield Reasoning(thought.replace(THINKING_OPEN, ""))
    yield rest.replace(RESPONSE_OPEN, "").replace(RESPONSE_CLOSE, "")


class _Inner(str):
    """What stands between the marks of one call."""

    __slots__ = ()


def _between(text: str, begin: str, end: str, call: str, call_end: str) -> Iterator[Part]:
    """Text, and the insides of calls: the marks of the section may be missing, those of a call may not."""
    before, *sections = text.replace(begin, "").replace(end, "").split(call)
    yield before
    for section in sections:
        inner, closed, after = section.partition(call_end)
        if not closed:
            yield ToolCall(error=f"the call is not closed by {call_end}")
            continue
        yield _Inner(inner)
        yield after

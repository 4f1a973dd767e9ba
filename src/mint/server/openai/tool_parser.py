"""Separates the tool calls of a reply from its text, while it grows. `types/tool_call_formats` reads a call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mint.server.openai.schemas import ChatTool, FunctionCall
from mint.types.tool_call_formats import (
    CALL_CLOSE,
    CALL_OPEN,
    OPENING_MARKS,
    ToolCall,
    ToolCallFormat,
    parse_tool_calls,
    read_reply,
    typed_arguments,
)
from mint.types.tool_call_formats import MARKUP as CALL_MARKUP

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
MARKUP = frozenset(mark.encode() for mark in (*CALL_MARKUP, THINK_OPEN, THINK_CLOSE))

Properties = Mapping[str, Mapping[str, Any]]
"""Of each function, the schemas of its parameters."""


def held_back(text: str | bytes, marks: Sequence[str | bytes]) -> int:
    """How much of the end of `text` may be the beginning of a mark (all text, or all bytes)."""
    longest = max((len(mark) for mark in marks), default=0) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(mark.startswith(tail) for mark in marks):  # ty: ignore[invalid-argument-type]
            return size
    return 0


class ToolParser(Protocol):
    """Reads one reply."""

    def push(self, text: str) -> tuple[str, list[FunctionCall]]:
        """Adds text of the reply; returns the text and the calls that are certain now."""
        ...

    def close(self) -> tuple[str, list[FunctionCall]]:
        """The rest, once no text follows."""
        ...


def tool_parser(written_as: ToolCallFormat, tools: Sequence[ChatTool], *, is_thinking: bool = False) -> ToolParser:
    """The parser of a format. `is_thinking`: the prompt has already opened a reasoning block."""
    properties: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        found = (tool.function.parameters or {}).get("properties")
        properties[tool.function.name] = found if isinstance(found, dict) else {}
    if OPENING_MARKS[written_as] == (CALL_OPEN,):
        return HermesParser(properties, written_as, is_thinking=is_thinking)
    return WholeCallsParser(written_as, properties)


_WHOLE: frozenset[ToolCallFormat] = frozenset({"harmony", "command", "glm4"})
"""Formats in which the whole reply is held back: its text has marks of its own, or a call has none."""

_BARE: Mapping[str, tuple[str, ...]] = {"llama": ("{", "["), "pythonic": ("{", "[")}
"""How a call without a mark begins, if it is the whole reply."""


class WholeCallsParser:
    """Holds a reply back from the first mark of a call on, and reads the calls at its end, because most formats do not
    mark where a call ends. What is no valid call stays text. Reasoning that has marks of its own is dropped."""

    def __init__(self, written_as: ToolCallFormat, properties: Properties) -> None:
        self._written_as: ToolCallFormat = written_as
        self._properties = properties
        self._marks = OPENING_MARKS[written_as]
        self._bare = _BARE.get(written_as, ())
        self._text = ""
        self._holds = written_as in _WHOLE
        self._has_begun = False

    def push(self, text: str) -> tuple[str, list[FunctionCall]]:
        self._text += text
        if self._holds:
            return "", []
        begun = self._text.lstrip()
        if not self._has_begun and self._bare and begun[:1] in ("", *self._bare):
            self._holds = bool(begun)
            return "", []
        places = [place for mark in self._marks if (place := self._text.find(mark)) >= 0]
        self._holds = bool(places)
        end = min(places) if places else len(self._text) - held_back(self._text, self._marks)
        said, self._text = self._text[:end], self._text[end:]
        self._has_begun = self._has_begun or bool(said.strip())
        return said, []

    def close(self) -> tuple[str, list[FunctionCall]]:
        text, self._text = self._text, ""
        if not self._holds:
            return text, []
        reply = read_reply(text, self._written_as, self._properties)
        calls = [call for call in (_function_call(each, self._properties) for each in reply.calls) if call is not None]
        if len(calls) < len(reply.calls):
            return text, []
        return reply.text if calls or self._written_as in _WHOLE else text, calls


class HermesParser:
    """Reads calls between `<tool_call>` and `</tool_call>`, each as soon as it is closed.

    Anything that is not a valid call stays text; so do calls inside the model's reasoning.
    """

    def __init__(self, properties: Properties, written_as: ToolCallFormat, *, is_thinking: bool = False) -> None:
        self._properties = properties
        self._written_as: ToolCallFormat = written_as
        self._text = ""
        self._gap = ""  # white space before a call: passed on only if more text follows
        self._mode = THINK_OPEN if is_thinking else ""
        self._after_call = False

    def push(self, text: str) -> tuple[str, list[FunctionCall]]:
        self._text += text
        text_parts: list[str] = []
        calls: list[FunctionCall] = []
        while self._step(text_parts, calls):
            pass
        return "".join(text_parts), calls

    def close(self) -> tuple[str, list[FunctionCall]]:
        opened = CALL_OPEN if self._mode == CALL_OPEN else ""
        rest = f"{opened}{self._text}"
        self._text = ""
        return (f"{self._gap}{rest}" if rest else ""), []  # a call that was not closed is text

    def _step(self, text_parts: list[str], calls: list[FunctionCall]) -> bool:
        """Reads up to the next mark; False if more text is needed."""
        if self._mode == CALL_OPEN:
            return self._step_in_call(text_parts, calls)
        if self._after_call:
            self._text = self._text.lstrip()
            if held_back(self._text, [CALL_OPEN]) == len(self._text):  # no text yet, or perhaps another call
                return False
            if not self._text.startswith(CALL_OPEN):
                text_parts.append(self._gap)
                self._gap = ""
                self._after_call = False
        marks = [THINK_CLOSE] if self._mode == THINK_OPEN else [THINK_OPEN, CALL_OPEN]
        places = {place: mark for mark in marks if (place := self._text.find(mark)) >= 0}
        if not places:
            sure = self._text[: len(self._text) - held_back(self._text, marks)].rstrip()
            text_parts.append(sure)
            self._text = self._text[len(sure) :]
            return False
        place = min(places)
        mark = places[place]
        if mark == CALL_OPEN:
            sure = self._text[:place].rstrip()
            self._gap = self._gap or self._text[len(sure) : place]
            self._text = self._text[place + len(mark) :]
        else:
            sure = self._text[: place + len(mark)]
            self._text = self._text[place + len(mark) :]
        text_parts.append(sure)
        self._mode = "" if mark == THINK_CLOSE else mark
        return True

    def _step_in_call(self, text_parts: list[str], calls: list[FunctionCall]) -> bool:
        end = self._text.find(CALL_CLOSE)
        again = self._text.find(CALL_OPEN)
        if end < 0 and again < 0:
            return False
        closed = end >= 0 and (again < 0 or end < again)
        inner = self._text[: end if closed else again]
        call = self._read(inner) if closed else None
        self._text = self._text[len(inner) + (len(CALL_CLOSE) if closed else 0) :]
        if call is None:
            text_parts.append(f"{self._gap}{CALL_OPEN}{inner}{CALL_CLOSE if closed else ''}")
            self._gap = ""
        else:
            calls.append(call)
        self._mode = ""
        self._after_call = call is not None
        return True

    def _read(self, inner: str) -> FunctionCall | None:
        found = parse_tool_calls(f"{CALL_OPEN}{inner}{CALL_CLOSE}", self._written_as)
        return _function_call(found[0], self._properties) if len(found) == 1 else None


def _function_call(call: ToolCall, properties: Properties) -> FunctionCall | None:
    """None for a call that cannot be read."""
    if call.error is not None:
        return None
    arguments = dict(call.arguments or {})
    if call.as_texts:
        arguments = typed_arguments(arguments, properties.get(call.name, {}))
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        f"{call.name}{written}".encode()  # half characters ("\\ud800") cannot be sent
    except (ValueError, RecursionError):
        return None
    return FunctionCall(name=call.name, arguments=written)

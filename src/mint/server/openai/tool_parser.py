"""Finds tool calls in a reply, in the form of Hermes and Qwen: `<tool_call>{"name": …, "arguments": …}</tool_call>`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mint.server.openai.schemas import FunctionCall

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
MARKUP = frozenset(mark.encode() for mark in (CALL_OPEN, CALL_CLOSE, THINK_OPEN, THINK_CLOSE))


def held_back(text: str | bytes, marks: Sequence[str | bytes]) -> int:
    """How much of the end of `text` may be the beginning of a mark (all text, or all bytes)."""
    longest = max((len(mark) for mark in marks), default=0) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(mark.startswith(tail) for mark in marks):  # ty: ignore[invalid-argument-type]
            return size
    return 0


class ToolParser:
    """Separates the tool calls of a reply from its text, while it grows.

    Anything that is not a valid call stays text; so do calls inside the model's reasoning.
    """

    def __init__(self, *, is_thinking: bool = False) -> None:
        """`is_thinking`: the prompt has already opened a reasoning block."""
        self._text = ""
        self._gap = ""  # white space before a call: passed on only if more text follows
        self._mode = THINK_OPEN if is_thinking else ""
        self._after_call = False

    def push(self, text: str) -> tuple[str, list[FunctionCall]]:
        """Adds text of the reply; returns the text and the calls that are certain now."""
        self._text += text
        text_parts: list[str] = []
        calls: list[FunctionCall] = []
        while self._step(text_parts, calls):
            pass
        return "".join(text_parts), calls

    def close(self) -> str:
        """The rest: a call that was not closed is text."""
        opened = CALL_OPEN if self._mode == CALL_OPEN else ""
        rest = f"{opened}{self._text}"
        self._text = ""
        return f"{self._gap}{rest}" if rest else ""

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
        call = _parse_call(inner) if closed else None
        self._text = self._text[len(inner) + (len(CALL_CLOSE) if closed else 0) :]
        if call is None:
            text_parts.append(f"{self._gap}{CALL_OPEN}{inner}{CALL_CLOSE if closed else ''}")
            self._gap = ""
        else:
            calls.append(call)
        self._mode = ""
        self._after_call = call is not None
        return True


def _parse_call(text: str) -> FunctionCall | None:
    try:
        call = json.loads(text)
        name = call["name"]
        arguments = call.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        f"{name}{written}".encode()  # half characters ("\\ud800") cannot be sent
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
    return FunctionCall(name=name, arguments=written)

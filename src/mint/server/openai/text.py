"""Tokens → text as it grows, and the tool calls in it: what may leave at once, and what must be held back.

Never half a character, never the beginning of a stop string. A whole answer and a streamed one come from here alike, so
they cannot differ. Knows no request, no model and no HTTP.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any

from mint.models.folder import ModelFolder
from mint.server.openai.messages import FunctionCall
from mint.tokenizer import load_tokenizer, token_bytes

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Vocabulary:
    """What the tokens of a model folder stand for."""

    tokenizer: Any
    pieces: Sequence[bytes]
    special: frozenset[int]
    """Tokens that are no text: marks of a turn, of the end."""
    ends: frozenset[int]
    markup: frozenset[int]
    """The marks of a tool call, which are text to whoever looks for calls, even where the tokenizer hides them."""

    def piece(self, token: int) -> bytes:
        """The bytes of a token; none for ids beyond the tokenizer's."""
        return self.pieces[token] if 0 <= token < len(self.pieces) else b""

    def hidden(self, *, skip_special: bool, calls: bool) -> frozenset[int]:
        """The tokens that give no text."""
        if not skip_special:
            return self.ends
        return (self.special - self.markup if calls else self.special) | self.ends

    def text(self, tokens: Sequence[int], hidden: frozenset[int]) -> str:
        """Tokens as one text."""
        return b"".join(self.piece(token) for token in tokens if token not in hidden).decode(errors="replace")

    def name(self, token: int, *, as_id: bool) -> str:
        """A token as a result names it: its text; `bytes:\\x..` where it is part of a character only."""
        if as_id:
            return f"token_id:{token}"
        piece = self.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


@cache
def read_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of a model folder; slow the first time (transformers).

    Raises:
        NotFoundError: there is no tokenizer in it.
        InvalidRequestError: its `tokenizer.json` cannot be read.
    """
    tokenizer = load_tokenizer(str(folder), str(folder))
    pieces = token_bytes(folder)
    added = tokenizer.added_tokens_decoder
    special = frozenset(token for token, content in added.items() if content.special)
    marks = {CALL_OPEN.encode(), CALL_CLOSE.encode(), THINK_OPEN.encode(), THINK_CLOSE.encode()}
    markup = frozenset(token for token in special if pieces[token] in marks)
    return Vocabulary(tokenizer, pieces, special, frozenset(ModelFolder(folder).eos_token_ids), markup)


def held_back(text: str | bytes, marks: Sequence[str | bytes]) -> int:
    """How much of the end of `text` may be the beginning of a mark (all of one kind, text or bytes)."""
    longest = max((len(mark) for mark in marks), default=0) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(mark.startswith(tail) for mark in marks):  # ty: ignore[invalid-argument-type]
            return size
    return 0


class TextStream:
    """The text of one choice. After a stop string nothing comes any more."""

    def __init__(self, vocabulary: Vocabulary, hidden: frozenset[int], stops: Sequence[str] = ()) -> None:
        """`hidden` tokens give no text, but a stop string may be made of them."""
        self._vocabulary = vocabulary
        self._hidden = hidden
        self._stops = [stop.encode() for stop in stops]
        self._raw = b""  # not released yet …
        self._shown = b""  # … and for each byte of it whether it is text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._counter = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._has_ended = False
        self.offset = 0
        """Characters before the next token."""

    def push(self, token: int) -> str:
        """Takes a token; the text that may leave."""
        piece = self._vocabulary.piece(token)
        shown = token not in self._hidden
        self.offset += len(self._counter.decode(piece if shown else b""))
        if self._has_ended:
            return ""
        self._raw += piece
        self._shown += bytes([shown]) * len(piece)
        found = [place for place in map(self._raw.find, self._stops) if place >= 0]
        if found:
            self._has_ended = True
            return self._release(min(found))
        return self._release(len(self._raw) - held_back(self._raw, self._stops))

    def close(self) -> str:
        """The rest, once no token follows."""
        rest = "" if self._has_ended else self._release(len(self._raw))
        self._has_ended = True
        return rest + self._decoder.decode(b"", final=True)

    def _release(self, size: int) -> str:
        text = bytes(compress(self._raw[:size], self._shown))
        self._raw, self._shown = self._raw[size:], self._shown[size:]
        return self._decoder.decode(text)


class CallReader:
    """Takes the calls out of a reply: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen write.

    What is no such call stays text; so do calls that the model only considers in its reasoning.
    """

    def __init__(self, *, is_thinking: bool = False) -> None:
        """`is_thinking`: the prompt has opened a reasoning block already."""
        self._text = ""
        self._gap = ""  # white space before a call: said only if more words follow
        self._mode = THINK_OPEN if is_thinking else ""
        self._after_call = False

    def push(self, text: str) -> tuple[str, list[FunctionCall]]:
        """Takes more of the reply; the text and the calls that are certain now."""
        self._text += text
        said: list[str] = []
        calls: list[FunctionCall] = []
        while self._step(said, calls):
            pass
        return "".join(said), calls

    def close(self) -> str:
        """The rest: a call that was not closed is text."""
        opened = CALL_OPEN if self._mode == CALL_OPEN else ""
        rest, self._text = f"{opened}{self._text}", ""
        return f"{self._gap}{rest}" if rest else ""

    def _step(self, said: list[str], calls: list[FunctionCall]) -> bool:
        """One mark further; False where more text is needed."""
        if self._mode == CALL_OPEN:
            return self._step_in_call(said, calls)
        if self._after_call:
            self._text = self._text.lstrip()
            if held_back(self._text, [CALL_OPEN]) == len(self._text):  # no words yet, or perhaps another call
                return False
            if not self._text.startswith(CALL_OPEN):
                said.append(self._gap)
                self._gap, self._after_call = "", False
        marks = [THINK_CLOSE] if self._mode == THINK_OPEN else [THINK_OPEN, CALL_OPEN]
        places = {place: mark for mark in marks if (place := self._text.find(mark)) >= 0}
        if not places:
            sure = self._text[: len(self._text) - held_back(self._text, marks)].rstrip()
            said.append(sure)
            self._text = self._text[len(sure) :]
            return False
        place = min(places)
        mark = places[place]
        if mark == CALL_OPEN:
            sure = self._text[:place].rstrip()
            self._gap = self._gap or self._text[len(sure) : place]
            self._text = self._text[place + len(mark) :]
        else:
            sure, self._text = self._text[: place + len(mark)], self._text[place + len(mark) :]
        said.append(sure)
        self._mode = "" if mark == THINK_CLOSE else mark
        return True

    def _step_in_call(self, said: list[str], calls: list[FunctionCall]) -> bool:
        end, again = self._text.find(CALL_CLOSE), self._text.find(CALL_OPEN)
        if end < 0 and again < 0:
            return False
        closed = end >= 0 and (again < 0 or end < again)
        inner = self._text[: end if closed else again]
        call = _parse_call(inner) if closed else None
        self._text = self._text[len(inner) + (len(CALL_CLOSE) if closed else 0) :]
        if call is None:
            said.append(f"{self._gap}{CALL_OPEN}{inner}{CALL_CLOSE if closed else ''}")
            self._gap = ""
        else:
            calls.append(call)
        self._mode, self._after_call = "", call is not None
        return True


def _parse_call(text: str) -> FunctionCall | None:
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        f"{name}{written}".encode()  # half characters ("\\ud800") cannot be sent
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
    return FunctionCall(name=name, arguments=written)

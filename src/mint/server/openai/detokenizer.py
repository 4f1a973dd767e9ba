"""Token ids → text as it grows. Releases no half character and no beginning of a stop string.

Whole and streamed responses both come from here, so they cannot differ.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any

from mint.models.folder import ModelFolder
from mint.server.openai.tool_parser import MARKUP, held_back
from mint.tokenizer import load_tokenizer, token_bytes


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model folder as bytes."""

    tokenizer: Any
    pieces: Sequence[bytes]
    special: frozenset[int]
    """Tokens that are no text: the marks of a turn, the end."""
    ends: frozenset[int]
    markup: frozenset[int]
    """The tokens of `tool_parser.MARKUP`: they are text to the tool parser, even if the tokenizer hides them."""

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
    markup = frozenset(token for token in special if pieces[token] in MARKUP)
    return Vocabulary(tokenizer, pieces, special, frozenset(ModelFolder(folder).eos_token_ids), markup)


class Detokenizer:
    """The text of one choice. After a stop string it gives no more text."""

    def __init__(
        self, vocabulary: Vocabulary, hidden: frozenset[int], stops: Sequence[str] = (), *, min_tokens: int = 0
    ) -> None:
        """`hidden` tokens give no text, but may be part of a stop string. The text of the first `min_tokens` tokens is
        part of none."""
        self._early = min_tokens
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
        self.stop: str | None = None
        """The stop string that has ended the text."""

    def push(self, token: int) -> str:
        """Adds a token; returns the text that is certain now."""
        piece = self._vocabulary.piece(token)
        shown = token not in self._hidden
        self.offset += len(self._counter.decode(piece if shown else b""))
        if self._has_ended:
            return ""
        self._raw += piece
        self._shown += bytes([shown]) * len(piece)
        if self._early:
            self._early -= 1
            return self._release(len(self._raw))
        found = [(place, stop) for stop in self._stops if (place := self._raw.find(stop)) >= 0]
        if found:
            place, stop = min(found)
            self.stop = stop.decode()
            self._has_ended = True
            return self._release(place)
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

"""Short, printable text of values and errors that model-written code has produced, for logs and messages.

Reads no more of a value than it shows, does not recurse, and does not raise, whatever the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAX_ERROR_CHARACTERS = 500
BRACKETS = {list: ("[", "]"), tuple: ("(", ")"), set: ("{", "}"), frozenset: ("frozenset({", "})"), dict: ("{", "}")}


def error_text(text: str) -> str:
    """The first characters of an exception's text; escapes what is not printable, except line breaks and tabs."""
    shown = "".join(
        sign if sign.isprintable() or sign in "\n\t" else sign.encode("unicode_escape").decode()
        for sign in text[:MAX_ERROR_CHARACTERS]
    )
    return shown[:MAX_ERROR_CHARACTERS]


def value_text(value: object, max_characters: int) -> str:
    """`repr` of a plain value, cut after `max_characters` with `…`; the name of the type of another object."""
    pieces: list[str] = []
    room = max_characters
    waiting = [_pieces(value, room)]
    while waiting and room >= 0:
        piece = next(waiting[-1], None)
        if piece is None:
            waiting.pop()
        elif type(piece) is str:
            pieces.append(piece)
            room -= len(piece)
        else:
            waiting.append(_pieces(piece[0], room))
    text = "".join(pieces)
    return text if len(text) <= max_characters else text[:max_characters] + "…"


def _pieces(value: Any, room: int) -> Iterator[str | tuple[Any]]:
    """The text of a value in pieces; a part whose text is still to be made stands in a tuple of one."""
    kind = type(value)
    if kind not in BRACKETS:
        yield _leaf_text(value, room)
        return
    opening, closing = BRACKETS[kind]
    if not value and kind in (set, frozenset):
        yield f"{kind.__name__}()"
        return
    yield opening
    for place, part in enumerate(value):
        if place:
            yield ", "
        yield (part,)
        if kind is dict:
            yield ": "
            yield (value[part],)
    yield ",)" if kind is tuple and len(value) == 1 else closing


def _leaf_text(value: Any, room: int) -> str:
    kind = type(value)
    if kind in (str, bytes):
        return repr(value[: room + 1])
    if kind is int and value.bit_length() > 4 * (room + 1):
        return f"an int of {value.bit_length()} bits"
    if value is None or kind in (bool, int, float):
        return hex(value) if kind is int and value.bit_length() > 10_000 else repr(value)
    return f"<{kind.__name__}>"

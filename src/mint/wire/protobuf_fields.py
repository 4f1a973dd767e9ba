"""The fields of a protobuf message one after another, without parsing the message.

A parser of whole messages cannot do two things: read the place of a request whose rest is damaged, and count the parts
of a body before it makes objects of them (a part of two bytes costs hundreds in memory). Knows only numbers of fields.
"""

from __future__ import annotations

from collections.abc import Iterator

from mint.errors import InvalidRequestError

MAX_PARTS = 500_000
"""Parts of a message and of its repeated parts; clients send at most 1,024 datums at once."""


def check_parts(body: bytes, name: str, *, repeated: int) -> None:
    """Refuses a body with too many parts; `repeated` is the field whose own parts are counted too.

    Raises:
        InvalidRequestError: more than `MAX_PARTS`.
    """
    left = MAX_PARTS
    for number, value in fields(body):
        left -= 1
        if number == repeated and isinstance(value, memoryview):
            for _ in fields(value):
                left -= 1
                if left < 0:
                    break
        if left < 0:
            raise InvalidRequestError(
                f"has more than {MAX_PARTS} parts",
                field=name,
                value=f"{len(body)} bytes",
                remedy="Send fewer datums at once, and the tokens of a datum as one chunk",
            )


def read_place(body: bytes) -> tuple[str, int] | None:
    """Fields 1 and 2 of a `forward_backward` request (model_id, seq_id), even if the rest is damaged."""
    target_id: str | None = None
    place = 0
    for number, value in fields(body):
        if number == 1 and isinstance(value, memoryview):
            try:
                target_id = bytes(value).decode()
            except UnicodeDecodeError:
                return None
        elif number == 2 and isinstance(value, int):
            place = value if value < 2**63 else value - 2**64
    return None if target_id is None else (target_id, place)


def fields(body: bytes | memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field, up to the first that is cut or of an unknown wire type."""
    view = memoryview(body)
    at = 0
    while at < len(view):
        key, at = _varint(view, at)
        value: int | memoryview
        match key & 7:  # the wire type
            case 0:
                value, at = _varint(view, at)
            case 1:
                value, at = view[at : at + 8], at + 8
            case 2:
                size, at = _varint(view, at)
                value, at = view[at : at + size], at + size
            case 5:
                value, at = view[at : at + 4], at + 4
            case _:
                return
        if at > len(view):
            return
        yield key >> 3, value


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """The number at `at`, and where it ends; an end beyond the view if it is cut or too long."""
    number = shift = 0
    for offset in range(at, min(at + 10, len(view))):
        byte = view[offset]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, offset + 1
        shift += 7
    return 0, len(view) + 1

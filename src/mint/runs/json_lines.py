"""Files of JSON lines that one process appends to while others read them. Knows lines and bytes, no content."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pydantic_core

MAX_DEPTH = 100
MAX_INTEGER_BITS = 10_000
"""Python writes integers of at most 4,300 decimal digits."""


def encode_line(row: Any) -> bytes:
    """One row as UTF-8 with its newline. A value or key that JSON cannot hold becomes its `str`, half a surrogate pair
    `?`, an integer of very many digits hexadecimal text; what is nested too deeply or in itself is left out."""
    try:
        text = json.dumps(row, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        text = json.dumps(_plain(row, frozenset()), ensure_ascii=False)
    return (text + "\n").encode("utf-8", "replace")


def _plain(value: Any, parents: frozenset[int]) -> Any:
    inside = parents | {id(value)}
    if isinstance(value, dict | list | tuple) and (id(value) in parents or len(parents) == MAX_DEPTH):
        return "…"
    if isinstance(value, dict):
        return {str(_plain(key, inside)): _plain(part, inside) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, inside) for part in value]
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > MAX_INTEGER_BITS:
        return hex(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    try:
        return str(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to show"


def decode_lines(lines: Iterable[bytes]) -> list[Any]:
    """The values of complete lines; lines that are not JSON are left out.

    Parses all lines at once, so that equal keys share one string: this saves memory for many small rows. The parser of
    pydantic takes less than half of the time of `json`, which reads what that one refuses: half of a surrogate pair.
    """
    lines = list(lines)
    try:
        return pydantic_core.from_json(b"[" + b",".join(lines) + b"]")
    except ValueError:
        return [value for line in lines for value in _decoded(line)]


def _decoded(line: bytes) -> list[Any]:
    try:
        return [json.loads(line)]
    except ValueError:
        return []


def decode_line(line: bytes) -> Any:
    """The value of one line, as `decode_lines`.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return pydantic_core.from_json(line)
    except ValueError:
        return json.loads(line)


def append_lines(path: Path, lines: Iterable[bytes]) -> int:
    """Appends encoded lines in one write; returns the offset of the first of them."""
    with open(path, "ab", opener=_open_private) as file:
        start = file.tell()
        file.write(b"".join(lines))
    return start


def read_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """The complete lines from a byte offset on; none if there is no file. Leaves out an unfinished last line."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(start)
        yield from _complete(file)


def _complete(file: BinaryIO) -> Iterator[bytes]:
    for line in file:
        if not line.endswith(b"\n"):  # a kill has cut it, or the writer is not done
            return
        yield line


class Tail:
    """Reads one growing file, each time from where it stopped."""

    def __init__(self, path: Path) -> None:
        """The file may be missing."""
        self.path = path
        self.offset = 0
        self.inode: int | None = None

    def poll(self) -> tuple[bool, Iterator[bytes]]:
        """Whether the file was replaced, cut or deleted, so that earlier lines are void; and the new complete lines.

        Read the lines to their end before the next poll.
        """
        try:
            status = self.path.stat()
        except FileNotFoundError:
            is_void = self.inode is not None
            self.inode = None
            self.offset = 0
            return is_void, iter(())
        is_void = self.inode is not None and (status.st_ino != self.inode or status.st_size < self.offset)
        if is_void or self.inode is None:
            self.inode = status.st_ino
            self.offset = 0
        return is_void, iter(()) if status.st_size == self.offset else self._lines()

    def _lines(self) -> Iterator[bytes]:
        for line in read_lines(self.path, self.offset):
            self.offset += len(line)
            yield line


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file atomically: readers see the old or the new content, also after a power failure."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb", opener=_open_private) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _open_private(path: str, flags: int) -> int:
    """Opens a file; one that it makes can be read by its owner alone: runs hold prompts and completions."""
    return os.open(path, flags, 0o600)

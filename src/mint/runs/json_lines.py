"""Files of JSON lines that one process appends to while others read them. Knows lines and bytes, no content."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO


def encode_line(row: Any) -> bytes:
    """One row as UTF-8 with its newline. A value that JSON cannot hold becomes its `str`, half a surrogate pair `?`."""
    return (json.dumps(row, ensure_ascii=False, default=str) + "\n").encode("utf-8", "replace")


def decode_lines(lines: Iterable[bytes]) -> list[Any]:
    """The values of complete lines; lines that are not JSON are left out.

    Parses all lines at once, so that equal keys share one string: this saves memory for many small rows.
    """
    lines = list(lines)
    try:
        return json.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        return [value for line in lines for value in _decoded(line)]


def _decoded(line: bytes) -> list[Any]:
    try:
        return [json.loads(line)]
    except ValueError:
        return []


def append_lines(path: Path, lines: Iterable[bytes]) -> int:
    """Appends encoded lines in one write; returns the offset of the first of them."""
    with path.open("ab") as file:
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
            is_void, self.inode, self.offset = self.inode is not None, None, 0
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
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)

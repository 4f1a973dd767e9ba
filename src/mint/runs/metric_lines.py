"""The metrics of a long log that nobody has read yet, decoded only where they are asked for.

To decode a hundred thousand lines takes most of a second. A page shows a thousand of them and a few numbers about the
whole. This answers the same questions as `MetricColumns` from the places of the lines in the file.
"""

from __future__ import annotations

import json
import math
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mint.runs.damage import read_row
from mint.runs.json_lines import decode_lines
from mint.runs.metric_columns import finite_or_none, thinned

LONG_LOG_BYTES = 8 << 20
BLOCK_BYTES = 4 << 20
PROBES = 64
"""Rows that are decoded to see whether all rows of a log have the same metrics."""

NUMBER = rb"(-?(?:[0-9.eE+-]+|Infinity)|NaN)"


class MetricLines:
    """The complete lines that a log had when it was opened. A damaged line is noticed only where it is decoded."""

    def __init__(self, path: Path, ends: array[int], names: list[str], inode: int) -> None:
        """Use `open`. `ends` are the offsets behind each line."""
        self.path = path
        self.names = names
        self._ends = ends
        self._inode = inode

    @classmethod
    def open(cls, path: Path) -> MetricLines | None:
        """The lines of a log; None if it is short, or if not all of its rows have the same metrics.

        Raises:
            InvalidRequestError: one of the rows that are decoded is damaged.
        """
        try:
            status = path.stat()
        except OSError:
            return None
        if status.st_size < LONG_LOG_BYTES:
            return None
        ends = array("q")
        keys = 0
        for start, block in _blocks(path):
            at = block.find(b"\n")
            while at >= 0:
                ends.append(start + at + 1)
                at = block.find(b"\n", at + 1)
            keys += block.count(b'": ')
        lines = cls(path, ends, [], status.st_ino)
        if not len(lines):
            return None
        probes = [lines.row(place) for place in thinned(0, len(lines), PROBES)]
        lines.names = list(probes[0])
        is_alike = all(
            list(row) == lines.names and all(type(value) in (int, float) for value in row.values()) for row in probes
        )
        return lines if is_alike and keys == len(lines) * len(lines.names) else None

    def is_current(self) -> bool:
        """Whether the log holds these lines and no more."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        return (status.st_ino, status.st_size) == (self._inode, self._ends[-1])

    def __len__(self) -> int:
        return len(self._ends)

    def row(self, place: int) -> dict[str, Any]:
        """One row; a negative place counts from the end.

        Raises:
            InvalidRequestError: it is damaged.
        """
        place %= len(self)
        with self.path.open("rb") as file:
            return read_row(self.path, self._line(file.fileno(), place))

    def places(self, since: float = 0, until: float = math.inf, most: int | None = None) -> Sequence[int]:
        """As `MetricColumns.places`."""
        return thinned(self._after(since), self._after(until), most)

    def column(self, name: str, places: Sequence[int] | None = None) -> list[float | None]:
        """As `MetricColumns.column`."""
        return self.columns([name], places)[name]

    def columns(self, names: Sequence[str], places: Sequence[int] | None = None) -> dict[str, list[float | None]]:
        """One list per name, as `column`."""
        if places is None or len(places) == len(self):
            return {name: self._whole_column(name) for name in names}
        return self._decoded(names, places)

    def _decoded(self, names: Sequence[str], places: Sequence[int]) -> dict[str, list[float | None]]:
        with self.path.open("rb") as file:
            rows = decode_lines(self._line(file.fileno(), place) for place in places)
        return {name: [finite_or_none(row.get(name)) for row in rows] for name in names}

    def _whole_column(self, name: str) -> list[float | None]:
        if name not in self.names:
            return [None] * len(self)
        # A quote inside a JSON string is escaped, so these bytes are a key wherever they occur.
        pattern = re.compile(re.escape(json.dumps(name, ensure_ascii=False).encode() + b": ") + NUMBER)
        found: list[float] = []
        for _, block in _blocks(self.path, self._ends[-1]):
            found += map(float, pattern.findall(block))
        if len(found) != len(self):  # a writer that escapes more than it must writes other bytes for the same name
            return self._decoded([name], range(len(self)))[name]
        return list(found) if math.isfinite(sum(found)) else [finite_or_none(value) for value in found]

    def _after(self, step: float) -> int:
        return bisect_right(range(len(self)), step, key=lambda place: self.row(place)["step"])

    def _line(self, file: int, place: int) -> bytes:
        start = self._ends[place - 1] if place else 0
        return os.pread(file, self._ends[place] - start, start)


def _blocks(path: Path, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """The complete lines of a file up to an offset, in blocks of some megabytes: the offset of each block, and its
    bytes."""
    start = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            block += file.readline()
            if end is not None and start + len(block) > end:
                block = block[: end - start]
            lines = block[: block.rfind(b"\n") + 1]
            if lines:
                yield start, lines
            start += len(block)

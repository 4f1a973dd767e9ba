"""The index of a run's rollouts: where each row lies in `rollouts.jsonl`, and the few numbers that one asks for.

Written a line per step by `RunLog`; read into one table, at most 64 bytes per rollout. What the index does not cover (a
run from before there was one, a kill between the two files) is scanned, and nothing of it is kept but the numbers.
Knows nothing of prompts and texts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from mint.runs.json_lines import Tail, read_lines

ROLLOUTS, INDEX = "rollouts.jsonl", "rollouts.index.jsonl"

FLAGS: Mapping[str, int] = {
    "truncated": 1,
    "error": 2,
    "timed_out": 4,
    "unsupported": 8,
    "used": 16,
    "duplicate": 32,
    "no_signal": 64,
    "tool_calls": 128,
}
"""What can be asked of a rollout, as bits. `error`: not graded · `used`: trained on · `duplicate`: says the same as an
earlier rollout of the step · `no_signal`: its group's rewards are all equal · `tool_calls`: made at least one."""

TABLE_ROW = np.dtype(
    [
        ("reward", "f8"),
        ("advantage", "f8"),
        ("offset", "i8"),
        ("size", "i4"),
        ("step", "i4"),
        ("row", "i4"),
        ("group", "i4"),
        ("item", "i4"),
        ("length", "i4"),
        ("flags", "u1"),
    ],
    align=True,
)
"""A rollout in the table: 56 bytes. `reward` and `advantage` are NaN where there is none; `offset` and `size` are the
place of its line; `row` is its place among the lines of its step."""

BATCH_LINES, BATCH_ROWS = 256, 16_384
COLUMNS = ("group", "item", "reward", "advantage", "length", "flags", "size")
_LINE = re.compile(
    rb'\{"step": (?P<step>\d+), "start": (?P<start>\d+), "end": (?P<end>\d+), '
    + b", ".join(rb'"%s": \[(?P<%s>[^\]]+)\]' % (name.encode(), name.encode()) for name in COLUMNS)
    + rb"\}\n"
)
"""A line of the index as `index_line` and JSON write it: read a few times faster than as JSON."""


def flag_names(bits: int) -> list[str]:
    """The names of the bits that are set."""
    return [name for name, bit in FLAGS.items() if bits & bit]


def index_line(step: int, rows: Sequence[Mapping[str, Any]], sizes: Sequence[int], start: int) -> dict[str, Any]:
    """The line of one step, whose rows lie from `start` on in lines of `sizes` bytes."""
    rewards: dict[Any, set[float]] = {}
    for row in rows:
        if row.get("reward") is not None:
            rewards.setdefault(row["group"], set()).add(row["reward"])
    said: set[str] = set()
    flags = []
    for row in rows:
        text = row.get("text")
        flags.append(_bits(row, is_duplicate=text in said, no_signal=len(rewards.get(row["group"], ())) == 1))
        if text is not None:
            said.add(text)
    return {
        "step": step,
        "start": start,
        "end": start + sum(sizes),
        "group": [row["group"] for row in rows],
        "item": [row["item"] for row in rows],
        "reward": [row.get("reward") for row in rows],
        "advantage": [row.get("advantage") for row in rows],
        "length": [len(row.get("tokens") or ()) for row in rows],
        "flags": flags,
        "size": list(sizes),
    }


def _bits(row: Mapping[str, Any], *, is_duplicate: bool, no_signal: bool) -> int:
    answers: dict[str, Any] = {
        "truncated": row.get("truncated"),
        "error": row.get("reward") is None,
        "timed_out": row.get("timed_out"),
        "unsupported": row.get("unsupported"),
        "used": row.get("used"),
        "duplicate": is_duplicate,
        "no_signal": no_signal,
        "tool_calls": row.get("tool_calls"),
    }
    return sum(bit for name, bit in FLAGS.items() if bool(answers[name]))


def light_row(line: bytes) -> dict[str, Any]:
    """A row of `rollouts.jsonl` in a fraction of the time and memory: its `tokens` are a range as long as they are, and
    its `logprobs` empty, where both stand next to each other as they are written.

    A quote within a JSON string is escaped, so a key with its quotes is found nowhere but where it is one.

    Raises:
        ValueError: the line is not JSON.
    """
    first = line.find(b', "tokens": [')
    if first < 0:
        return json.loads(line)
    opened = first + len(b', "tokens": [')
    closed = line.find(b"]", opened)
    follows = b'], "logprobs": ['
    if closed < 0 or not line.startswith(follows, closed):
        return json.loads(line)
    last = line.find(b"]", closed + len(follows))
    row = json.loads(line[:first] + line[last + 1 :])
    length = line.count(b",", opened, closed) + 1 if closed > opened else 0
    return {**row, "tokens": range(length), "logprobs": ()}


def scan(path: Path, start: int = 0) -> Iterator[tuple[int, list[dict[str, Any]], list[int], int]]:
    """The steps of `rollouts.jsonl` from an offset on, one at a time: step, light rows, sizes of their lines, offset.

    Stops where a line cannot be read; what comes after it is of no known step.
    """
    step, rows, sizes, first = 0, [], [], start
    for line in read_lines(path, start):
        try:
            row = light_row(line)
            at = int(row["step"])
        except (ValueError, KeyError, TypeError):
            break
        if rows and at != step:
            yield step, rows, sizes, first
            rows, sizes, first = [], [], first + sum(sizes)
        step = at
        rows.append(row)
        sizes.append(len(line))
    if rows:
        yield step, rows, sizes, first


@dataclass(frozen=True)
class StepSpan:
    """Where the rows of a step lie: bytes `start` to `end`, and `count` rows of the table from `first` on."""

    start: int
    end: int
    first: int
    count: int


@dataclass
class _Pending:
    """Rows on their way into the table, as lists: converted a few thousand at once."""

    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in TABLE_ROW.names or ()})

    def add(self, line: Mapping[str, Any]) -> int:
        count = len(line["group"])
        for name in COLUMNS:
            self.columns[name] += line[name]
        self.columns["step"] += [line["step"]] * count
        self.columns["row"] += range(count)
        self.columns["offset"] += accumulate(line["size"][:-1], initial=line["start"]) if count else ()
        return count

    def __len__(self) -> int:
        return len(self.columns["step"])


class RolloutTable:
    """All rollouts of a run as one table, brought up to date by `refresh`. Not for several threads at once."""

    def __init__(self, folder: Path) -> None:
        """Reads nothing yet."""
        self.folder = folder
        self._index = Tail(folder / INDEX)
        self._clear()

    def _clear(self) -> None:
        self._table: np.ndarray = np.empty(0, TABLE_ROW)
        self.count = 0
        self.spans: dict[int, StepSpan] = {}
        self.generation = getattr(self, "generation", 0) + 1
        self._is_trusted = True
        self._indexed_rows = self._indexed_end = 0
        self._size, self._inode = 0, None
        self._scanned_size = self._open_start = self._open_first = 0
        self._open_step: int | None = None

    @property
    def rows(self) -> np.ndarray:
        """`TABLE_ROW` of every rollout, in the order of the file; valid until the next refresh."""
        return self._table[: self.count]

    def restart(self) -> None:
        """Forgets everything; the next refresh reads from the beginning."""
        self._index = Tail(self.folder / INDEX)
        self._clear()

    def refresh(self) -> None:
        """Takes in what was written since the last time."""
        is_void, lines = self._index.poll()
        size, inode = self._status()
        if is_void or size < self._size or (self._inode is not None and inode != self._inode):
            self.restart()
            _, lines = self._index.poll()
            size, inode = self._status()
        self._size, self._inode = size, inode
        self._take_index(lines)
        if self._size != self._scanned_size:
            self._take_rest(self._size)

    def _status(self) -> tuple[int, int | None]:
        try:
            status = (self.folder / ROLLOUTS).stat()
        except FileNotFoundError:
            return 0, None
        return status.st_size, status.st_ino

    def _take_index(self, lines: Iterable[bytes]) -> None:
        batch: list[re.Match[bytes]] = []
        end = self._indexed_end
        for text in lines:
            line = _LINE.fullmatch(text) if self._is_trusted else None
            if line is not None and int(line["end"]) > self._size:
                self._size, _ = self._status()  # it has grown meanwhile; else a line without its rows has lost them
            if line is None or int(line["start"]) != end or int(line["end"]) > self._size:
                self._is_trusted = False  # the rest is scanned
                continue
            batch.append(line)
            end = int(line["end"])
            if len(batch) == BATCH_LINES:
                self._put_index(batch)
                batch = []
        if batch and self._indexed_end == int(batch[0]["start"]):
            self._put_index(batch)

    def _put_index(self, batch: Sequence[re.Match[bytes]]) -> None:
        """Takes in lines that follow one another; none of them, and no later ones, if they contradict themselves."""
        counts = [line["size"].count(b",") + 1 for line in batch]
        try:
            found = {name: _numbers(batch, name) for name in COLUMNS}
        except ValueError:
            found = {"size": np.empty(0)}
        ends = self._indexed_end + np.cumsum(found["size"])
        whole = {len(column) for column in found.values()} == {sum(counts)}
        if not whole or [int(line["end"]) for line in batch] != ends[np.cumsum(counts) - 1].tolist():
            self._is_trusted = False
            return
        if self.count > self._indexed_rows:
            self._drop_scanned()
        steps = [int(line["step"]) for line in batch]
        first = self.count
        for step, line, count in zip(steps, batch, counts, strict=True):
            self.spans[step] = StepSpan(int(line["start"]), int(line["end"]), first, count)
            first += count
        rows = np.concatenate([np.arange(count) for count in counts])
        self._put({**found, "step": np.repeat(steps, counts), "row": rows, "offset": ends - found["size"]})
        self._indexed_rows, self._indexed_end = self.count, int(ends[-1])

    def _drop_scanned(self) -> None:
        self.count = self._indexed_rows
        self.spans = {step: span for step, span in self.spans.items() if span.first < self.count}
        self._open_step = None
        self._scanned_size = 0

    def _take_rest(self, size: int) -> None:
        """Scans what no index line covers. The last step stays open: it is read again when there is more of it."""
        start = self._indexed_end
        if self._open_step is not None:
            start, self.count = self._open_start, self._open_first
            del self.spans[self._open_step]
            self._open_step = None
        pending = _Pending()
        for step, rows, sizes, first in scan(self.folder / ROLLOUTS, start):
            line = index_line(step, rows, sizes, first)
            self._open_step, self._open_start, self._open_first = step, first, self.count + len(pending)
            self.spans[step] = StepSpan(first, line["end"], self._open_first, pending.add(line))
            if len(pending) >= BATCH_ROWS:
                self._put(pending.columns)
                pending = _Pending()
        self._put(pending.columns)
        self._scanned_size = size

    def _put(self, columns: Mapping[str, Sequence[Any] | np.ndarray]) -> None:
        needed = self.count + len(columns["step"])
        if needed > len(self._table):
            table: np.ndarray = np.empty(needed + needed // 8, TABLE_ROW)
            table[: self.count] = self.rows
            self._table = table
        for name, values in columns.items():
            self._table[name][self.count : needed] = np.asarray(values, dtype=self._table[name].dtype)
        self.count = needed


class _Floats(dict[bytes, float]):
    """What some text is as a number; most rewards and advantages of a run are the same few."""

    def __missing__(self, text: bytes) -> float:
        self[text] = math.nan if text == b"null" else float(text)
        return self[text]


def _numbers(batch: Sequence[re.Match[bytes]], name: str) -> np.ndarray:
    """A column over some lines.

    Raises:
        ValueError: it holds something else than numbers.
    """
    text = b", ".join(line[name] for line in batch)
    if name in ("reward", "advantage"):
        return np.asarray(list(map(_Floats().__getitem__, text.split(b", "))), dtype=np.float64)
    if text.translate(None, b"0123456789, -"):
        raise ValueError(f"{name} holds something else than whole numbers")
    return np.fromstring(text.decode(), dtype=np.int64, sep=",")


def index_row(line: bytes) -> dict[str, Any] | None:
    """A line of the index, None where it is not one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not row.keys() >= {"step", "start", "end", *COLUMNS}:
        return None
    return (
        row
        if len({len(row[name]) for name in COLUMNS}) == 1 and row["start"] + sum(row["size"]) == row["end"]
        else None
    )

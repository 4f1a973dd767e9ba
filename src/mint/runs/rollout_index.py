"""The index of a run's rollouts: where each one lies in `rollouts.jsonl`, and the numbers to filter and sort by.

`rollouts.index` holds one `ENTRY` per rollout, appended step by step by `RunLog` after the rows themselves. A reader
keeps these entries in memory and nothing else of a rollout. Rows that the index does not cover (a kill came between the
two writes, or an older version of mint wrote the run) are scanned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mint.runs.rollout_lines import ROLLOUTS, scan_steps

INDEX = "rollouts.index"

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
"""Properties of a rollout that can be filtered by, as bits. `error`: it has no reward · `used`: trained on ·
`duplicate`: an earlier rollout of the step has the same text · `no_signal`: all rewards of its group are equal ·
`tool_calls`: it made at least one."""

ENTRY = np.dtype(
    [
        ("reward", "<f8"),
        ("advantage", "<f8"),
        ("offset", "<i8"),
        ("size", "<i4"),
        ("step", "<i4"),
        ("row", "<i4"),
        ("step_rows", "<i4"),
        ("group", "<i4"),
        ("item", "<i4"),
        ("length", "<i4"),
        ("flags", "<u4"),
    ]
)
"""One rollout, 56 bytes without gaps. `reward` and `advantage` are NaN where there is none. `offset` and `size` locate
its line, in bytes. `row` counts the rollouts of its step from 0, `step_rows` is how many the step has. `length` is in
tokens."""


def flag_names(bits: int) -> list[str]:
    """The names of the bits that are set."""
    return [name for name, bit in FLAGS.items() if bits & bit]


def step_entries(step: int, rows: Sequence[Mapping[str, Any]], sizes: Sequence[int], start: int) -> np.ndarray:
    """The entries [R] of one step, whose R rows are lines of `sizes` bytes from offset `start` on."""
    entries: np.ndarray = np.zeros(len(rows), ENTRY)
    ends = start + np.cumsum(sizes, dtype=np.int64)
    entries["offset"] = ends - sizes
    entries["size"] = sizes
    entries["step"] = step
    entries["row"] = np.arange(len(rows))
    entries["step_rows"] = len(rows)
    entries["group"] = [row["group"] for row in rows]
    entries["item"] = [row["item"] for row in rows]
    # numpy turns None into NaN.
    entries["reward"] = np.array([row.get("reward") for row in rows], dtype=np.float64)
    entries["advantage"] = np.array([row.get("advantage") for row in rows], dtype=np.float64)
    entries["length"] = [len(row.get("tokens") or ()) for row in rows]
    entries["flags"] = _flags(rows)
    return entries


def _flags(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    rewards: dict[Any, set[float]] = {}
    for row in rows:
        if row.get("reward") is not None:
            rewards.setdefault(row["group"], set()).add(row["reward"])
    texts: set[str] = set()
    found = []
    for row in rows:
        text = row.get("text")
        properties = {
            "truncated": row.get("truncated"),
            "error": row.get("reward") is None,
            "timed_out": row.get("timed_out"),
            "unsupported": row.get("unsupported"),
            "used": row.get("used"),
            "duplicate": text in texts,
            "no_signal": len(rewards.get(row["group"], ())) == 1,
            "tool_calls": row.get("tool_calls"),
        }
        found.append(sum(bit for name, bit in FLAGS.items() if bool(properties[name])))
        if text is not None:
            texts.add(text)
    return found


def valid_entries(entries: np.ndarray, start: int, size: int) -> np.ndarray:
    """The leading entries that are right: whole steps that follow one another from byte `start` on, up to `size`."""
    ends = start + np.cumsum(entries["size"], dtype=np.int64)
    rows = entries["row"]
    # The first row of a step follows the last row of the step before it; every other one follows its neighbour.
    follows = np.append(0, np.where(rows[:-1] == entries["step_rows"][:-1] - 1, 0, rows[:-1] + 1))[: len(rows)]
    right = (entries["offset"] == ends - entries["size"]) & (entries["size"] > 0) & (ends <= size) & (rows == follows)
    count = len(entries) if right.all() else int(np.argmin(right))
    last_rows = np.flatnonzero(rows[:count] == entries["step_rows"][:count] - 1)
    return entries[: last_rows[-1] + 1 if len(last_rows) else 0]


class RolloutIndex:
    """The entries of all rollouts of a run, brought up to date by `refresh`. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Reads nothing yet."""
        self.folder = folder
        self._restart()

    def _restart(self) -> None:
        self.entries: np.ndarray = np.empty(0, ENTRY)
        self._indexed_count = 0
        self._inodes: tuple[int | None, int | None] = (None, None)
        self._index_size = 0
        self._rollouts_size = 0

    def refresh(self) -> None:
        """Takes in what was written since the last time; starts over if a file was replaced or became shorter."""
        # The index comes first: rows are written before their entries, so every entry read has its row.
        index_size, index_inode = _status(self.folder / INDEX)
        rollouts_size, rollouts_inode = _status(self.folder / ROLLOUTS)
        inodes = index_inode, rollouts_inode
        was_replaced = any(known not in (None, inode) for known, inode in zip(self._inodes, inodes, strict=True))
        if was_replaced or index_size < self._index_size or rollouts_size < self._rollouts_size:
            self._restart()
        if (index_size, rollouts_size) == (self._index_size, self._rollouts_size):
            return
        self._inodes = inodes
        self._index_size = index_size
        self._rollouts_size = rollouts_size
        indexed = self.entries[: self._indexed_count]
        new = valid_entries(self._read_index(index_size), _end(indexed), rollouts_size)
        self._indexed_count += len(new)
        indexed = _joined([indexed, new])
        scanned = [
            step_entries(step, rows, sizes, start)
            for step, rows, sizes, start in scan_steps(self.folder / ROLLOUTS, _end(indexed))
        ]
        self.entries = _joined([indexed, *scanned])

    def _read_index(self, size: int) -> np.ndarray:
        """The entries after those that are known, of an index of `size` bytes; an unfinished one is left out."""
        count = size // ENTRY.itemsize - self._indexed_count
        if count <= 0:
            return np.empty(0, ENTRY)
        return np.fromfile(self.folder / INDEX, dtype=ENTRY, count=count, offset=self._indexed_count * ENTRY.itemsize)

    def steps(self) -> list[int]:
        """The steps that have rollouts, in order."""
        steps = self.entries["step"]
        first_of_each = np.append(True, steps[1:] != steps[:-1])[: len(steps)]
        return np.unique(steps[first_of_each]).tolist()

    def of_step(self, step: int) -> np.ndarray:
        """The entries of one step, in the order of the file."""
        return self.entries[self.entries["step"] == step]


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The parts as one array; a single part that is not empty is not copied."""
    filled = [part for part in parts if len(part)]
    return filled[0] if len(filled) == 1 else np.concatenate(parts)


def _end(entries: np.ndarray) -> int:
    return int(entries["offset"][-1] + entries["size"][-1]) if len(entries) else 0


def _status(path: Path) -> tuple[int, int | None]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0, None
    return status.st_size, status.st_ino

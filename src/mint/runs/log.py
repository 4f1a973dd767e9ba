"""A run is a folder. This file writes and reads it; it does not know what the numbers mean.

config.json       the settings, and what the run is (task, base model, held-out set)
metrics.jsonl     one line per step
rollouts.jsonl    one line per completion of every step
rollouts.index.jsonl  one line per step: where its rows lie in rollouts.jsonl, and the numbers that one asks for
tokens.jsonl      one line per token id, in the step that first sampled it: its text
evaluations.jsonl one line per reading of the held-out set; `step` is that of the weights that were read
findings.jsonl    one line per finding: what looked wrong, the evidence, a remedy
warnings.jsonl    one line per warning of the server about the datums of a step
checkpoints.jsonl one line per saved step
state.json        the last resumable step and its checkpoint; replaced atomically
process.json      who runs it, since when, and how it ended; replaced atomically
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mint.errors import InvalidRequestError
from mint.runs.index import INDEX, ROLLOUTS, index_line, index_row, scan
from mint.runs.json_lines import append_lines, encode_line, read_lines, replace_file

STEP_LOGS = (
    "metrics.jsonl",
    "tokens.jsonl",
    "evaluations.jsonl",
    "findings.jsonl",
    "warnings.jsonl",
    "checkpoints.jsonl",
)
"""The logs whose lines name a step, besides the rollouts and their index."""


@dataclass(frozen=True)
class ResumePoint:
    """Where a run can go on: `step` is done and saved at `checkpoint`; `totals` are the counters up to there, `state`
    is what the run must remember besides its weights."""

    step: int
    checkpoint: str
    totals: Mapping[str, float]
    state: Mapping[str, Any] = field(default_factory=dict)


class RunLog:
    """Appends to one run folder."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder if it is missing."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, config: Mapping[str, Any], *, resume: bool) -> ResumePoint | None:
        """Opens the run: writes its config, or finds where to resume and drops what was logged after that point.

        Raises:
            InvalidRequestError: the folder holds a run and `resume` is False, or a run of another config.
        """
        path = self.folder / "config.json"
        if not path.exists():
            replace_file(path, json.dumps(config, indent=2, default=str).encode())
            return None
        if not resume:
            raise InvalidRequestError(
                "holds a run already",
                field="run_dir",
                value=str(self.folder),
                remedy="Pass resume=True to go on with it, or another run_dir",
            )
        self._check_same(json.loads(path.read_text()), json.loads(json.dumps(config, default=str)))
        point = self._read_state()
        self._drop_after(point.step if point else 0)
        return point

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """One JSON line to `name`."""
        self.append_all(name, [row])

    def append_all(self, name: str, rows: list[Any]) -> None:
        """Several JSON lines to `name`, in one write."""
        if rows:
            append_lines(self.folder / name, map(encode_line, rows))

    def append_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """All rows of one step, and then its line of the index: whoever finds that line finds the rows, too."""
        if not rows:
            return
        lines = [encode_line(row) for row in rows]
        start = append_lines(self.folder / ROLLOUTS, lines)
        self.append(INDEX, index_line(step, rows, [len(line) for line in lines], start))

    def read(self, name: str) -> list[dict[str, Any]]:
        """All complete lines of `name`."""
        return [json.loads(line) for line in read_lines(self.folder / name)]

    def save_point(self, point: ResumePoint) -> None:
        """Marks a step as resumable; call it once its checkpoint is durable."""
        state = {**vars(point), "totals": dict(point.totals), "state": dict(point.state)}
        replace_file(self.folder / "state.json", json.dumps(state).encode())

    def _read_state(self) -> ResumePoint | None:
        path = self.folder / "state.json"
        return ResumePoint(**json.loads(path.read_text())) if path.exists() else None

    def _check_same(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        if changed:
            raise InvalidRequestError(
                "belongs to a run with another " + ", ".join(changed),
                field="run_dir",
                value=str(self.folder),
                remedy="Resume with the settings in its config.json, or start a new run_dir",
            )

    def _drop_after(self, step: int) -> None:
        self._cut_rollouts(step)
        for name in STEP_LOGS:
            path = self.folder / name
            if path.exists():
                kept = [line for line in read_lines(path) if json.loads(line)["step"] <= step]
                replace_file(path, b"".join(kept))

    def _cut_rollouts(self, step: int) -> None:
        """Cuts the rollouts after a step, and writes an index of what is left: from the one there is as far as it is
        right, for a kill may have come between the two files, and from the rows themselves where it is not."""
        path = self.folder / ROLLOUTS
        if not path.exists():
            return
        size, end = path.stat().st_size, 0
        kept: list[bytes] = []
        for text in read_lines(self.folder / INDEX):
            line = index_row(text)
            if line is None or line["start"] != end or line["end"] > size or line["step"] > step:
                break
            kept.append(text)
            end = line["end"]
        for at, rows, sizes, start in scan(path, end):
            if at > step:
                break
            kept.append(encode_line(index_line(at, rows, sizes, start)))
            end = start + sum(sizes)
        os.truncate(path, end)
        replace_file(self.folder / INDEX, b"".join(kept))

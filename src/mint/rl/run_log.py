"""A run is a folder. This file writes and reads it; it does not know what the numbers mean.

config.json       the settings, and what the run is (task, base model, held-out set)
metrics.jsonl     one line per step
rollouts.jsonl    one line per completion of every step
evaluations.jsonl one line per reading of the held-out set; `step` is that of the weights that were read
findings.jsonl    one line per finding: what looked wrong, the evidence, a remedy
warnings.jsonl    one line per warning of the server about the datums of a step
checkpoints.jsonl one line per saved step
state.json        the last resumable step and its checkpoint; replaced atomically
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mint.errors import InvalidRequestError

STEP_LOGS = (
    "metrics.jsonl",
    "rollouts.jsonl",
    "evaluations.jsonl",
    "findings.jsonl",
    "warnings.jsonl",
    "checkpoints.jsonl",
)


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
            _replace(path, json.dumps(config, indent=2, default=str))
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
        if not rows:
            return
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))

    def read(self, name: str) -> list[dict[str, Any]]:
        """All complete lines of `name`."""
        return list(_lines(self.folder / name))

    def save_point(self, point: ResumePoint) -> None:
        """Marks a step as resumable; call it once its checkpoint is durable."""
        state = {**vars(point), "totals": dict(point.totals), "state": dict(point.state)}
        _replace(self.folder / "state.json", json.dumps(state))

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
        for name in STEP_LOGS:
            path = self.folder / name
            if path.exists():
                kept = [row for row in _lines(path) if row["step"] <= step]
                _replace(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):  # a kill may have cut the last line; it is rewritten on resume
                yield json.loads(line)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)

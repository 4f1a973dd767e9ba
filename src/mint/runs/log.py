"""The folder of a run: what is in it, and how it is written, resumed and read back. Knows no metric by name.

config.json        the settings, and what the run is (task, base model, held-out set)
effective.json     what the server computes with: implementation, dtype, device, lora; of the latest process
metrics.jsonl      one line per step
rollouts.jsonl     one line per completion of every step
rollouts.index     56 bytes per line of rollouts.jsonl: where it lies, and the numbers to filter by (`rollout_index`)
tokens.jsonl       one line per token id, in the step that first sampled it: its text
evaluations.jsonl  one line per evaluation on the held-out set; `step` is the step of the weights
findings.jsonl     one line per finding: what looks wrong, the evidence, a remedy
warnings.jsonl     one line per warning of the server about the datums of a step
checkpoints.jsonl  one line per saved step
state.json         the last resumable step and its checkpoint; replaced atomically
labels.json        what a person says about it: title, tags, note, archived (`labels`); replaced atomically
stop_request       there while the run was asked to end after its step (`interrupt`)
process.json       the process that runs it, since when, and how it ended; replaced atomically
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mint.errors import InvalidRequestError
from mint.runs.damage import read_config, read_row, read_state
from mint.runs.json_lines import append_lines, encode_line, read_lines, replace_file
from mint.runs.rollout_index import INDEX, RolloutIndex, step_entries
from mint.runs.rollout_lines import ROLLOUTS

CONFIG = "config.json"
EFFECTIVE = "effective.json"

STEP_LOGS = (
    "metrics.jsonl",
    "tokens.jsonl",
    "evaluations.jsonl",
    "findings.jsonl",
    "warnings.jsonl",
    "checkpoints.jsonl",
    "timeline.jsonl",
)
"""The logs whose lines have a `step`; a resume drops the lines after its checkpoint."""


@dataclass(frozen=True)
class ResumePoint:
    """Where a run can be resumed: `step` is done and saved at `checkpoint`. `totals` are the counters up to there,
    `state` is whatever else the run needs besides its weights."""

    step: int
    checkpoint: str
    totals: Mapping[str, float]
    state: Mapping[str, Any] = field(default_factory=dict)


DATA_SOURCE = "data_source"
"""In the config.json of a supervised run: the `recipe` of `mint train` and the `arguments` that make its data. A digest
of the data decides whether two runs have the same."""

OTHER_SETTINGS = "belongs to a run with another value of"
"""How the refusal of a resume with changed settings begins."""

NOT_COMPARED = frozenset({DATA_SOURCE, "print_samples"})
"""What may differ between a run and the process that resumes it."""


def is_run(folder: Path) -> bool:
    """Whether a run was started in a folder. The folder of a base model has a file of this name, too, but its
    `model_type` is no setting of a run."""
    path = folder / CONFIG
    if not path.is_file():
        return False
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):  # a damaged run is one: its commands name the file
        return True
    return not isinstance(content, dict) or "model_type" not in content


class RunLog:
    """Appends to one run folder."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder and those above it if they are missing, for their owner alone.

        Raises:
            InvalidRequestError: it cannot be made.
        """
        self.folder = folder
        try:
            for missing in (*reversed(folder.parents), folder):  # `parents=True` would make them with the umask's mode
                if not missing.is_dir():
                    missing.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise InvalidRequestError(
                f"cannot be made ({error.strerror})",
                field="run_dir",
                value=str(folder),
                remedy="Name a folder that you may write, on a disk with free space",
            ) from error

    def start(self, config: Mapping[str, Any], *, resume: bool) -> ResumePoint | None:
        """Writes the config of a new run and returns None; or drops what a run logged after its last checkpoint, and
        returns that point (None if it has no checkpoint: the run starts at its first step).

        Raises:
            InvalidRequestError: the folder holds a run and `resume` is False, a run with other settings, a base model,
                or a damaged file.
        """
        path = self.folder / CONFIG
        if not path.exists():
            replace_file(path, json.dumps(config, indent=2, default=str).encode())
            return None
        if not is_run(self.folder):
            raise InvalidRequestError(
                "holds a base model", field="run_dir", value=str(self.folder), remedy="Name another folder"
            )
        if not resume:
            raise InvalidRequestError(
                "already holds a run",
                field="run_dir",
                value=str(self.folder),
                remedy="Pass resume=True (--resume on the command line) to continue it, or another run_dir",
            )
        self._check_same(read_config(self.folder), json.loads(json.dumps(config, default=str)))
        point = self._read_state()
        self._drop_after(point.step if point else 0)
        return point

    def save_effective(self, settings: Mapping[str, Any]) -> None:
        """Writes the settings that took effect on the server, as `get_info` has them."""
        replace_file(self.folder / EFFECTIVE, json.dumps(settings, indent=2, default=str).encode())

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """One JSON line to `name`."""
        self.append_all(name, [row])

    def append_all(self, name: str, rows: list[Any]) -> None:
        """Several JSON lines to `name`, in one write."""
        if rows:
            append_lines(self.folder / name, map(encode_line, rows))

    def append_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """All rows of one step, then their index entries: an entry that a reader finds always has its row."""
        if not rows:
            return
        lines = [encode_line(row) for row in rows]
        start = append_lines(self.folder / ROLLOUTS, lines)
        entries = step_entries(step, rows, [len(line) for line in lines], start)
        append_lines(self.folder / INDEX, [entries.tobytes()])

    def read(self, name: str) -> list[dict[str, Any]]:
        """All complete lines of `name`."""
        return [json.loads(line) for line in read_lines(self.folder / name)]

    def save_point(self, point: ResumePoint) -> None:
        """Makes a step the one to resume from. Call it after its checkpoint is durable."""
        state = {**vars(point), "totals": dict(point.totals), "state": dict(point.state)}
        replace_file(self.folder / "state.json", json.dumps(state).encode())

    def _read_state(self) -> ResumePoint | None:
        path = self.folder / "state.json"
        return ResumePoint(**read_state(path)) if path.exists() else None

    def _check_same(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        # A setting that the folder does not have is newer than its run, which was made with the default.
        changed = sorted(
            key for key, value in before.items() if key not in NOT_COMPARED and not _is_same(key, value, now.get(key))
        )
        if changed:
            told = "; of ".join(f"`{key}`: {before[key]}, not {now.get(key)}" for key in changed)
            raise InvalidRequestError(
                f"{OTHER_SETTINGS} {told}",
                field="run_dir",
                value=str(self.folder),
                remedy="Resume with the settings in its config.json, or start a new run_dir; init_from goes on from "
                "the last checkpoint of this run",
            )

    def _drop_after(self, step: int) -> None:
        paths = [path for name in STEP_LOGS if (path := self.folder / name).exists()]
        # All are read before the first is changed: a damaged one refuses the resume.
        kept = {path: [line for line in read_lines(path) if read_row(path, line)["step"] <= step] for path in paths}
        self._cut_rollouts(step)
        for path, lines in kept.items():
            replace_file(path, b"".join(lines))

    def _cut_rollouts(self, step: int) -> None:
        """Cuts the rollouts after a step and rewrites the index, which a kill may have left shorter than the rows."""
        path = self.folder / ROLLOUTS
        if not path.exists():
            return
        index = RolloutIndex(self.folder)
        index.refresh()
        later = np.flatnonzero(index.entries["step"] > step)
        entries = index.entries[: later[0]] if len(later) else index.entries
        end = int(entries["offset"][-1] + entries["size"][-1]) if len(entries) else 0
        os.truncate(path, end)
        replace_file(self.folder / INDEX, entries.tobytes())


def _is_same(setting: str, before: object, now: object) -> bool:
    """Whether two values of a setting are the same: a folder or file of a base model may be written in two ways."""
    if before == now:
        return True
    if setting != "base_model" or not isinstance(before, str) or not isinstance(now, str):
        return False
    try:
        place = Path(now).expanduser().resolve()
        return place.exists() and place == Path(before).expanduser().resolve()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL byte, or `~` of an unknown user
        return False

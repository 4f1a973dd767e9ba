"""Recognizes a damaged run folder, and says which file to mend."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mint.errors import InvalidRequestError, NotFoundError

TEXTS: Mapping[str, tuple[str, ...]] = {
    "evaluations.jsonl": ("when",),
    "findings.jsonl": ("code", "severity", "evidence", "remedy"),
    "checkpoints.jsonl": ("checkpoint",),
    "warnings.jsonl": ("warning",),
    "state.json": ("checkpoint",),
}
"""The fields that are text in every row of a log. Each row also has a number as `step`."""

LARGEST_STEP = 2**53
SHOWN_CHARACTERS = 100


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a run folder.

    Raises:
        NotFoundError: the folder holds no run.
        InvalidRequestError: the file is damaged.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise NotFoundError(
            "holds no run", field="run", value=str(folder), remedy="Name a run folder: the one with config.json in it"
        )
    remedy = f"Restore it from a copy, or remove the folder {folder}"
    config = read_object(path, remedy=remedy)
    steps = config.get("steps")
    if steps is not None and not isinstance(steps, int):
        raise _damaged(path, f"has {json.dumps(steps)[:SHOWN_CHARACTERS]} as `steps`, which is no number", remedy)
    return config


def read_object(path: Path, *, remedy: str) -> dict[str, Any]:
    """The JSON object in a file of a run.

    Raises:
        InvalidRequestError: the file cannot be read, or holds something else. `remedy` says what to do then.
    """
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _damaged(path, f"cannot be read ({error})", remedy) from error
    if not isinstance(found, dict):
        raise _damaged(path, f"holds {json.dumps(found)[:SHOWN_CHARACTERS]}, which is no JSON object", remedy)
    return found


def check_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Checks rows of the log at `path`.

    Raises:
        InvalidRequestError: a row has no number as `step`, or lacks a text that every row of this log has.
    """
    texts = TEXTS.get(path.name, ())
    for row in rows:
        step = row.get("step")
        # NaN and the infinities are not between the bounds.
        if not isinstance(step, int | float) or not -LARGEST_STEP < step < LARGEST_STEP:
            raise _damaged_row(path, row, "has no number as `step`")
        for name in texts:
            if not isinstance(row.get(name), str):
                raise _damaged_row(path, row, f"has no text as `{name}`")


def read_row(path: Path, line: bytes) -> dict[str, Any]:
    """One line of the log at `path`.

    Raises:
        InvalidRequestError: it is no JSON object, or `check_rows` refuses it.
    """
    try:
        row = json.loads(line)
    except ValueError:
        row = line.decode("utf-8", "replace")
    if not isinstance(row, dict):
        shown = json.dumps(row)[:SHOWN_CHARACTERS]
        raise _damaged(path, f"is damaged: the line {shown} is no JSON object", "Correct this line, or delete it")
    check_rows(path, [row])
    return row


def _damaged_row(path: Path, row: Mapping[str, Any], problem: str) -> InvalidRequestError:
    shown = json.dumps(row)[:SHOWN_CHARACTERS]
    return _damaged(path, f"is damaged: the row {shown} {problem}", "Correct this line, or delete it")


def _damaged(path: Path, problem: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(problem, field="file", value=str(path), remedy=remedy)

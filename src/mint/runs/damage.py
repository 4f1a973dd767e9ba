"""Recognizes a damaged run folder, and says which file to mend."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
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

NUMBERS: Mapping[str, tuple[str, ...]] = {"evaluations.jsonl": ("mean", "low", "high", "n")}
"""The fields that are a number in every row of a log."""

CONFIG_FIELDS: tuple[tuple[type | UnionType, str, tuple[str, ...]], ...] = (
    (int, "whole number", ("steps", "max_tokens", "max_staleness", "lr_warmup_steps")),
    (int | float, "number", ("grader_timeout_s", "success_reward")),
    (list, "list", ("reward_range",)),
    (dict, "object", ("task_spec",)),
)
"""The fields of `config.json` that readers compute with; each may be missing or null."""

NUMERIC = frozenset({int, float, bool})

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
    for kinds, what, names in CONFIG_FIELDS:
        for name in names:
            value = config.get(name)
            if value is not None and not isinstance(value, kinds):
                raise _damaged(
                    path, f"has {json.dumps(value)[:SHOWN_CHARACTERS]} as `{name}`, which is no {what}", remedy
                )
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
        InvalidRequestError: a row has no number as `step`, or lacks a text or number that every row of this log has.
    """
    is_evaluations, is_metrics = path.name == "evaluations.jsonl", path.name == "metrics.jsonl"
    for row in rows:
        texts = TEXTS.get(path.name, ())
        numbers: Iterable[str] = NUMBERS.get(path.name, ())
        if is_evaluations and not isinstance(row.get("metric"), str):  # of rewards: supervised runs name a metric
            texts, numbers = (*texts, "set"), (*numbers, "temperature")
        if is_metrics and not NUMERIC.issuperset(map(type, row.values())):
            numbers = row
        step = row.get("step")
        # NaN and the infinities are not between the bounds.
        if not isinstance(step, int | float) or not -LARGEST_STEP < step < LARGEST_STEP:
            raise _damaged_row(path, row, "has no number as `step`")
        for name in texts:
            if not isinstance(row.get(name), str):
                raise _damaged_row(path, row, f"has no text as `{name}`")
        if is_evaluations and not isinstance(row.get("checkpoint"), str | None):
            raise _damaged_row(path, row, "has no text as `checkpoint`")
        for name in numbers:
            if not isinstance(row.get(name), int | float):
                raise _damaged_row(path, row, f"has no number as `{name}`")


def read_state(path: Path) -> dict[str, Any]:
    """The resumable step in a `state.json`: `step`, `checkpoint`, `totals` and `state`.

    Raises:
        InvalidRequestError: the file cannot be read, or lacks one of them; `state` is empty if it is not there.
    """
    remedy = "Restore it from a copy, or delete it: the run then starts again at step 1"
    found = {"state": {}, **read_object(path, remedy=remedy)}
    check_rows(path, [found])
    for name in ("totals", "state"):
        if not isinstance(found.get(name), dict):
            raise _damaged(path, f"has no object as `{name}`", remedy)
    if not NUMERIC.issuperset(map(type, found["totals"].values())):
        raise _damaged(path, f"has {json.dumps(found['totals'])[:SHOWN_CHARACTERS]} as `totals`, not numbers", remedy)
    return {name: found[name] for name in ("step", "checkpoint", "totals", "state")}


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

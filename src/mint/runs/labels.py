"""The labels that users give a run: title, tags, note, archived or not. They are in `labels.json` in its folder.

A run never reads it, so it may be changed while the run goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mint.errors import InvalidRequestError
from mint.runs.json_lines import replace_file

LABELS = "labels.json"
LONGEST_TITLE = 200
LONGEST_TAG = 50
MOST_TAGS = 20
LONGEST_NOTE = 10_000


@dataclass(frozen=True)
class RunLabels:
    """`title` is shown beside the name of the folder, which stays, because commands and checkpoints use it."""

    title: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""
    is_archived: bool = False


def read_labels(folder: Path) -> RunLabels:
    """The labels of a run; none if the file is missing or cannot be read."""
    try:
        return changed_labels(RunLabels(), json.loads((folder / LABELS).read_text()))
    except (OSError, ValueError, InvalidRequestError):
        return RunLabels()


def write_labels(folder: Path, labels: RunLabels) -> None:
    """Replaces the labels of a run, atomically."""
    replace_file(folder / LABELS, json.dumps(asdict(labels), indent=2).encode("utf-8", "replace"))


def changed_labels(labels: RunLabels, changes: object) -> RunLabels:
    """Labels with some fields replaced.

    Raises:
        InvalidRequestError: `changes` is no mapping from fields of `RunLabels` to their values, or a value is too long.
    """
    if not isinstance(changes, Mapping):
        raise InvalidRequestError("is not an object", field="labels", value=changes, remedy="Give title, tags or note")
    fields: dict[str, Any] = {**asdict(labels)}
    for name, value in changes.items():
        if name not in fields:
            remedy = f"Use {', '.join(fields)}"
            raise InvalidRequestError("is not a label", field="labels", value=name, remedy=remedy)
        fields[name] = _checked(name, value)
    return RunLabels(**fields)


def _checked(name: str, value: object) -> object:
    if name == "is_archived":
        if not isinstance(value, bool):
            raise InvalidRequestError("is neither true nor false", field=name, value=value, remedy="Give one of them")
        return value
    if name == "tags":
        if not isinstance(value, list) or len(value) > MOST_TAGS:
            remedy = f'Give a list of at most {MOST_TAGS} texts, such as ["baseline"]'
            raise InvalidRequestError("is not a list of tags", field=name, value=value, remedy=remedy)
        return tuple(dict.fromkeys(tag for one in value if (tag := _text("tags", one, LONGEST_TAG))))
    return _text(name, value, LONGEST_TITLE if name == "title" else LONGEST_NOTE)


def _text(name: str, value: object, longest: int) -> str:
    if not isinstance(value, str) or len(value) > longest:
        remedy = f"Give at most {longest} characters"
        raise InvalidRequestError("is not a text of this length", field=name, value=value, remedy=remedy)
    return value.strip()

"""Settings that are a checkpoint, and may name a run in its place: `init_from=latest`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mint.cli.run_names import LATEST, find_checkpoint, find_run
from mint.cli.terminal import say
from mint.errors import InvalidRequestError, NotFoundError

CHECKPOINT_SETTINGS = ("init_from", "kl_reference", "teacher")
"""The settings and arguments of recipes that are a checkpoint."""


def find_named_checkpoints(arguments: Mapping[str, Any], resumed: Path | None = None) -> dict[str, Any]:
    """The arguments, with the last checkpoint of a run where `init_from`, `kl_reference` or `teacher` names a run.

    Says on standard error which checkpoint a name means. A run that is resumed in the folder `resumed` keeps the
    checkpoint that the name meant when it began.

    Raises:
        NotFoundError: there is no such run, or it has saved no checkpoint.
        InvalidRequestError: a name is the beginning of the names of several runs.
    """
    from mint.rl.config import BASE_REFERENCE  # deferred: `mint --help` answers at once

    found = dict(arguments)
    recorded = {} if resumed is None else _recorded_arguments(resumed)
    for field in CHECKPOINT_SETTINGS:
        given = arguments.get(field)
        if isinstance(given, bool) or not isinstance(given, str | int) or given == BASE_REFERENCE:
            continue
        found[field] = _find(field, str(given), recorded.get(field))
        if found[field] != given:
            say(f"{field}={given} is {found[field]}")
    return found


def _recorded_arguments(folder: Path) -> dict[str, Any]:
    """Settings and arguments in the `config.json` of a run; none if the folder holds no run yet."""
    from mint.runs.damage import read_config  # deferred: `mint --help` answers at once
    from mint.runs.log import DATA_SOURCE

    if not (folder / "config.json").is_file():
        return {}
    config = read_config(folder)
    source = config.get(DATA_SOURCE)
    arguments = source.get("arguments") if isinstance(source, dict) else None
    return {**(arguments if isinstance(arguments, dict) else {}), **config}


def _find(field: str, name: str, recorded: Any) -> str:
    try:
        if isinstance(recorded, str) and "://" not in name and _may_mean(name, recorded):
            return recorded
        return find_checkpoint(name)
    except (InvalidRequestError, NotFoundError) as error:
        if field == "teacher" and isinstance(error, NotFoundError):
            return name  # then it can only be a base model; the service lists those it knows
        error.field = field
        raise


def _may_mean(name: str, checkpoint: str) -> bool:
    """Whether the run of this name, or one that had it when `name` was given, has saved the checkpoint."""
    from mint.runs.reader import RunReader  # deferred: `mint --help` answers at once

    if name == LATEST or name.isdecimal():  # the next run takes these names
        return True
    return any(row["checkpoint"] == checkpoint for row in RunReader(find_run(name)).checkpoints())

"""The arguments with which a run began, from its config.json: a resume need not repeat them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mint.errors import InvalidRequestError
from mint.recipes.recipe_configs import CONFIGS
from mint.rl.objective import is_recorded_function
from mint.runs.damage import read_config
from mint.runs.log import DATA_SOURCE

NOT_REPEATED = frozenset({"run_dir", "trackers", "print_progress"})
"""Settings that a process chooses for itself."""


def read_recorded_arguments(folder: Path, recipe: str) -> dict[str, Any]:
    """The settings of the run in `folder`, its task or data, and their options, as `mint train` takes them.

    Raises:
        InvalidRequestError: the run is of another recipe, its folder does not say how to make its task again, or it
            needs a function of the program that started it.
    """
    config = read_config(folder)
    source = config.get(DATA_SOURCE)
    made_by = str(source.get("recipe")) if isinstance(source, Mapping) else "rl"
    if made_by != recipe:
        remedy = f"Write {resume_line(made_by, folder)}"
        raise InvalidRequestError(f"is a run of {made_by}", field="--run-dir", value=str(folder), remedy=remedy)
    data = dict(source["arguments"]) if isinstance(source, Mapping) else _task_words(folder, config)
    fields = CONFIGS[recipe].model_fields.keys() - NOT_REPEATED
    settings = {name: value for name, value in config.items() if name in fields}
    _require_no_function(folder, settings)
    return {**settings, **data}


def resume_line(recipe: str, folder: Path) -> str:
    """The command that goes on with a run as it began."""
    return f"mint train {recipe} --run-dir {shlex.quote(str(folder))} --resume"


def _task_words(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    spec = config.get("task_spec")
    if not isinstance(spec, Mapping) or spec.get("seed") != config.get("seed"):
        raise InvalidRequestError(
            "does not say how to make its task again, because it was started from Python",
            field="--run-dir",
            value=str(folder),
            remedy="Resume it there with resume=True, or add its task and its settings",
        )
    return {"task": spec["task"], **spec["options"]}


def _require_no_function(folder: Path, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if is_recorded_function(value):
            raise InvalidRequestError(
                "is a function of the program that started the run",
                field=name,
                value=value,
                remedy=f"Resume {folder} from that program, with resume=True",
            )

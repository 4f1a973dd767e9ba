"""Makes the arguments of the `mint` commands that pages start, and refuses what a page must not start.

A run folder may come from anybody, so nothing in it is trusted: its settings are validated again, its task must be one
of mint or one that the operator has named, and paths in it are refused. A refusal names the command to run by hand.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mint.config import Settings
from mint.errors import InvalidRequestError, MintError
from mint.models.hub import is_hub_name
from mint.models.registry import available
from mint.recipes.recipe_configs import CONFIGS
from mint.recipes.supervised import SupervisedConfig
from mint.recipes.task_registry import RECIPES, unknown_task
from mint.rl import RLConfig
from mint.rl.objective import is_recorded_function
from mint.rl.run_config import RunConfig
from mint.runs.damage import read_config
from mint.runs.log import DATA_SOURCE
from mint.types.checkpoint_path import is_checkpoint_path

STARTED = ("rl", "sft")
"""The recipes that a page may start."""

GENERATED = ("reasoning_gym", "textarena", "ifeval")
"""Sources of tasks that read no file, ask no server and import no module that the name chooses."""

_NAME = re.compile(r"[\w.*+-]+", re.ASCII)

BY_THE_COMMAND = frozenset({"run_dir", "trackers", "print_progress"})
"""Settings that a page does not choose: where a run is written and who else is told."""

TEXT_OPTIONS = frozenset({"prompt_style", "grader"})
"""Options of tasks that are one of a few names. Others must be numbers: a text may be a path or an address."""


class RunCommands:
    """Makes the command lines of pages; implements `mint.dashboard.jobs.launches.PageCommands`."""

    def __init__(self, settings: Settings, data_dir: Path, *, tasks: Sequence[str] = ()) -> None:
        """`tasks` are those that the operator lets pages run, besides mint's: `path.py:Class`, `file:PATH`, ….

        Raises:
            InvalidRequestError: one of them is not a task, or its file is not there.
        """
        for task in tasks:
            source, _, rest = task.partition(":")
            if source.endswith(".py") and not Path(source).is_file():
                remedy = "Name a file that is there: path.py:Class"
                raise InvalidRequestError("is not a file", field="--task", value=task, remedy=remedy)
            if not rest and task not in RECIPES:
                raise unknown_task(task)
        self._settings = settings
        self._runs = data_dir / "runs"
        self._tasks = tuple(tasks)

    def choices(self) -> dict[str, list[str]]:
        """The `tasks` and `models` to choose from. Tasks of `GENERATED` have too many names to list."""
        return {"tasks": [*self._tasks, *RECIPES], "models": available(self._settings.model_aliases)}

    def start(self, recipe: str, task: str, settings: Mapping[str, Any]) -> tuple[Path, list[str]]:
        """The folder of a new run, and the arguments that start it.

        Raises:
            InvalidRequestError: no such recipe or setting, a value out of range, or a task that pages may not run.
        """
        if recipe not in STARTED:
            raise InvalidRequestError(
                "is not started from a page", field="recipe", value=recipe, remedy=f"Choose {' or '.join(STARTED)}"
            )
        config = CONFIGS[recipe]
        words = ["train", recipe, *_words({"task": task, **settings})]
        unknown = [name for name in settings if name not in config.model_fields]
        if unknown:
            similar = get_close_matches(unknown[0], config.model_fields, n=1)
            if similar:
                raise InvalidRequestError(
                    f"is not a setting of {config.__name__}",
                    field=unknown[0],
                    value=settings[unknown[0]],
                    remedy=f"Did you mean {similar[0]}?",
                )
            raise _refusal(unknown[0], settings[unknown[0]], f"is not a setting of {config.__name__}", words)
        chosen = [name for name in settings if name in BY_THE_COMMAND]
        if chosen:
            raise _refusal(chosen[0], settings[chosen[0]], "is not chosen from a page", words)
        self._require_task(task, words)
        config.from_texts(settings)
        self._require_weights(settings, words)
        folder = self._new_folder(task)
        return folder, [*words, "--run-dir", str(folder)]

    def resume(self, folder: Path) -> list[str]:
        """The arguments that go on with the run in `folder`, with the settings of its config.json.

        Raises:
            InvalidRequestError: the folder does not say all that is needed, or asks for what pages may not run.
        """
        last = ["--run-dir", str(folder), "--resume"]
        described = read_config(folder)
        if isinstance(source := described.get(DATA_SOURCE), dict):
            return self._resume_supervised(folder, described, source, last)
        settings, words = self._of_run(folder, ["train", "rl"], last)
        functions = [name for name, value in settings.items() if is_recorded_function(value)]
        if functions:
            raise _refusal(functions[0], settings[functions[0]], "is a function of your own program", words)
        RLConfig.from_texts(settings)
        return words

    def evaluate(self, folder: Path, checkpoint: str) -> list[str]:
        """The arguments that evaluate a checkpoint on the task of the run in `folder`.

        Raises:
            As `resume`; and `checkpoint` is not the path of one.
        """
        if not is_checkpoint_path(checkpoint) or not checkpoint.isprintable():
            raise InvalidRequestError(
                "is not a checkpoint", field="checkpoint", value=checkpoint, remedy="Choose one of the page"
            )
        settings, words = self._of_run(folder, ["eval", checkpoint], ["--json"], names_task=True)
        RLConfig.from_texts(settings)
        return words

    def _resume_supervised(
        self, folder: Path, described: Mapping[str, Any], source: Mapping[str, Any], last: list[str]
    ) -> list[str]:
        recipe, arguments = str(source.get("recipe")), source.get("arguments")
        config = CONFIGS.get(recipe)
        if config is None or not issubclass(config, SupervisedConfig) or not isinstance(arguments, dict):
            raise _no_source(folder)
        settings = {
            name: value
            for name, value in described.items()
            if name in config.model_fields and name not in BY_THE_COMMAND
        }
        words = ["train", recipe, *_words({**arguments, **settings}), *last]
        options = dict(arguments)
        if recipe == "dpo":
            file = f"file:{options.pop('data', '')}"
            if file not in self._tasks:
                raise _refusal("data", file, "is not a file that these pages may read", words, task=file)
        else:
            self._require_task(str(options.pop("task", "")), words)
        if recipe == "distill":
            self._require_model("teacher", options.pop("teacher", None), words, checkpoint=True)
        self._require_options(options, words, settings=config)
        self._require_weights(settings, words)
        config.from_texts(settings)
        return words

    def _of_run(
        self, folder: Path, first: list[str], last: list[str], *, names_task: bool = False
    ) -> tuple[dict[str, Any], list[str]]:
        """The settings of a run whose task pages may run, and the command line with them."""
        described = read_config(folder)
        settings = {
            name: value
            for name, value in described.items()
            if name in RLConfig.model_fields and name not in BY_THE_COMMAND
        }
        if names_task:  # sampling and grading need no function of the run's objective
            settings = {name: value for name, value in settings.items() if not is_recorded_function(value)}
        spec = described.get("task_spec")
        if not isinstance(spec, dict) or not isinstance(spec.get("options"), dict):
            raise _no_source(folder)
        task, options = str(spec.get("task", "")), spec["options"]
        named = [task] if names_task else _words({"task": task})
        words = [*first, *named, *_words({**settings, **options}), *last]
        self._require_task(task, words)
        self._require_options(options, words)
        if spec.get("seed") != settings.get("seed"):
            raise _refusal("task_spec.seed", spec.get("seed"), "is not the seed of the run", words)
        self._require_weights(settings, words)
        return settings, words

    def _require_task(self, task: str, words: Sequence[str]) -> None:
        source, _, rest = task.partition(":")
        is_generated = source in GENERATED and _NAME.fullmatch(rest) is not None
        if task in RECIPES or task in self._tasks or is_generated:
            return
        if not task:
            remedy = f"Choose {', '.join([*self._tasks, *RECIPES])}"
            raise InvalidRequestError("is missing", field="task", value="(missing)", remedy=remedy)
        if not rest:
            raise unknown_task(task)
        raise _refusal("task", task, "is not a task that these pages may run", words, task=task)

    def _require_options(
        self, options: Mapping[str, Any], words: Sequence[str], *, settings: type[RunConfig] = RLConfig
    ) -> None:
        for name, value in options.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_name = name in TEXT_OPTIONS and isinstance(value, str) and _NAME.fullmatch(value) is not None
            if name in settings.model_fields or not (is_number or is_name) or not name.isidentifier():
                raise _refusal(f"options of the task: {name}", value, "is not an option that pages may set", words)

    def _require_weights(self, settings: Mapping[str, Any], words: Sequence[str]) -> None:
        """Base models are named, never given as a path; other weights are checkpoints of the service."""
        if settings.get("base_model") is not None:
            self._require_model("base_model", settings["base_model"], words)
        for name in ("init_from", "kl_reference"):
            value = settings.get(name)
            is_base = name == "kl_reference" and value == "base"
            if value is not None and not is_base and not (isinstance(value, str) and is_checkpoint_path(value)):
                raise _refusal(name, value, "is not the path of a checkpoint", words)

    def _require_model(self, field: str, value: Any, words: Sequence[str], *, checkpoint: bool = False) -> None:
        is_text = isinstance(value, str)
        if is_text and (value in available(self._settings.model_aliases) or is_hub_name(value)):
            return
        if not (checkpoint and is_text and is_checkpoint_path(value)):
            what = "is not the name of a base model" + (", or the path of a checkpoint" if checkpoint else "")
            raise _refusal(field, value, what, words)

    def _new_folder(self, task: str) -> Path:
        name = re.sub(r"[^\w.-]+", "-", Path(task).name if task in self._tasks else task, flags=re.ASCII)
        base = self._runs / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        candidates = [base, *(base.with_name(f"{base.name}-{number}") for number in range(2, 1000))]
        return next(candidate for candidate in candidates if not candidate.exists())


def _words(values: Mapping[str, Any]) -> list[str]:
    """`key=value` arguments whose values are JSON, so that the command line reads what was meant."""
    return [f"{name}={json.dumps(value)}" for name, value in values.items()]


def _no_source(folder: Path) -> MintError:
    return InvalidRequestError(
        "does not say how to make its task and data again",
        field="run",
        value=folder.name,
        remedy="It was started from Python, or by an older mint: repeat its own command with --resume",
    )


def _refusal(field: str, value: Any, message: str, words: Sequence[str], *, task: str | None = None) -> MintError:
    remedy = f"Run it yourself: {shlex.join(['mint', *words])}"
    if task is not None:
        remedy += f"; or start the dashboard with --task {shlex.quote(task)}"
    return InvalidRequestError(message, field=field, value=value, remedy=remedy)

"""`mint train` and `mint demo`: arguments in, one call, a report out."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperCommand

from mint.cli.recipes.assignments import SHORT_NAMES, Assignments, parse_assignments
from mint.cli.recipes.named_checkpoints import find_named_checkpoints
from mint.cli.recipes.setting_completion import DATA_WORDS
from mint.cli.run_names import complete_run, find_resumed
from mint.cli.terminal import Json, fail, say
from mint.errors import InvalidRequestError, MintError, RequestFailedError
from mint.runs.interrupt import RunInterrupted

INTERRUPTED = 130
"""The exit status of a program that Ctrl-C has ended, as shells have it."""


class DemoTask(StrEnum):
    """What `mint demo` can show."""

    MATH = "math"
    CHAT = "chat"
    CODE = "code"
    TOOLS = "tools"
    SUMS = "sums"


class Recipe(StrEnum):
    """What `mint train` can run."""

    RL = "rl"
    SFT = "sft"
    DPO = "dpo"
    DISTILL = "distill"


Seed = Annotated[int, typer.Option(min=0, help="same seed, same run, bit for bit")]
RunDir = Annotated[
    Path | None,
    typer.Option(
        help="the run folder; a new one if not given. With --resume: any name of a run", autocompletion=complete_run
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="continue the run in --run-dir, which must exist, with its task and settings"),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="download a base model that is not here, unasked")]


class DemoCommand(TyperCommand):
    """`mint demo`, which takes options and no settings: it says how to write a setting as an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for before, word in pairwise(["", *args]):
            name, is_setting, value = word.partition("=")
            if ctx.resilient_parsing or not is_setting or word.startswith("-") or before.startswith("-"):
                continue
            option = f"--{name.replace('_', '-')}"
            remedy = f"Write {option} {value}" if option in _options(self) else "mint train rl takes settings"
            raise typer.BadParameter(f"{word}: mint demo takes no settings. {remedy}")
        return super().parse_args(ctx, args)


class TrainCommand(TyperCommand):
    """`mint train`, whose `--help` lists the settings of the recipe that stands before it.

    It says how to write an option as a setting, and which recipe is GRPO.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        recipe = ctx.meta["recipe"] = next((one for one in args if one in list(Recipe)), None)
        if not ctx.resilient_parsing:
            if recipe is None and "grpo" in map(str.lower, args):
                raise typer.BadParameter("grpo: is not a recipe. rl is GRPO. Write mint train rl")
            self._refuse_settings_as_options(recipe or Recipe.RL, args)
        return super().parse_args(ctx, args)

    def _refuse_settings_as_options(self, recipe: str, args: Sequence[str]) -> None:
        known = _options(self)
        for word, after in pairwise([*args, ""]):
            option, is_joined, value = word.partition("=")
            if not option.startswith("--") or option in known:
                continue
            name = option.removeprefix("--").replace("-", "_")
            if name in _setting_names(recipe):
                value = value if is_joined else "VALUE" if after.startswith("-") or not after else after
                raise typer.BadParameter(f"No such option: {option}. Write {shlex.quote(f'{name}={value}')}")

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        recipe = ctx.meta["recipe"]
        if recipe is not None:
            from mint.cli.recipes.recipe_settings import read_settings_of  # deferred: `mint --help` answers at once

            typer.echo("Settings of a run, each as name=value. A task may have other defaults.\n")
            for setting in read_settings_of(recipe):
                names = " or ".join(
                    [setting.name, *(short for short, name in SHORT_NAMES.items() if name == setting.name)]
                )
                typer.echo(f"  {names} ({setting.kind}, default {setting.default}) {setting.meaning}".rstrip())


def _options(command: TyperCommand) -> set[str]:
    return {"--help", *(option for parameter in command.params for option in parameter.opts)}


def _setting_names(recipe: str) -> set[str]:
    """What can be written as `name=value` for a recipe, but options of a task."""
    from mint.cli.recipes.recipe_settings import read_settings_of  # deferred: `mint --help` answers at once

    return {*DATA_WORDS[recipe], *SHORT_NAMES, *(setting.name for setting in read_settings_of(recipe))}


def demo(
    task: Annotated[DemoTask, typer.Argument(help="the task to learn")],
    steps: Annotated[int | None, typer.Option(min=0, help="RL steps; the task's own number if not given")] = None,
    seed: Seed = 0,
    run_dir: RunDir = None,
    resume: Resume = False,
    trackers: Annotated[
        list[str] | None, typer.Option(help="mirror it: tensorboard, wandb or trackio; repeatable")
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """RL end to end in this process: no GPU, no key. All tasks but `sums` train the bundled model and need no network;
    `sums` trains SmolLM2-135M-Instruct."""
    from mint.cli.recipes.recipe_runs import run_demo  # deferred: `mint --help` answers at once
    from mint.rl.analysis.report import print_run
    from mint.runs.log import RunLog

    try:
        result, report = run_demo(
            task.value,
            steps=steps,
            seed=seed,
            run_dir=_run_folder(run_dir, resume=resume),
            resume=resume,
            console=Console(stderr=True),
            trackers=trackers or (),
            yes=yes,
        )
    except MintError as error:
        fail(error, as_json=as_json)
    except RunInterrupted as interrupt:
        _end(interrupt)
    print_run(Console(stderr=as_json), result, RunLog(result.run_dir).read("evaluations.jsonl"))
    if as_json:
        typer.echo(json.dumps(report))
    _require_graded(result.run_dir)


def train(
    recipe: Annotated[Recipe, typer.Argument(help="rl, sft, dpo or distill")],
    assignments: Assignments = None,
    run_dir: RunDir = None,
    resume: Resume = False,
    unsafe_sandbox: Annotated[
        bool, typer.Option("--unsafe-sandbox", help="run model-written code without any isolation")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """A recipe on any model and data: `mint train rl task=reasoning_gym:chain_sum base_model=… steps=50`.

    `mint train rl --help` lists the settings of a recipe.
    """
    from mint.cli.recipes.recipe_runs import train_recipe  # deferred: `mint --help` answers at once

    folder = None
    try:
        arguments = parse_assignments(assignments or [])
        named = arguments.pop("run_dir", None) if run_dir is None else run_dir
        folder = _run_folder(None if named is None else Path(str(named)), resume=resume)
        if resume:
            arguments = _with_recorded(arguments, recipe.value, folder, unsafe_sandbox=unsafe_sandbox)
        arguments = find_named_checkpoints(arguments, folder if resume else None)
        if unsafe_sandbox:
            arguments["unsafe_sandbox"] = True
        report = train_recipe(
            recipe.value, arguments, run_dir=folder, resume=resume, console=Console(stderr=True), yes=yes
        )
    except MintError as error:
        if resume and error.field == "run_dir" and folder is not None:
            _name_resume(error, recipe.value, folder)
        fail(error, as_json=as_json)
    except RunInterrupted as interrupt:
        _end(interrupt)
    if as_json:
        typer.echo(json.dumps(report, default=str))
    if recipe is Recipe.RL:
        _require_graded(Path(report["run_dir"]))


def _run_folder(named: Path | None, *, resume: bool) -> Path | None:
    """The run folder that `--run-dir` names. A resume takes any name of a run; it says which folder it goes on in."""
    if named is None or not resume:
        return named
    folder = find_resumed(named)
    if folder != named:
        say(f"--run-dir {named} is {folder}")
    return folder.resolve()  # the process may go to another directory


def _with_recorded(
    arguments: Mapping[str, Any], recipe: str, folder: Path | None, *, unsafe_sandbox: bool
) -> dict[str, Any]:
    """The arguments of a resume. If they name no task or data, those with which the run began, and what is given anew;
    if those have a relative path, this process goes to the directory from which it is seen.

    Raises:
        InvalidRequestError: the run folder does not have them all, or the run had no sandbox and nobody says so again.
    """
    from mint.cli.recipes.recorded_arguments import read_recorded_arguments  # deferred: loads numpy
    from mint.config import keep_home
    from mint.runs.log import is_run
    from mint.runs.process import read_process, working_directory

    if folder is None or not is_run(folder) or not arguments.keys().isdisjoint(DATA_WORDS[recipe]):
        return dict(arguments)
    recorded = read_recorded_arguments(folder, recipe)
    if recorded.get("unsafe_sandbox") and not unsafe_sandbox:  # a folder may come from anybody
        remedy = "Add --unsafe-sandbox to run model-written code without any isolation again"
        raise InvalidRequestError("is how the run began", field="unsafe_sandbox", value=True, remedy=remedy)
    words = " ".join(f"{name}={recorded[name]}" for name in DATA_WORDS[recipe] if name in recorded)
    process, here = read_process(folder), working_directory()
    directory = here if process is None or process.directory is None else process.directory
    if directory not in (None, here) and any(_is_relative_path(str(own), Path(directory)) for own in recorded.values()):
        keep_home()
        os.chdir(directory)
        words += f" in {directory}"
    say(f"{words}, with the settings in {folder / 'config.json'}")
    return {**recorded, **arguments}


def _name_resume(error: MintError, recipe: str, folder: Path) -> None:
    """Adds to the refusal of other settings the command that resumes with those of the run, if there is one."""
    from mint.cli.recipes.recorded_arguments import read_recorded_arguments, resume_line  # deferred: loads numpy
    from mint.runs.log import OTHER_SETTINGS

    if error.message.startswith(OTHER_SETTINGS):
        with suppress(MintError):  # a run of a program of its own is resumed by that
            read_recorded_arguments(folder, recipe)
            error.remedy = f"`{resume_line(recipe, folder)}` resumes with those of the run. {error.remedy}"


def _require_graded(run_dir: Path) -> None:
    """Ends the command with status 1 if no rollout of the run got a reward: nothing was learned."""
    from mint.runs.reader import RunReader  # deferred: `mint --help` answers at once

    reader = RunReader(run_dir)
    counted = reader.columns(["rollouts/count", "rollouts/ungraded"])
    count, ungraded = (sum(value or 0 for value in counted[name]) for name in ("rollouts/count", "rollouts/ungraded"))
    if not 0 < count == ungraded:
        return
    reasons = [row["error"] for row in reader.rows(reader.steps()[-1]) if row.get("error")]
    because = f" ({reasons[0]})" if reasons else ""
    remedy = f"Correct the grader; `mint rollouts {run_dir} --flag error` shows what it was given"
    fail(RequestFailedError(f"none of the {count:.0f} rollouts could be graded{because}", remedy=remedy))


def _end(interrupt: RunInterrupted) -> NoReturn:
    """Prints the command that goes on with the run, and exits."""
    saved = f"saved up to step {interrupt.saved_step}" if interrupt.saved_step else "no step is saved"
    console = Console(stderr=True, highlight=False)
    console.print(f"Ended by {interrupt.by} ({saved}). To go on:", markup=False)
    console.print(resume_command(sys.argv[1:], interrupt.folder), markup=False, soft_wrap=True)
    raise typer.Exit(INTERRUPTED) from interrupt


def resume_command(arguments: Sequence[str], folder: Path) -> str:
    """The line for a shell that goes on with the run in `folder`, which `mint` began with these arguments. It begins
    with `cd` if they name a file as seen from here, and can then be run from any folder."""
    given = iter(arguments)
    command = ["mint"]
    for word in given:
        if word == "--run-dir":
            next(given, None)
        elif word != "--resume" and not word.startswith(("--run-dir=", "run_dir=")):
            command.append(word)
    command += ["--run-dir", str(folder), "--resume"]  # not the words that were given: `latest` may be another run then
    place = f"cd {shlex.quote(str(Path.cwd()))} && " if any(map(_is_relative_path, command[1:])) else ""
    return f"{place}{shlex.join(command)}"


def _is_relative_path(word: str, place: Path = Path()) -> bool:
    """Whether a word of the command is the path of a file or folder as seen from `place`: `task=file:sums.jsonl`,
    `task=sums.py:Sums`, `runs/first`."""
    # It is not made absolute: a resume compares the name of the task with the recorded one.
    source, is_class, _ = word.rpartition("=")[2].removeprefix("file:").partition(".py:")
    path = Path(f"{source}.py" if is_class else source)
    try:
        return not path.is_absolute() and bool(path.name) and (place / path).exists()
    except OSError:  # a text that is longer than a name may be
        return False

"""`mint train`, and what the other commands share with it: a task and its settings from `key=value` words."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import Console

from mint.errors import InvalidRequestError
from mint.recipes.registry import TaskChoice, load_task
from mint.recipes.supervised_cli import LEVERS
from mint.rl import Estimate, LiveProgress, RLConfig, RunResult, Task, run_grpo
from mint.rl.analysis.report import print_run
from mint.rl.heldout_evaluation import GREEDY, SAMPLED
from mint.rl.tracking.plot import plot_run
from mint.runs.log import RunLog
from mint.runs.reader import read_config

ALIASES = {"lr": "learning_rate", "groups_per_batch": "batch_size", "model": "base_model"}


def train(
    recipe: str,
    assignments: Sequence[str],
    *,
    run_dir: Path | None,
    resume: bool,
    unsafe_sandbox: bool,
    console: Console,
) -> dict[str, Any]:
    """`mint train RECIPE key=value …`; prints what came of it and returns it for `--json`.

    Raises:
        InvalidRequestError: unknown recipe, task, setting or option.
    """
    words = {ALIASES.get(key, key): value for key, value in parse(assignments).items()}
    if recipe == "rl":
        return _train_rl(words, run_dir=run_dir, resume=resume, unsafe_sandbox=unsafe_sandbox, console=console)
    if resume:
        raise InvalidRequestError(
            "is only for rl", field="--resume", value=recipe, remedy="Start it again from init_from=CHECKPOINT"
        )
    report = LEVERS[recipe](words, run_dir)
    _print_report(console, report)
    return report


def _print_report(console: Console, report: Mapping[str, Any], indent: str = "") -> None:
    """One line per value; a triple is a mean with its 95 % interval."""
    for name, value in report.items():
        if isinstance(value, Mapping):
            console.print(f"{indent}{name}")
            _print_report(console, value, f"{indent}  ")
            continue
        if isinstance(value, tuple) and len(value) == 3:
            value = "{:.3f}  (95 %: {:.3f} to {:.3f})".format(*value)
        console.print(f"{indent}{name:<18} {value}", soft_wrap=True, highlight=False)


def _train_rl(
    words: dict[str, Any], *, run_dir: Path | None, resume: bool, unsafe_sandbox: bool, console: Console
) -> dict[str, Any]:
    if "task" not in words:
        raise InvalidRequestError(
            "is missing", field="task", value="(missing)", remedy="Add for example task=math or task=file:prompts.jsonl"
        )
    task = str(words.pop("task"))
    if unsafe_sandbox:
        words["unsafe_sandbox"] = True
    with chosen(task, words) as choice:
        config = choice.config.model_copy(update={"run_dir": run_dir})
        result = run_watched(
            choice.adapter, config, resume=resume, console=console, title=f"{task}: {config.base_model}"
        )
    print_run(console, result, RunLog(result.run_dir).read("evaluations.jsonl"))
    return report(task, config, result)


def run_watched(adapter: Task, config: RLConfig, *, resume: bool, console: Console, title: str) -> RunResult:
    """`run_grpo` with live progress on `console`, and the curve as `curve.png` in the run folder."""
    with LiveProgress(config.steps, console=console, title=title) as progress:
        result = run_grpo(adapter, config, resume=resume, on_progress=progress)
    log = RunLog(result.run_dir)
    plot_run(result.run_dir / "curve.png", log.read("metrics.jsonl"), log.read("evaluations.jsonl"), title=title)
    return result


def report(task: str, config: RLConfig, result: RunResult) -> dict[str, Any]:
    """The JSON object of `mint demo` and `mint train rl` with `--json`. `heldout_before`, `heldout_after` are greedy,
    `…_sampled` at temperature 1; None where nothing is held out."""

    def reading(readings: Mapping[float, Estimate], temperature: float) -> dict[str, Any] | None:
        return readings[temperature].to_dict() if temperature in readings else None

    return {
        "task": task,
        "base_model": config.base_model,
        "seed": config.seed,
        "steps": result.steps,
        "seconds": round(result.seconds, 3),
        "seconds_setup": round(result.seconds_setup, 3),
        "samples": result.samples,
        "tokens": result.tokens,
        "heldout_before": reading(result.heldout_before, GREEDY),
        "heldout_after": reading(result.heldout_after, GREEDY),
        "heldout_before_sampled": reading(result.heldout_before, SAMPLED),
        "heldout_after_sampled": reading(result.heldout_after, SAMPLED),
        "sampler_trainer_max_abs_logprob_diff": result.max_abs_logprob_diff,
        "findings": [finding.to_dict() for finding in result.findings],
        "stopped_by": result.stopped_by,
        "checkpoint": result.checkpoint,
        "best_checkpoint": result.best_checkpoint,
        "sampler_checkpoint": result.sampler_checkpoint,
        "state_digest": result.state_digest,
        "run_dir": str(result.run_dir),
    }


@contextmanager
def chosen(task: str, words: dict[str, Any]) -> Generator[TaskChoice]:
    """The task with its settings; what it started is ended afterwards. Words that are no setting go to the task.

    Raises:
        InvalidRequestError: unknown task, setting or option.
    """
    words = {ALIASES.get(key, key): value for key, value in words.items()}
    settings = {key: words.pop(key) for key in list(words) if key in RLConfig.model_fields}
    settings.pop("run_dir", None)
    seed = int(settings.get("seed", 0))
    try:
        choice = load_task(task, seed=seed, **words)
    except InvalidRequestError as error:
        meant = [get_close_matches(word, RLConfig.model_fields, n=1, cutoff=0.75) for word in words]
        if any(meant):
            error.remedy = f"{error.remedy}. Among the settings of a run, did you mean {next(filter(None, meant))[0]}?"
        raise
    # Through the constructor, so that every value is checked.
    config = RLConfig(**{**choice.config.model_dump(), **settings})
    try:
        yield TaskChoice(choice.adapter, config)
    finally:
        choice.adapter.close()


@contextmanager
def chosen_of_run(run: Path, task: str | None) -> Generator[TaskChoice]:
    """The task and the settings of a finished run; `task` names it where the run folder does not.

    Raises:
        InvalidRequestError: the folder does not say which task it is.
    """
    described = read_config(run)
    spec: dict[str, Any] | None = described["task_spec"] or (
        {"task": task, "seed": described["seed"], "options": {}} if task is not None else None
    )
    if spec is None:
        raise InvalidRequestError(
            "does not name its task, for it was started from Python",
            field="run",
            value=str(run),
            remedy="Say which it is: --task path.py:Class",
        )
    settings = {key: value for key, value in described.items() if key in RLConfig.model_fields}
    with chosen(spec["task"], {**settings, **spec["options"], "seed": spec["seed"]}) as choice:
        yield choice


def parse(assignments: Sequence[str]) -> dict[str, Any]:
    """`["steps=5", "task=math"]` as a dict; a value is JSON where it reads as JSON, and text otherwise.

    Raises:
        InvalidRequestError: a word is not of the form key=value.
    """
    found: dict[str, Any] = {}
    for word in assignments:
        key, separator, text = word.partition("=")
        if not separator or not key:
            raise InvalidRequestError(
                "is not of the form key=value", field="argument", value=word, remedy="Write for example steps=20"
            )
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = {"True": True, "False": False, "None": None}.get(text, text)
    return found

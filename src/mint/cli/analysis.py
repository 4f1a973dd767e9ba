"""`mint eval`, `diagnose`, `bisect` and `doctor`: what a checkpoint, a run or a task is worth.

Each command reads its arguments, calls one function of `mint.rl` and prints the answer.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from mint.cli.recipes.assignments import Assignments, parse_assignments
from mint.cli.recipes.named_checkpoints import find_named_checkpoints
from mint.cli.run_names import Run, complete_run, find_checkpoint, find_run
from mint.cli.terminal import Json, fail, print_pairs
from mint.errors import (
    InvalidRequestError,
    MintError,
    MissingExtraError,
    NotFoundError,
    RequestFailedError,
    UnknownBaseModelError,
)
from mint.extras import install_command
from mint.runs.terminal_text import one_line
from mint.version import VERSION

TASK_HELP = (
    "math, chat, code, tools, shell, sums, reasoning_gym:NAME, verifiers:NAME, textarena:GAME, ifeval:CONSTRAINTS, "
    "file:PATH, module:Class or path.py:Class"
)


def evaluate(
    checkpoint: Annotated[
        str,
        typer.Argument(help="mint://…, a run (its last checkpoint), or a base model", autocompletion=complete_run),
    ],
    task: Annotated[str, typer.Argument(help=TASK_HELP)],
    assignments: Assignments = None,
    against: Annotated[
        list[str] | None, typer.Option(help="another checkpoint, run or base model to compare with; repeatable")
    ] = None,
    also: Annotated[list[str] | None, typer.Option(help="another task; repeatable")] = None,
    heldout_samples: Annotated[
        int | None, typer.Option(min=1, hidden=True, help="the same as the setting heldout_samples=N")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="a PNG of the readings")] = None,
    as_json: Json = False,
) -> None:
    """Held-out reward of a checkpoint: mean with its 95 % interval, success, pass@k, parts. Several checkpoints or
    tasks are compared item by item, with the interval of the paired difference. `heldout_samples=N` draws N completions
    of each item at temperature 1. The exit status is 1 if no completion could be graded."""
    from mint.client.service_client import ServiceClient  # deferred: `mint --help` answers at once
    from mint.recipes.task_registry import open_task
    from mint.rl.analysis.comparison import compare_checkpoints
    from mint.rl.analysis.report import print_estimates, print_readings
    from mint.rl.heldout_evaluation import GREEDY, evaluate_checkpoint
    from mint.rl.tracking.plot import plot_readings, require_writable_picture

    people = Console(stderr=as_json)
    tasks = list(dict.fromkeys([task, *(also or [])]))
    try:
        if plot is not None:
            require_writable_picture(plot)
        checkpoints = [_checkpoint_or_base_model(name) for name in (checkpoint, *(against or []))]
        with ExitStack() as opened:
            words = parse_assignments(assignments or [])
            if heldout_samples is not None:
                words["heldout_samples"] = heldout_samples
            choices = {name: opened.enter_context(open_task(name, words)) for name in tasks}
            choice = choices[task]
            # After all names are known to be right: it loads the engine.
            service = opened.enter_context(ServiceClient())
            if len(checkpoints) == len(tasks) == 1 and plot is None:
                estimates = evaluate_checkpoint(checkpoints[0], choice.adapter, config=choice.config, service=service)
                print_estimates(people, f"{checkpoints[0]} on {task}", estimates)
                is_graded = any(
                    estimate.ungraded < estimate.n * (1 if temperature == GREEDY else choice.config.heldout_samples)
                    for temperature, estimate in estimates.items()
                )
                rows: Any = {f"{temperature:g}": estimate.to_dict() for temperature, estimate in estimates.items()}
            else:
                pairs = {name: (choice.adapter, choice.config) for name, choice in choices.items()}
                seeds = choice.config.heldout_samples
                readings = compare_checkpoints(checkpoints, pairs, seeds=seeds, service=service)
                print_readings(people, readings)
                is_graded = any(reading.ungraded < reading.n * reading.seeds for reading in readings)
                rows = [reading.to_dict() for reading in readings]
                if plot is not None:
                    plot_readings(
                        plot, rows, title=f"held-out reward, {seeds} seeds" if seeds > 1 else "held-out reward"
                    )
    except UnknownBaseModelError as error:  # a run's name with a mistake in it is taken for a base model
        said = error.remedy or ""
        error.remedy = f"{said}{'' if said.endswith('?') else '.'} `mint runs list` shows the runs"
        fail(error, as_json=as_json)
    except MintError as error:
        fail(error, as_json=as_json)
    if as_json:
        typer.echo(json.dumps(rows))
    if not is_graded:
        remedy = f"Correct the grader; `mint doctor {task}` says why"
        fail(RequestFailedError("none of the held-out completions could be graded", remedy=remedy))


def _checkpoint_or_base_model(name: str) -> str:
    """A checkpoint, or the name of a base model; one of this machine is looked up before the engine is loaded.

    Raises:
        UnknownBaseModelError: it is neither.
    """
    from mint.config import read_settings  # deferred: `mint --help` answers at once
    from mint.models.registry import resolve

    try:
        if "://" not in name:
            find_run(name)
    except NotFoundError:  # then it can only be a base model; a server lists those it knows
        settings = read_settings()
        if settings.base_url is None:
            resolve(name, settings.model_aliases)
        return name
    return find_checkpoint(name)


def diagnose(
    run: Run,
    as_json: Json = False,
) -> None:
    """Why a run does not learn: every finding with its evidence and a remedy, and where the tokens went."""
    from mint.rl.analysis.report import print_findings, print_token_counts
    from mint.rl.analysis.run_analysis import (  # deferred: `mint --help` answers at once
        diagnose_run,
        has_rewards,
        run_token_counts,
    )
    from mint.runs.reader import RunReader

    try:
        folder = find_run(run)
        reader = RunReader(folder)
        summary = reader.summary()
        is_rl = has_rewards(reader)
        findings = diagnose_run(folder)
        ledger, items = run_token_counts(folder)
    except MintError as error:
        fail(error, as_json=as_json)
    people = Console(stderr=as_json)
    has_failed = summary.state in ("failed", "died")
    if has_failed:
        people.print(Text.assemble((summary.state, "red"), f": {one_line(summary.notice)}"), soft_wrap=True)
    if findings or (is_rl and not has_failed):
        print_findings(people, findings)
    if is_rl:
        print_token_counts(people, ledger, items)
    else:
        people.print(
            f"The rules of the diagnosis are about rewards; this run has none. Its losses: mint runs show {folder}",
            soft_wrap=True,
            highlight=False,
        )
    if as_json:
        found = [finding.to_dict() for finding in findings]
        typer.echo(
            json.dumps({"state": summary.state, "error": summary.error, "findings": found, "ledger": asdict(ledger)})
        )


def bisect(
    run: Run,
    metric: Annotated[str, typer.Option(help="heldout, heldout_sampled or success")] = "heldout",
    task: Annotated[str | None, typer.Option(help="the task, if the run folder does not name it")] = None,
    as_json: Json = False,
) -> None:
    """Between which two checkpoints a metric fell, with as few evaluations as needed."""
    from mint.client.service_client import ServiceClient  # deferred: `mint --help` answers at once
    from mint.recipes.task_registry import open_task_of_run
    from mint.rl.analysis.report import print_regression
    from mint.rl.analysis.run_analysis import bisect_run, require_bisect_metric
    from mint.rl.heldout_evaluation import evaluate_checkpoint

    folder = None
    try:
        require_bisect_metric(metric)
        folder = find_run(run)
        with open_task_of_run(folder, task) as choice, ServiceClient() as service:
            regression = bisect_run(
                folder,
                metric,
                lambda path: evaluate_checkpoint(path, choice.adapter, config=choice.config, service=service),
            )
    except MintError as error:
        if isinstance(error, InvalidRequestError) and folder is not None and error.value == str(folder):
            # What was typed; `latest` and a number say nothing about which run it is.
            error.value = run if folder.name in run else f"{run} ({folder.name})"
        fail(error, as_json=as_json)
    print_regression(Console(stderr=as_json), metric, regression)
    if as_json:
        typer.echo(json.dumps(asdict(regression)))


def doctor(
    task: Annotated[
        str | None, typer.Argument(help=f"{TASK_HELP}; none checks the installation, and gpu the GPU")
    ] = None,
    assignments: Assignments = None,
    prompts: Annotated[int, typer.Option(min=1, help="prompts of the task to sample")] = 64,
    group_size: Annotated[
        int, typer.Option(min=2, help="completions of each prompt; more measure its pass rate better")
    ] = 8,
    as_json: Json = False,
) -> None:
    """Samples a task with the base model and says which method fits: RL, SFT first, preferences, harder data. Without a
    task it checks what is installed here, and ends with status 1 if something that is installed does not work. `gpu` is
    no task: each fast path runs on this GPU against plain operations of torch, and the report is to be sent."""
    if task == "gpu":
        _check_gpu(as_json=as_json)
        return
    if task is None:
        _check_installation(as_json=as_json)
        return
    from mint.recipes.task_registry import open_task  # deferred: `mint --help` answers at once
    from mint.rl.analysis.doctor import examine
    from mint.rl.analysis.report import print_examination

    try:
        with open_task(task, find_named_checkpoints(parse_assignments(assignments or []))) as choice:
            examination = examine(
                choice.adapter, choice.config, prompts=prompts, samples=group_size, seed=choice.config.seed
            )
    except MintError as error:
        fail(error, as_json=as_json)
    print_examination(Console(stderr=as_json), task, examination)
    if as_json:
        typer.echo(json.dumps(examination.to_dict(), default=str))


def _check_installation(*, as_json: bool) -> None:
    from mint.compose.installation import check_installation  # deferred: `mint --help` answers at once
    from mint.config import read_settings

    try:
        checks = check_installation(read_settings())
    except MintError as error:
        fail(error, as_json=as_json)
    if as_json:
        typer.echo(json.dumps({"checks": [asdict(check) for check in checks]}))
    else:
        marks = {"ok": ("ok", "green"), "missing": ("–", "dim"), "problem": ("!!", "red")}
        lines = [Text.assemble(marks[check.state], f"  {check.found}{_advice(check.remedy)}") for check in checks]
        print_pairs([(check.name, line) for check, line in zip(checks, lines, strict=True)])
    if any(check.state == "problem" for check in checks):
        raise typer.Exit(1)


def _check_gpu(*, as_json: bool) -> None:
    try:
        from mint.engine.cuda.gpu_report import check_gpu  # deferred: torch takes seconds

        report = check_gpu(VERSION, say=lambda text: typer.echo(f"trying {text}", err=True))
    except MintError as error:
        fail(error, as_json=as_json)
    except ImportError as error:
        fail(MissingExtraError(f"torch cannot be loaded ({error})", remedy=install_command("local")), as_json=as_json)
    if as_json:
        typer.echo(json.dumps(asdict(report)))
    else:
        print_pairs([(name, Text(found)) for name, found in report.machine.items()])
        for dtype, verdicts in report.verdicts.items():
            for own in verdicts:
                times = f"{1e3 * own.seconds:.2f} ms, plain {1e3 * own.plain_seconds:.2f} ms, error {own.error:.1e}"
                found = f"ok  {times}" if own.fault is None else f"!!  {own.fault}{_advice(own.remedy)}"
                typer.echo(f"{dtype:9} {own.name:16} {found}")
    if report.faults:
        raise typer.Exit(1)


def _advice(remedy: str | None) -> str:
    return "" if remedy is None else f" → {remedy}"

"""`mint rollouts`, `mint plot`, and the run folders in `mint runs list` and `show`, in a terminal.

Reads run folders only; needs no server and no engine. Control characters in a model's text are shown, not sent to the
terminal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mint.cli.terminal import fail
from mint.config import read_settings
from mint.errors import InvalidRequestError, MintError, NotFoundError
from mint.rl.tracking.terminal_text import evaluation_name, head, interval_text, one_line, paragraph, sparkline

if TYPE_CHECKING:
    from mint.runs.reader import RunReader

SHOWN_CHARACTERS = 2_000
CURVE_WIDTH = 48
ROLLOUTS = 4

RUN_COLUMNS = ("run", "state", "task", "steps", "reward", "held-out (95 %)", "findings", "last written (UTC)")

Run = Annotated[str, typer.Argument(help="a run folder, or its name below MINT_HOME/runs")]
Json = Annotated[bool, typer.Option("--json", help="for scripts: one JSON document")]


def rollouts(
    run: Run,
    step: Annotated[int | None, typer.Option(help="the step; the last one if not given")] = None,
    worst: Annotated[int, typer.Option(min=0, help="how many with the lowest rewards")] = 0,
    best: Annotated[int, typer.Option(min=0, help="how many with the highest rewards")] = 0,
    item: Annotated[int | None, typer.Option(help="only this item of the dataset, over all steps")] = None,
    flag: Annotated[
        list[str] | None, typer.Option(help="only rollouts with this flag: truncated, error, no_signal, …; repeatable")
    ] = None,
    text: Annotated[str, typer.Option(help="only rollouts whose prompt or text contains this, over all steps")] = "",
    as_json: Json = False,
) -> None:
    """Rollouts of a run: prompt, text, reward by part, stop reason. By default the best and worst of the last step."""
    from mint.runs.reader import RunReader  # deferred: `mint --help` answers at once

    try:
        reader = RunReader(find_run(run))
        rows = _select(reader, step=step, worst=worst, best=best, item=item, flags=frozenset(flag or ()), text=text)
    except MintError as error:
        fail(error, as_json=as_json)
    if as_json:
        typer.echo(json.dumps({"rollouts": rows}))
        return
    console = Console(highlight=False)
    for row in rows:
        _print_rollout(console, row)
    if not rows:
        console.print("no such rollouts")


def plot(
    run: Run,
    output: Annotated[Path, typer.Option("--output", "-o", help="the PNG to write")],
    metric: Annotated[list[str] | None, typer.Option(help="a metric to plot instead of the reward; repeatable")] = None,
) -> None:
    """The curve of a run as a PNG: reward and held-out evaluations, or any metrics by name."""
    from mint.rl.tracking.plot import plot_metrics, plot_run  # deferred: loads matplotlib
    from mint.runs.reader import RunReader

    try:
        reader = RunReader(find_run(run))
        summary = reader.summary()
        title = f"{summary.name}: {summary.base_model}"
        if metric is None:
            plot_run(output, reader.metrics(), reader.evaluations(), title=title)
        else:
            plot_metrics(output, reader.metrics(), metric, title=title)
    except MintError as error:
        fail(error)
    typer.echo(str(output))


def show_run_folder(folder: Path, *, as_json: bool) -> None:
    """Prints state, curve, held-out evaluations, findings and checkpoints of one run."""
    from mint.rl.tracking.terminal_text import COLORS  # deferred: `mint --help` answers at once
    from mint.runs.reader import RunReader

    reader = RunReader(folder)
    summary = reader.summary()
    evaluations = reader.evaluations()
    findings = reader.findings()
    saved = reader.checkpoints()
    if as_json:
        document = {**asdict(summary), "evaluations": evaluations, "findings": findings, "checkpoints": saved}
        typer.echo(json.dumps(document))
        return
    rewards = [value for value in reader.columns(["reward/mean"])["reward/mean"] if value is not None]
    facts: dict[str, Any] = {
        "run": summary.name,
        "folder": summary.folder,
        "state": summary.state if summary.error is None else f"{summary.state}: {summary.error}",
        "task": summary.task,
        "base model": summary.base_model,
        "steps": f"{summary.step} of {summary.steps}",
        "reward": f"{_number(summary.reward)}  {sparkline(rewards, CURVE_WIDTH)}  best {_number(summary.best_reward)}",
        "success": _number(summary.success),
        "tokens/s": None if summary.tokens_per_s is None else f"{summary.tokens_per_s:.0f}",
    }
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value is not None:
            table.add_row(name, Text(one_line(str(value))))
    for row in evaluations:
        line = f"{row['when']} (step {row['step']}), {evaluation_name(row)}: {interval_text(row)}, n = {row['n']}"
        table.add_row("held-out", Text(line))
    for row in findings:
        line = Text.assemble(
            (row["code"], COLORS[row["severity"]]), f" (step {row['step']}): {one_line(row['evidence'])}"
        )
        table.add_row("finding", line)
    for row in saved:
        table.add_row("checkpoint", Text(f"step {row['step']}: {one_line(row['checkpoint'])}"))
    Console(highlight=False).print(table)


def newest_runs(data_dir: Path | None, limit: int) -> list[dict[str, Any]]:
    """The newest runs of a data directory (None: `MINT_HOME`), one dict each."""
    from mint.dashboard.run_folders import RunFolders  # deferred: `mint --help` answers at once
    from mint.runs.reader import RunReader

    folders = RunFolders([data_dir or read_settings().home_dir]).find().values()
    newest = sorted((RunReader(folder).summary() for folder in folders), key=lambda run: run.updated_at, reverse=True)
    return [asdict(summary) for summary in newest[:limit]]


def run_row(run: Mapping[str, Any]) -> tuple[str, ...]:
    """A run as a row of a table with `RUN_COLUMNS`."""
    heldout = "" if run["heldout"] is None else interval_text(run["heldout"])
    findings = ", ".join(f"{count} {severity}" for severity, count in run["findings"].items() if count)
    steps = f"{run['step']} of {run['steps']}"
    at = f"{datetime.fromtimestamp(run['updated_at'], UTC):%Y-%m-%d %H:%M}"
    return (run["name"], run["state"], run["task"], steps, _number(run["reward"]), heldout, findings, at)


def find_run(name: str) -> Path:
    """The folder of a run, by its path or its name below `MINT_HOME/runs`.

    Raises:
        NotFoundError: neither holds a run.
    """
    found = run_folder(name)
    if found is not None:
        return found
    below = read_settings().home_dir / "runs"
    names = [folder.name for folder in below.iterdir()] if below.is_dir() else []
    close = get_close_matches(name, names, n=1)
    remedy = f"Did you mean {close[0]}?" if close else f"Name a folder with a config.json, or one below {below}"
    raise NotFoundError("is not a run", field="run", value=name, remedy=remedy)


def run_folder(name: str) -> Path | None:
    """The folder of a run by its path or name; None if there is no such run."""
    for folder in (Path(name), read_settings().home_dir / "runs" / name):
        if (folder / "config.json").is_file():
            return folder
    return None


def _select(
    reader: RunReader, *, step: int | None, worst: int, best: int, item: int | None, flags: frozenset[str], text: str
) -> list[dict[str, Any]]:
    from mint.runs.reader import FLAGS, RolloutQuery  # deferred: `mint --help` answers at once

    unknown = sorted(flags - FLAGS.keys())
    if unknown:
        raise InvalidRequestError("is not a flag", field="--flag", value=unknown[0], remedy=f"Use {', '.join(FLAGS)}")
    steps = reader.steps()
    if step is None and item is None and not text:
        step = steps[-1] if steps else None
    if step is not None and step not in steps:
        have = f"those from {steps[0]} to {steps[-1]}" if steps else "none yet"
        raise NotFoundError("has no rollouts", field="--step", value=step, remedy=f"The run has {have}")
    if not worst and not best:
        worst = best = ROLLOUTS // 2
    ids: dict[tuple[int, int], None] = {}
    for sort, limit in (("-reward", best), ("reward", worst)):
        if limit:
            page = reader.rollouts(RolloutQuery(step=step, item=item, flags=flags, text=text, sort=sort, limit=limit))
            ids |= dict.fromkeys((row["step"], row["row"]) for row in page.rows)
    rows = {at: reader.rows(at) for at in {at for at, _ in ids}}
    return [rows[at][row] for at, row in ids]


def _print_rollout(console: Console, row: Mapping[str, Any]) -> None:
    if "text" not in row:
        console.print(
            Text.assemble((f"step {row['step']} group {row['group']}", "bold"), f"  {one_line(row['error'])}")
        )
        return
    reward = "not graded" if row["reward"] is None else f"reward {row['reward']:.3f}"
    facts = [f"{name} {value:+.3f}" for name, value in row["parts"].items()]
    if row.get("advantage") is not None:
        facts.append(f"advantage {row['advantage']:+.3f}")
    facts.append(f"{len(row['tokens'])} tokens, {row['stop_reason']}")
    place = f"step {row['step']} item {row['item']} rollout {row['row']}"
    console.print(Text.assemble((place, "bold"), f"  {reward}  ({', '.join(facts)})"))
    prompt = str(row["prompt"])
    text = str(row["text"])
    if len(prompt) > SHOWN_CHARACTERS:
        console.print(Text(f"  … {len(prompt) - SHOWN_CHARACTERS:,} characters before this", style="dim"))
    for line in paragraph(prompt[-SHOWN_CHARACTERS:]).split("\n"):
        console.print(Text(f"  {line}", style="dim"))
    for line in paragraph(text[:SHOWN_CHARACTERS]).split("\n"):
        console.print(Text(f"  │ {line}"))
    if len(text) > SHOWN_CHARACTERS:
        console.print(Text(f"  │ … and {len(text) - SHOWN_CHARACTERS:,} more characters (--json has all)", style="dim"))
    for entry in row.get("trace") or ():
        said = entry.get("content") or entry.get("result") or ""
        console.print(Text(f"    {one_line(str(entry.get('role', '')))}: {head(str(said), 200)}", style="dim"))
    if row.get("error"):
        console.print(Text(f"    {one_line(row['error'])}", style="red"))


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:.3f}"

"""`mint rollouts`, `mint plot`, and the run folders in `mint runs list` and `show`, in a terminal.

Reads run folders only; needs no server and no engine. Control characters in a model's text are shown, not sent to the
terminal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from mint.cli.run_names import Run, find_run, newest_folders
from mint.cli.terminal import Json, fail, print_pairs, say
from mint.errors import InvalidRequestError, MintError, NotFoundError
from mint.runs.terminal_text import counted, evaluation_name, head, interval_text, one_line, paragraph, sparkline

if TYPE_CHECKING:
    from mint.runs.reader import RunReader, RunSummary

SHOWN_CHARACTERS = 2_000
CURVE_WIDTH = 48
ROLLOUTS = 4

RUN_COLUMNS = ("number", "run", "state", "task", "steps", "reward", "held-out (95 %)", "findings", "last written (UTC)")


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
    """Rollouts of a run: prompt, text, reward by part, stop reason. By default the best and worst of the last step.

    Of equal texts of a step, people see the first; `--json` and `--flag duplicate` have all. If no rollout has the flag
    or the text, the command says so and ends with status 0: that is an answer, too.
    """
    from mint.runs.reader import RunReader  # deferred: `mint --help` answers at once

    flags = frozenset(flag or ())
    of_one_step = item is None and not text
    without = frozenset({"duplicate"}) if of_one_step and not flags and not as_json else frozenset[str]()
    try:
        reader = RunReader(find_run(run))
        rows = _select(
            reader,
            step=step,
            worst=worst,
            best=best,
            item=item,
            flags=flags,
            without=without,
            text=text,
        )
        if not rows and not reader.steps():
            raise NotFoundError(
                "has no rollouts",
                field="run",
                value=run,
                remedy="Only RL runs have them, from their first step on; `mint runs show` reads any run",
            )
    except MintError as error:
        fail(error, as_json=as_json)
    if as_json:
        typer.echo(json.dumps({"rollouts": rows}))
        return
    console = Console(highlight=False)
    for row in rows:
        _print_rollout(console, row)
    if not rows:
        say(_no_hit(reader, step if step is not None or not of_one_step else reader.steps()[-1], item, flags, text))


def _no_hit(reader: RunReader, step: int | None, item: int | None, flags: frozenset[str], text: str) -> str:
    """The sentence for a question without hits: where was looked for what."""
    place = " and ".join([*([] if step is None else [f"step {step}"]), *([] if item is None else [f"item {item}"])])
    wanted = [f"the flag {flag}" for flag in sorted(flags)] + ([f"the text {text!r}"] if text else [])
    steps = counted(len(reader.steps()), "step")
    found = f"No rollout of {place or f'the {steps}'} has {' and '.join(wanted)}."
    return found if not flags or step is None else f"{found} --step N looks at another step."


def plot(
    run: Run,
    output: Annotated[Path, typer.Option("--output", "-o", help="the PNG to write")],
    metric: Annotated[list[str] | None, typer.Option(help="a metric to plot instead; repeatable")] = None,
) -> None:
    """The curve of a run as a PNG: reward and held-out evaluations, or the loss; or any metrics by name."""
    from mint.rl.tracking.plot import plot_curve, plot_metrics  # deferred: loads matplotlib
    from mint.runs.reader import RunReader

    try:
        reader = RunReader(find_run(run))
        summary = reader.summary()
        title = f"{summary.name}: {summary.base_model}"
        if metric is None:
            plot_curve(output, reader.metrics(), reader.evaluations(), title=title)
        else:
            plot_metrics(output, reader.metrics(), metric, title=title)
    except MintError as error:
        fail(error)
    typer.echo(str(output))


def show_run_folder(folder: Path, *, as_json: bool) -> None:
    """Prints state, curve, held-out evaluations, findings and checkpoints of one run."""
    from mint.runs.reader import RunReader, latest_findings
    from mint.runs.terminal_text import COLORS  # deferred: `mint --help` answers at once

    reader = RunReader(folder)
    summary = reader.summary()
    evaluations = reader.evaluations()
    findings = latest_findings(reader.findings())
    saved = reader.checkpoints()
    if as_json:
        document = {**asdict(summary), "evaluations": evaluations, "findings": findings, "checkpoints": saved}
        typer.echo(json.dumps(document))
        return
    facts: dict[str, Any] = {
        "run": summary.name,
        "title": summary.title or None,
        "tags": ", ".join(summary.tags) or None,
        "note": summary.note or None,
        "folder": summary.folder,
        "state": f"{state_name(asdict(summary))}: {summary.notice}" if summary.notice else summary.state,
        "task": summary.task,
        "base model": summary.base_model,
        "model": ", ".join(summary.models) or None,
        "steps": f"{summary.step} of {summary.steps}",
        **_curve(reader, summary),
        "tokens/s": None if summary.tokens_per_s is None else f"{summary.tokens_per_s:.0f}",
    }
    pairs = [(name, Text(one_line(str(value)))) for name, value in facts.items() if value is not None]
    for row in evaluations:
        line = f"{row['when']} (step {row['step']}), {evaluation_name(row)}: {interval_text(row)}, n = {row['n']}"
        pairs.append(("held-out", Text(line)))
    for row in findings:
        line = f" (step {row['step']}): {one_line(row['evidence'])}"
        pairs.append(("finding", Text.assemble((row["code"], COLORS[row["severity"]]), line)))
    pairs += [("checkpoint", Text(f"step {row['step']}: {one_line(row['checkpoint'])}")) for row in saved]
    print_pairs(pairs)


def _curve(reader: RunReader, summary: RunSummary) -> dict[str, str]:
    """The curve of a run by its name: the reward and success of RL, else the loss of its recipe."""
    from mint.rl.tracking.plot import curve_name  # deferred: `mint --help` answers at once

    name = curve_name(reader.metrics())
    if name is None:
        return {}
    values = [value for value in reader.columns([name])[name] if value is not None]
    line = f"{_number(values[-1])}  {sparkline(values, CURVE_WIDTH)}"
    if name == "reward/mean":
        return {"reward": f"{line}  best {_number(summary.best_reward)}", "success": _number(summary.success)}
    return {name.removeprefix("train/").replace("_", " "): f"{line}  first {_number(values[0])}"}


def newest_runs(data_dir: Path | None, limit: int) -> list[dict[str, Any]]:
    """The newest runs of a data directory (None: `MINT_HOME`), one dict each; a damaged one is `unreadable`."""
    return [asdict(_summary(folder)) for folder in list(newest_folders(data_dir).values())[:limit]]


def _summary(folder: Path) -> RunSummary:
    from mint.runs.reader import RunReader, unreadable_summary  # deferred: `mint --help` answers at once

    try:
        return RunReader(folder).summary()
    except MintError as error:
        return unreadable_summary(folder, str(error))


def is_failed_start(run: Mapping[str, Any]) -> bool:
    """Whether a run ended before its first step, and not because somebody stopped it."""
    return run["state"] in ("failed", "died") and run["step"] == 0 and run["heldout"] is None


def state_name(run: Mapping[str, Any]) -> str:
    """The state of a run in a word: `stale` for one that runs and has been silent for long."""
    return "stale" if run["is_stale"] else run["state"]


def run_row(number: int, run: Mapping[str, Any]) -> tuple[str, ...]:
    """A run as a row of a table with `RUN_COLUMNS`; the newest has number 1."""
    heldout = "" if run["heldout"] is None else interval_text(run["heldout"])
    if run["heldout"] is not None and run["heldout"].get("step") == 0:
        heldout += " at step 0"
    findings = ", ".join(f"{count} {severity}" for severity, count in run["findings"].items() if count)
    steps = f"{run['step']} of {run['steps']}" if run["state"] != "unreadable" else ""
    at = f"{datetime.fromtimestamp(run['updated_at'], UTC):%Y-%m-%d %H:%M}"
    title = [f"({run['title']})"] if run["title"] else []
    return (
        str(number),
        one_line(" ".join([run["name"], *title, *(f"#{tag}" for tag in run["tags"])])),
        state_name(run),
        run["task"],
        steps,
        _number(run["reward"]),
        heldout,
        findings,
        at,
    )


def _select(
    reader: RunReader,
    *,
    step: int | None,
    worst: int,
    best: int,
    item: int | None,
    flags: frozenset[str],
    without: frozenset[str],
    text: str,
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
    if item is not None and item not in (items := reader.items()):
        have = (
            f"rollouts of {counted(len(items), 'item')}, from {items[0]} to {items[-1]}" if items else "no rollouts yet"
        )
        raise NotFoundError("has no rollouts", field="--item", value=item, remedy=f"The run has {have}")
    if not worst and not best:
        worst = best = ROLLOUTS // 2
    ids: dict[tuple[int, int], None] = {}
    for sort, limit in (("-reward", best), ("reward", worst)):
        if limit:
            query = RolloutQuery(step=step, item=item, flags=flags, without=without, text=text, sort=sort, limit=limit)
            page = reader.rollouts(query)
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
    facts.append(f"{counted(len(row['tokens']), 'token')}, {row['stop_reason']}")
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

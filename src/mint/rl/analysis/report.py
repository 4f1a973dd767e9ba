"""Reports for the terminal: held-out estimates, findings, token counts, plans. Formats only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mint.rl.analysis.bisect import Regression
from mint.rl.analysis.comparison import Reading
from mint.rl.analysis.doctor import Examination
from mint.rl.analysis.planner import ENOUGH_INFORMATIVE, Option, Plan
from mint.rl.estimate import Estimate
from mint.rl.finding import Finding
from mint.rl.heldout_evaluation import GREEDY, SAMPLED
from mint.rl.run_result import RunResult
from mint.rl.tracking.token_counts import TokenCounts, token_counts_table
from mint.runs.terminal_text import COLORS, counted, interval_text, one_line, paragraph, temperature_name

EXAMPLES = 3
EXAMPLE_SIGNS = 600
SHOWN_ITEMS = 10


def print_run(console: Console, result: RunResult, evaluations: Sequence[Mapping[str, Any]]) -> None:
    """The report of a run; `evaluations` are the rows of its log."""
    if result.heldout_before:
        name = next((str(row["set"]) for row in evaluations), "held-out")
        print_before_after(console, name, result.heldout_before, result.heldout_after)
        _print_examples(console, evaluations)
    rate = result.samples / result.seconds if result.seconds else 0.0
    console.print(
        f"{counted(result.steps, 'step')} in {result.seconds:.1f} s ({result.seconds_setup:.1f} s of setup before), "
        f"{counted(result.samples, 'completion')} ({rate:.0f}/s), "
        f"the logprobs of sampler and trainer {_agreement(result.max_abs_logprob_diff)}"
    )
    print_findings(console, result.findings)
    if result.stopped_by is not None:
        console.print(f"[red]stopped[/red] by {result.stopped_by}")
    console.print(f"run folder  {result.run_dir}  (curve.png, metrics.jsonl, rollouts.jsonl)", soft_wrap=True)
    console.print(f"checkpoint  {result.checkpoint}", soft_wrap=True)
    if result.best_checkpoint is not None:
        console.print(f"best so far {result.best_checkpoint}", soft_wrap=True)
    console.print(f"export it   mint export {result.checkpoint} --format peft --output adapter", soft_wrap=True)
    console.print(f"diagnose it mint diagnose {result.run_dir}", soft_wrap=True)
    console.print(f"look at it  mint dashboard {result.run_dir}", soft_wrap=True)


def print_before_after(
    console: Console, title: str, before: Mapping[float, Estimate], after: Mapping[float, Estimate]
) -> None:
    """Mean reward and success rate before and after, with intervals."""
    table = Table(title=escape(title))
    for heading in ("", "reward before RL", "after RL", "success before", "after", "n"):
        table.add_column(heading)
    for temperature, name in ((GREEDY, "greedy"), (SAMPLED, "temperature 1")):
        old = before[temperature]
        new = after[temperature]
        table.add_row(name, _cell(old), _cell(new), f"{old.success:.3f}", f"{new.success:.3f}", str(new.n))
    console.print(table)


def print_estimates(console: Console, title: str, estimates: Mapping[float, Estimate]) -> None:
    """One checkpoint on one task: reward with its interval, success, pass@k and the parts of the reward."""
    table = Table(title=escape(title))
    for heading in ("", "reward (95 %)", "success", "pass@k", "parts", "n", "ungraded"):
        table.add_column(heading)
    for temperature, estimate in estimates.items():
        table.add_row(
            temperature_name(temperature),
            _cell(estimate),
            f"{estimate.success:.3f}",
            "  ".join(f"{k}: {value:.3f}" for k, value in estimate.pass_at.items()),
            "  ".join(f"{name} {value:.3f}" for name, value in estimate.parts.items()),
            str(estimate.n),
            str(estimate.ungraded),
        )
    console.print(table)


def print_readings(console: Console, readings: Sequence[Reading]) -> None:
    """Compared checkpoints: a numbered list, which no terminal cuts, and a table for each task with the paired
    difference of the first to each other one."""
    numbers = {
        checkpoint: number
        for number, checkpoint in enumerate(dict.fromkeys(reading.checkpoint for reading in readings), 1)
    }
    for checkpoint, number in numbers.items():
        console.print(f"checkpoint {number}: {checkpoint}", markup=False, soft_wrap=True)
    for task in dict.fromkeys(reading.task for reading in readings):
        table = Table(title=escape(task))
        for heading in ("no.", "", "reward (95 %)", "first minus this (95 %)", "the first is", "n", "ungraded"):
            table.add_column(heading)
        for reading in (one for one in readings if one.task == task):
            gap = reading.difference
            table.add_row(
                str(numbers[reading.checkpoint]),
                temperature_name(reading.temperature) + (f", {reading.seeds} seeds" if reading.seeds > 1 else ""),
                interval_text(vars(reading)),
                "" if gap is None else interval_text(vars(gap)),
                "" if gap is None else gap.verdict,
                str(reading.n),
                str(reading.ungraded),
            )
        console.print(table)


def print_findings(console: Console, findings: Iterable[Finding]) -> None:
    """One paragraph per finding: code, step, evidence, remedy; or "no findings"."""
    found = list(findings)
    if not found:
        console.print("[green]no findings[/green]")
    for finding in found:
        color = COLORS[finding.severity]
        console.print(
            f"[{color}]{finding.severity}: {finding.code}[/{color}] (step {finding.step}): "
            f"{escape(one_line(finding.evidence))}. {escape(finding.remedy)}."
        )


def print_token_counts(console: Console, run: TokenCounts, items: Mapping[int, TokenCounts]) -> None:
    """Token counts of the run, and of the items with the most generated tokens."""
    console.print(token_counts_table({"all": run}, title="where the tokens went", first="run"))
    most = dict(list(items.items())[:SHOWN_ITEMS])
    console.print(token_counts_table(most, title=f"the {counted(len(most), 'item')} with the most tokens"))


def print_regression(console: Console, metric: str, regression: Regression) -> None:
    """The two checkpoints between which the metric fell, and the number of evaluations."""
    color = {"found": "red", "uncertain": "yellow", "none": "green"}[regression.verdict]
    console.print(
        f"[{color}]{regression.verdict}[/{color}]: {metric}, {escape(regression.explanation)}", soft_wrap=True
    )
    console.print(f"evaluated for this: {counted(regression.evaluations, 'checkpoint')}")


def print_examination(console: Console, task: str, examination: Examination) -> None:
    """The verdict of `mint doctor` and its evidence."""
    first, *rest = examination.lines()
    console.print(f"[bold]{escape(task)}[/bold]  [bold]{escape(first)}[/bold]", soft_wrap=True)
    for line in rest:
        console.print(escape(line), soft_wrap=True)


def _remark(option: Option, planned: Plan) -> str:
    if option is not planned.recommended:
        return ""
    return "← enough" if option.informative >= ENOUGH_INFORMATIVE else "← the most, not enough"


def print_plan(console: Console, planned: Plan) -> None:
    """A row per group size; the recommended one is marked."""
    table = Table(title=f"pass rate {planned.pass_rate:.2f}, {counted(planned.batch_size, 'prompt')} per step")
    for heading in ("group size", "informative groups", "tokens per step", "tokens per informative token", ""):
        table.add_column(heading, justify="right")
    for option in planned.options:
        spread = f"  ({option.low:.2f} to {option.high:.2f})" if option.high > option.low else ""
        table.add_row(
            str(option.group_size),
            f"{option.informative:.3f}{spread}",
            f"{option.tokens_per_step:.0f}",
            f"{option.tokens_per_informative_token:.2f}",
            _remark(option, planned),
        )
    console.print(table)


def _print_examples(console: Console, evaluations: Sequence[Mapping[str, Any]]) -> None:
    sampled = {row["when"]: row["examples"] for row in evaluations if row["temperature"] == SAMPLED}
    table = Table(title="held-out completions at temperature 1")
    for heading in ("prompt", "before RL", "after RL"):
        table.add_column(heading)
    for before, after in list(zip(sampled.get("before", []), sampled.get("after", []), strict=False))[:EXAMPLES]:
        prompt = one_line(str(before["prompt"]).replace("\n", " ")[-80:])
        table.add_row(escape(prompt), *(escape(_example(row)) for row in (before, after)))
    console.print(table)


def _example(row: Mapping[str, Any]) -> str:
    reward = "not graded" if row["reward"] is None else f"reward {row['reward']:g}"
    return f"{paragraph(str(row['text']).strip()[:EXAMPLE_SIGNS])}  ({reward})"


def _cell(estimate: Estimate) -> str:
    return interval_text(vars(estimate))


def _agreement(max_abs_diff: float) -> str:
    return "are equal to the last bit" if max_abs_diff == 0 else f"differ by at most {max_abs_diff:.1e}"

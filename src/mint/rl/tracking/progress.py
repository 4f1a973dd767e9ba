"""A run, live in the terminal: progress, a curve of reward or loss, held-out evaluations, findings, a sample.

One screen that is drawn again where there is a terminal, plain lines where there is none. Writes to stderr. Formats
only; docs/rl.md explains the numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mint.runs.terminal_text import COLORS, counted, evaluation_name, interval_text, one_line, sample_lines, sparkline

CURVE_WIDTH = 40
HEADING_WIDTH = 8
SHOWN_FINDINGS = 4
DRAWN_PER_S = 4


class LiveProgress:
    """Pass the instance as `on_progress` of a recipe's run; use it as a context manager around the call."""

    def __init__(
        self,
        steps: int,
        *,
        console: Console | None = None,
        title: str = "RL",
        curve: str = "reward/mean",
        plain: bool = False,
    ) -> None:
        """`steps` is the length of the bar, `curve` the metric that is drawn. `plain`: lines on a terminal, too."""
        self.console = console or Console(stderr=True)
        self._steps = steps
        self._title = title
        self._began = self._stepping_since = time.monotonic()
        self._first_step = 0
        self._doing = "loading the model"
        self._latest: Mapping[str, Any] = {}
        self._curve_name = curve
        self._curve_values: list[float] = []
        self._evaluations: dict[tuple[str, int], dict[float | str, Mapping[str, Any]]] = {}
        self._findings: dict[str, Mapping[str, Any]] = {}
        self._sample = ""
        self._live = (
            Live(self, console=self.console, refresh_per_second=DRAWN_PER_S)
            if not plain and _is_drawn_on(self.console)
            else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        else:
            self._print(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        """The hook that `run_grpo` calls."""
        if event == "step":
            self._step(fields)
        elif event == "samples":
            self._samples(fields)
        elif event == "evaluation":
            self._evaluation(fields)
        elif event in ("finding", "stopped"):
            self._finding(event, fields)

    # --- events ----------------------------------------------------------------------------------------------

    def _step(self, metrics: Mapping[str, Any]) -> None:
        if not self._latest:  # a resumed run begins further on
            self._first_step = int(metrics["step"]) - 1
        self._latest = metrics
        self._doing = "sampling"
        if self._live is None:
            self._print(f"  step {int(metrics['step'])}/{self._steps}  {step_line(metrics)}")
        else:
            self._curve_values.append(float(metrics[self._curve_name]))

    def _samples(self, fields: Mapping[str, Any]) -> None:
        """On the screen, one completion of every step; on lines, `count` of them."""
        shown = sample_lines(fields["rows"], max(1, fields["count"]), fields["step"])
        self._sample = shown[0] if shown else ""
        if self._live is None or fields["count"] > 1:
            for line in shown[: fields["count"]]:
                self._print(f"  {line}")

    def _evaluation(self, row: Mapping[str, Any]) -> None:
        self._evaluations.setdefault((row["when"], row["step"]), {})[_condition(row)] = row
        self._doing = "done" if row["when"] == "after" else "sampling"
        self._stepping_since = time.monotonic() if row["when"] == "before" else self._stepping_since
        if self._live is None:
            self._print(
                f"  held-out {row['when']:<6} step {row['step']:<4} {evaluation_name(row):<14} {_estimate(row)}"
            )

    def _finding(self, event: str, fields: Mapping[str, Any]) -> None:
        self._findings[fields["code"]] = fields
        if self._live is None or event == "stopped":
            what = "stopped by " if event == "stopped" else ""
            self._print(_finding_line(fields, before=f"  {what}"))

    def _print(self, line: str | Text) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    # --- the screen ------------------------------------------------------------------------------------------------

    def __rich__(self) -> RenderableType:
        """The screen as it is now."""
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="bold", no_wrap=True, min_width=HEADING_WIDTH)
        rows.add_column(overflow="ellipsis", no_wrap=True)
        if self._latest:
            rows.add_row(self._curve_name.removesuffix("/mean").removeprefix("train/"), self._curve())
            for name, line in _number_lines(self._latest):
                rows.add_row(name, line)
        for (when, step), rows_of_step in self._evaluations.items():
            line = "   ".join(f"{evaluation_name(row)} {interval_text(row)}" for _, row in sorted(rows_of_step.items()))
            rows.add_row("held-out", f"{when if when != 'during' else f'step {step}'}: {line}")
        for finding in list(self._findings.values())[-SHOWN_FINDINGS:]:
            rows.add_row("finding", _finding_line(finding))
        if self._sample:
            rows.add_row("sample", Text(self._sample))
        return Group(self._head(), rows)

    def _head(self) -> RenderableType:
        done = int(self._latest.get("step", 0))
        head = Table.grid(padding=(0, 1), expand=False)
        elapsed = time.monotonic() - self._began
        left = self._seconds_left(done)
        times = f"{_clock(elapsed)}" + (f", {_clock(left)} left" if left is not None else f", {self._doing}")
        head.add_row(
            Text(one_line(self._title), style="bold"),
            ProgressBar(total=max(1, self._steps), completed=done, width=24),
            f"{done}/{self._steps}",
            Text(times, style="dim"),
        )
        return head

    def _seconds_left(self, done: int) -> float | None:
        taken = done - self._first_step
        if taken < 1 or self._doing == "done":
            return None
        return (time.monotonic() - self._stepping_since) / taken * (self._steps - done)

    def _curve(self) -> Text:
        values = self._curve_values
        best = (max if self._curve_name == "reward/mean" else min)(values)
        step = self._first_step + values.index(best) + 1
        return Text.assemble(
            f"{values[-1]:.3f}  ",
            (sparkline(values, CURVE_WIDTH), "cyan"),
            f"  from {values[0]:.3f}, best {best:.3f} at step {step}",
        )


def step_line(metrics: Mapping[str, Any]) -> str:
    """The numbers of one step on one line, or that no step was taken because no group had a signal."""
    if "groups/total" not in metrics:
        return "  ".join(f"{name} {value}" for name, value in _plain_numbers(metrics))
    used = int(metrics["groups/used"])
    total = int(metrics["groups/total"])
    line = f"reward {metrics['reward/mean']:.3f}  groups with signal {used}/{total}"
    if metrics["datums"] == 0:
        return f"{line}  {_no_step(metrics)}"
    mismatch = ""
    if "mismatch/max_abs_logprob_diff" in metrics:
        mismatch = f"mismatch {metrics['mismatch/max_abs_logprob_diff']:.1e}  "
    return f"{line}  grad {metrics['optim/grad_norm']:.3g}  {mismatch}{_step_s(metrics):.2f} s"


def _is_drawn_on(console: Console) -> bool:
    """Whether the console is a terminal; pipes and files get lines."""
    return console.is_terminal and not console.is_dumb_terminal


def _number_lines(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The other lines of the screen about the latest step, by heading."""
    if "groups/total" not in metrics:
        return _plain_numbers(metrics)
    used = int(metrics["groups/used"])
    total = int(metrics["groups/total"])
    policy = (
        f"success {metrics['success/rate']:.3f}   signal in {used}/{total} groups   "
        f"length {metrics['rollouts/mean_length']:.1f}   cut off {metrics['rollouts/truncated_share']:.0%}"
    )
    seconds = _step_s(metrics)
    tokens = metrics["rollouts/tokens"]
    tokens_per_s = tokens / seconds if seconds else math.nan
    speed = f"{seconds:.2f} s per step   {counted(tokens, 'token')}   {tokens_per_s:.0f} tokens/s"
    if metrics["datums"] == 0:
        return [("policy", policy), ("update", _no_step(metrics)), ("speed", speed)]
    update = f"gradient {metrics['optim/grad_norm']:.3g}   entropy {metrics.get('train/entropy', math.nan):.3f}"
    if "mismatch/max_abs_logprob_diff" in metrics:
        update += f"   sampler − trainer ≤ {metrics['mismatch/max_abs_logprob_diff']:.1e}"
    return [("policy", policy), ("update", update), ("speed", speed)]


def _plain_numbers(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The numbers of a step without rollouts: its losses, the gradient norm and its time."""
    numbers = [(name.removeprefix("train/"), f"{metrics[name]:.4g}") for name in metrics if name.startswith("train/")]
    return [*numbers, ("gradient", f"{metrics['optim/grad_norm']:.3g}"), ("time", f"{metrics['time/train_s']:.2f} s")]


def _no_step(metrics: Mapping[str, Any]) -> str:
    good = int(metrics["groups/all_good"])
    bad = int(metrics["groups/all_bad"])
    left_out = int(metrics.get("groups/untrained", 0))
    if left_out:
        return f"no step taken: nothing of {counted(left_out, 'group')} with unequal rewards went into the loss"
    return f"no step taken: every group had equal rewards ({good} all successes, {bad} without one)"


def _step_s(metrics: Mapping[str, Any]) -> float:
    return float(metrics["time/rollouts_s"] + metrics["time/train_s"])


def _condition(row: Mapping[str, Any]) -> float | str:
    """Distinguishes the evaluations of a step: the metric, or the sampling temperature."""
    return row.get("metric") or row["temperature"]


def _estimate(row: Mapping[str, Any]) -> str:
    return f"{row['mean']:.3f}  (95 %: {row['low']:.3f} to {row['high']:.3f}, n = {row['n']})"


def _finding_line(finding: Mapping[str, Any], before: str = "") -> Text:
    return Text.assemble(
        before,
        (finding["code"], COLORS[finding["severity"]]),
        f" ({finding['severity']}, step {finding['step']}): {one_line(finding['evidence'])}",
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

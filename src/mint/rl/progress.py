"""A run, live in the terminal: a bar, the numbers of the latest step, and the held-out readings. Writes to stderr."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mint.rl.report import COLORS, sample_lines


class LiveProgress:
    """Pass the instance as `on_progress` of `run_grpo`; use it as a context manager around the call."""

    def __init__(self, steps: int, *, console: Console | None = None) -> None:
        """`steps` is the length of the bar."""
        self.console = console or Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("[bold]RL[/bold]"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
        )
        self._task = self._bar.add_task("steps", total=steps, numbers="loading the model")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        """The hook that `run_grpo` calls."""
        if event == "samples":
            for line in sample_lines(fields["rows"], fields["count"]):
                self._bar.console.print(f"  {escape(line)}", soft_wrap=True)
            return
        if event in ("finding", "stopped"):
            color = COLORS[fields["severity"]]
            what = "stopped by " if event == "stopped" else ""
            self._bar.console.print(
                f"  [{color}]{what}{fields['code']}[/{color}] (step {fields['step']}): {escape(fields['evidence'])}"
            )
            return
        if event == "evaluation":
            how = "greedy" if fields["temperature"] == 0 else f"temperature {fields['temperature']:g}"
            self._bar.console.print(
                f"  held-out {fields['when']:<6} {how:<14} {fields['mean']:.3f}"
                f"  (95 %: {fields['low']:.3f} to {fields['high']:.3f}, n = {fields['n']})"
            )
            self._bar.update(self._task, numbers="sampling" if fields["when"] == "before" else "done")
            return
        self._bar.update(self._task, completed=int(fields["step"]), numbers=step_line(fields))


def step_line(metrics: dict[str, Any]) -> str:
    """The numbers of one step on one line; says so when no group had a signal and no step was taken."""
    used, total = int(metrics["groups/used"]), int(metrics["groups/total"])
    line = f"reward {metrics['reward/mean']:.3f}  groups with signal {used}/{total}"
    if metrics["datums"] == 0:
        good, bad = int(metrics["groups/all_good"]), int(metrics["groups/all_bad"])
        return f"{line}  no step taken: every group had equal rewards ({good} all good, {bad} all bad)"
    mismatch = ""
    if "mismatch/max_abs_logprob_diff" in metrics:
        mismatch = f"mismatch {metrics['mismatch/max_abs_logprob_diff']:.1e}  "
    return (
        f"{line}  grad {metrics['optim/grad_norm']:.3g}  "
        f"{mismatch}"
        f"{metrics['time/rollouts_s'] + metrics['time/train_s']:.2f} s"
    )

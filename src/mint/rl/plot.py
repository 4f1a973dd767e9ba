"""The curve of a run as a PNG. The only file that knows matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mint.errors import MissingExtraError

BLUE, ORANGE, GREY = "#1f6feb", "#d9730d", "#8c959f"


def plot_run(
    path: Path, metrics: Sequence[Mapping[str, float]], evaluations: Sequence[Mapping[str, Any]], *, title: str
) -> None:
    """Mean training reward per step, and the held-out readings with their 95 % intervals.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # deferred: the SDK works without matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("plotting needs matplotlib", remedy="pip install 'mint[local]'") from error
    figure = Figure(figsize=(7.2, 4.0), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = [row["step"] for row in metrics]
    axes.plot(
        steps, [row["reward/mean"] for row in metrics], color=GREY, label="training reward (temperature of the run)"
    )
    last = max(steps, default=0)
    for temperature, color, shift in ((0.0, BLUE, 0.0), (1.0, ORANGE, 0.012 * max(1, last))):
        rows = [row for row in evaluations if row["temperature"] == temperature]
        places = [row["step"] + shift for row in rows]
        means = [row["mean"] for row in rows]
        spread = [[row["mean"] - row["low"] for row in rows], [row["high"] - row["mean"] for row in rows]]
        label = "held-out: greedy" if temperature == 0 else f"the same at temperature {temperature:g}"
        axes.errorbar(places, means, yerr=spread, color=color, fmt="o", capsize=4, label=label)
    axes.set(xlabel="step", ylabel="reward", ylim=(-0.02, 1.04), title=title)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)

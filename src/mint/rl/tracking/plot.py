"""The curves of a run, and compared checkpoints, as a PNG. The only file that knows matplotlib."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mint.errors import InvalidRequestError, MissingExtraError
from mint.extras import install_command
from mint.runs.metric_columns import unknown_metric

BLUE = "#1f6feb"
ORANGE = "#d9730d"
GREY = "#8c959f"


CURVES = ("reward/mean", "train/pair_loss", "train/reverse_kl", "train/loss")
"""The first of these that a run has is its curve: the reward of RL, else the loss of its recipe."""


def curve_name(metrics: Sequence[Mapping[str, float]]) -> str | None:
    """The metric that is the curve of a run; None before its first step."""
    return next((name for name in CURVES if metrics and name in metrics[0]), None)


def plot_curve(
    path: Path, metrics: Sequence[Mapping[str, float]], evaluations: Sequence[Mapping[str, Any]], *, title: str
) -> None:
    """The curve of a run of any recipe; that of RL with its held-out evaluations.

    Raises:
        InvalidRequestError: the run has taken no step, or the picture cannot be written to `path`.
        MissingExtraError: matplotlib is not installed.
    """
    name = curve_name(metrics)
    if name is None:
        raise InvalidRequestError("has taken no step yet", field="run", value=title, remedy="Wait for its first step")
    if name == "reward/mean":
        plot_run(path, metrics, evaluations, title=title)
    else:
        plot_metrics(path, metrics, [name], title=title)


def plot_run(
    path: Path, metrics: Sequence[Mapping[str, float]], evaluations: Sequence[Mapping[str, Any]], *, title: str
) -> None:
    """Mean training reward per step, and the held-out evaluations with their 95 % intervals.

    Raises:
        InvalidRequestError: the picture cannot be written to `path`.
        MissingExtraError: matplotlib is not installed.
    """
    figure, axes = _axes()
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
        label = "held-out: greedy" if temperature == 0 else f"held-out: temperature {temperature:g}"
        axes.errorbar(places, means, yerr=spread, color=color, fmt="o", capsize=4, label=label)
    shown = [row["reward/mean"] for row in metrics] + [row[end] for row in evaluations for end in ("low", "high")]
    if all(0 <= value <= 1 for value in shown):
        axes.set(ylim=(-0.02, 1.04))
    axes.set(xlabel="step", ylabel="reward", title=title)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    _save(figure, path)


def plot_metrics(path: Path, metrics: Sequence[Mapping[str, float]], names: Sequence[str], *, title: str) -> None:
    """Metrics by name over the steps, one chart below the other.

    Raises:
        InvalidRequestError: no step has such a metric, or the picture cannot be written to `path`.
        MissingExtraError: matplotlib is not installed.
    """
    known = {name for row in metrics for name in row} - {"step"}
    for name in names:
        if name not in known:
            raise unknown_metric(name, known)
    figure, *every = _axes(len(names))
    for axes, name in zip(every, names, strict=True):
        rows = [row for row in metrics if name in row]
        axes.plot([row["step"] for row in rows], [row[name] for row in rows], color=BLUE)
        axes.set(ylabel=name)
        axes.grid(alpha=0.25)
    every[0].set(title=title)
    every[-1].set(xlabel="step")
    _save(figure, path)


def require_writable_picture(path: Path) -> None:
    """Checks that a picture can be written to `path`, before the work whose result it shows.

    Raises:
        InvalidRequestError: it is a folder, lies in none, may not be written, or its suffix is of no picture.
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase  # deferred: the SDK works without matplotlib
    except ImportError as error:
        raise _matplotlib_missing() from error
    if path.is_dir():  # matplotlib would write `.png` into it, or a file beside it
        raise InvalidRequestError(
            "is a folder", field="output", value=str(path), remedy=f"Name a file: {path / 'curve.png'}"
        )
    problem = None
    if path.suffix and path.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        problem = f"{path.suffix} is of no picture that matplotlib writes"
    elif not path.parent.is_dir():
        problem = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "permission denied"
    if problem is not None:
        raise InvalidRequestError(
            f"cannot be written ({problem})",
            field="output",
            value=str(path),
            remedy="Name a .png in a folder that exists",
        )


def _save(figure: Any, path: Path) -> None:
    require_writable_picture(path)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # ValueError: a suffix that matplotlib cannot write
        raise InvalidRequestError(
            f"cannot be written ({error})",
            field="output",
            value=str(path),
            remedy="Name a .png in a folder that exists",
        ) from error


def plot_readings(path: Path, readings: Sequence[Mapping[str, Any]], *, title: str) -> None:
    """Compared checkpoints: one chart for each task, a dot with its 95 % interval for each reading.

    `readings` have the fields of `analysis.comparison.Reading`.

    Raises:
        InvalidRequestError: the picture cannot be written to `path`.
        MissingExtraError: matplotlib is not installed.
    """
    tasks = list(dict.fromkeys(row["task"] for row in readings))
    checkpoints = list(dict.fromkeys(row["checkpoint"] for row in readings))
    figure, *every = _axes(len(tasks))
    for task, axes in zip(tasks, every, strict=True):
        for temperature, color, shift in ((0.0, BLUE, -0.08), (1.0, ORANGE, 0.08)):
            rows = [row for row in readings if row["task"] == task and row["temperature"] == temperature]
            places = [checkpoints.index(row["checkpoint"]) + shift for row in rows]
            means = [row["mean"] for row in rows]
            spread = [[row["mean"] - row["low"] for row in rows], [row["high"] - row["mean"] for row in rows]]
            label = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            axes.errorbar(places, means, yerr=spread, color=color, fmt="o", capsize=4, label=label)
        axes.set(ylabel="held-out reward", title=task, xlim=(-0.5, len(checkpoints) - 0.5))
        axes.grid(alpha=0.25)
        axes.legend(loc="best", frameon=False)
    every[-1].set_xticks(range(len(checkpoints)), [name.rsplit("/", 1)[-1] for name in checkpoints])
    figure.suptitle(title)
    _save(figure, path)


def _matplotlib_missing() -> MissingExtraError:
    return MissingExtraError("plotting needs matplotlib", remedy=install_command("local"))


def _axes(count: int = 1) -> tuple[Any, ...]:
    """A figure, and `count` axes below one another that share the steps."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # deferred: the SDK works without matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise _matplotlib_missing() from error
    figure = Figure(figsize=(7.2, 4.0 if count == 1 else 2.2 * count), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, *figure.subplots(count, sharex=True, squeeze=False)[:, 0]

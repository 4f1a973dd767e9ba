"""A run as pandas data frames, for notebooks. The only file that imports pandas."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mint.errors import MissingExtraError
from mint.extras import install_command
from mint.runs.reader import RunReader, RunSummary

if TYPE_CHECKING:
    from pandas import DataFrame

PER_TOKEN = ("tokens", "logprobs", "entropies", "token_advantages")
"""Columns of rollouts with a list per rollout; left out unless requested."""


@dataclass(frozen=True)
class LoadedRun:
    """One run folder. Each frame is read once, when first used; call `load_run` again to see newer rows."""

    reader: RunReader

    @property
    def config(self) -> dict[str, Any]:
        """The content of `config.json`: settings, task, base model."""
        return self.reader.config

    @property
    def summary(self) -> RunSummary:
        """The state of the run and its latest numbers."""
        return self.reader.summary()

    @cached_property
    def metrics(self) -> DataFrame:
        """One row per step, indexed by the step; the columns are the names in `metrics.jsonl`."""
        frame = _frame(self.reader.metrics(), ["step"])
        return frame.astype({"step": int}).set_index("step")

    @cached_property
    def evaluations(self) -> DataFrame:
        """One row per held-out evaluation; parts of the reward are `part/NAME`."""
        rows = [_flat(row) for row in self.reader.evaluations()]
        return _frame(rows, ["step", "when", "temperature", "mean", "low", "high", "n"])

    @cached_property
    def examples(self) -> DataFrame:
        """One row per held-out example that was logged with an evaluation."""
        rows = [
            {"step": row["step"], "when": row["when"], "temperature": row["temperature"], **_flat(example)}
            for place, row in enumerate(self.reader.evaluations())
            for example in self.reader.examples(place)
        ]
        return _frame([_without(row, PER_TOKEN) for row in rows], ["step", "when", "temperature", "prompt", "text"])

    @cached_property
    def findings(self) -> DataFrame:
        """One row per finding."""
        return _frame(self.reader.findings(), ["step", "code", "severity", "evidence", "remedy"])

    @cached_property
    def checkpoints(self) -> DataFrame:
        """One row per saved step."""
        return _frame(self.reader.checkpoints(), ["step", "checkpoint"])

    def rollouts(
        self, first_step: int | None = None, last_step: int | None = None, *, tokens: bool = False
    ) -> DataFrame:
        """One row per rollout of the steps from `first_step` to `last_step`, both included; None is no limit.

        Parts of the reward are `part/NAME`, facts from the grader are `info/NAME`. `tokens` also returns the columns
        with a list per rollout. A rollout takes about as much memory as its line in `rollouts.jsonl`.
        """
        drop = () if tokens else PER_TOKEN
        rows = [
            _without(_flat(row), drop)
            for step in self.reader.steps()
            if (first_step is None or step >= first_step) and (last_step is None or step <= last_step)
            for row in self.reader.rows(step)
        ]
        return _frame(rows, ["step", "row", "group", "item", "prompt", "text", "reward", "advantage"])


def load_run(path: str | Path) -> LoadedRun:
    """The run in a folder.

    Raises:
        NotFoundError: the folder holds no run.
        MissingExtraError: pandas is not installed.
    """
    run = LoadedRun(RunReader(Path(path)))
    _pandas()
    return run


def _frame(rows: list[dict[str, Any]], columns: list[str]) -> DataFrame:
    """Rows as a frame whose first columns are `columns`, even if no row has them."""
    names = dict.fromkeys([*columns, *(name for row in rows for name in row)])
    return _pandas().DataFrame(rows, columns=list(names))


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the parts of the reward and the facts from the grader as columns."""
    flat = _without(row, ("parts", "info"))
    flat |= {f"part/{name}": value for name, value in (row.get("parts") or {}).items()}
    return flat | {f"info/{name}": value for name, value in (row.get("info") or {}).items()}


def _without(row: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def _pandas() -> Any:
    try:
        import pandas  # deferred: an optional package
    except ImportError as error:
        raise MissingExtraError("data frames need pandas", remedy=install_command("trackers")) from error
    return pandas

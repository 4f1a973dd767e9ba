"""A run as data frames: every number of the run folder, under its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mint.errors import NotFoundError
from mint.recipes.task_registry import load_task
from mint.rl import LoadedRun, load_run, run_grpo
from mint.runs.log import RunLog

pytest.importorskip("pandas")
STEPS = 3


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunLog]:
    """A run whose reward has parts, with evaluations of the held-out set."""
    folder = tmp_path_factory.mktemp("frames")
    choice = load_task("tools", seed=0)
    size = {"steps": STEPS, "batch_size": 2, "group_size": 3, "heldout_size": 4, "run_dir": folder / "run"}
    run_grpo(choice.adapter, choice.config.changed(**size))
    yield RunLog(folder / "run")


@pytest.fixture
def run(log: RunLog) -> LoadedRun:
    return load_run(str(log.folder))


def test_metrics_are_one_row_per_step_by_the_names_of_the_run_folder(run: LoadedRun, log: RunLog) -> None:
    rows = log.read("metrics.jsonl")
    assert run.metrics.index.tolist() == [1, 2, 3]
    for row in rows:
        names = [name for name in row if name != "step"]
        assert np.array_equal(run.metrics.loc[int(row["step"]), names].astype(float), [row[name] for name in names])


def test_rollouts_are_one_row_each_with_the_parts_of_the_reward_as_columns(run: LoadedRun, log: RunLog) -> None:
    rows, frame = log.read("rollouts.jsonl"), run.rollouts()
    assert len(frame) == len(rows) and "tokens" not in frame and "logprobs" not in frame
    for name in ("step", "group", "item", "prompt", "text", "reward", "stop_reason", "tool_calls"):
        assert frame[name].tolist() == [row[name] for row in rows]
    for part in {name for row in rows for name in row["parts"]}:
        assert frame[f"part/{part}"].fillna(0.0).tolist() == [row["parts"].get(part, 0.0) for row in rows]
    assert frame.groupby("step")["reward"].mean().tolist() == pytest.approx(run.metrics["reward/mean"].tolist())


def test_some_steps_can_be_read_alone_and_with_their_tokens(run: LoadedRun, log: RunLog) -> None:
    frame = run.rollouts(2, 2, tokens=True)
    rows = [row for row in log.read("rollouts.jsonl") if row["step"] == 2]
    assert frame["tokens"].tolist() == [row["tokens"] for row in rows]
    assert frame["logprobs"].tolist() == [row["logprobs"] for row in rows]


def test_evaluations_checkpoints_and_settings_are_there(run: LoadedRun, log: RunLog) -> None:
    evaluations = log.read("evaluations.jsonl")
    assert run.evaluations["mean"].tolist() == [row["mean"] for row in evaluations]
    assert run.examples["text"].tolist() == [example["text"] for row in evaluations for example in row["examples"]]
    assert run.checkpoints["checkpoint"].tolist() == [row["checkpoint"] for row in log.read("checkpoints.jsonl")]
    assert run.config["group_size"] == 3 and run.summary.state == "finished"
    assert list(run.findings.columns[:5]) == ["step", "code", "severity", "evidence", "remedy"]


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="holds no run"):
        load_run(tmp_path)

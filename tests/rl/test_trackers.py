"""Trackers mirror a run: the numbers that they have are those of the run folder, and none of them can end a run."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from mint.errors import InvalidRequestError
from mint.recipes.task_registry import load_task
from mint.rl import RLConfig, RunResult, run_grpo
from mint.rl.finding import Finding
from mint.rl.run_config import TrackerName
from mint.rl.tracking.trackers import Trackers
from mint.runs.log import RunLog

STEPS = 3
SIZE = {"steps": STEPS, "batch_size": 2, "group_size": 2, "heldout_size": 4}
MIRRORED = ("reward/mean", "success/rate", "rollouts/mean_length", "learning_rate")


@pytest.fixture(scope="module")
def tracked_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunResult, Path]]:
    """A run that all three trackers mirror, with a reading before and after."""
    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINT_HOME", str(folder / "home"))
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        choice = load_task("math", seed=0)
        config = choice.config.changed(**SIZE, run_dir=folder / "run", trackers=get_args(TrackerName))
        yield run_grpo(choice.adapter, config), folder


def logged(result: RunResult) -> list[dict[str, Any]]:
    return RunLog(result.run_dir).read("metrics.jsonl")


def test_tensorboard_reads_the_numbers_of_the_run_folder(tracked_run: tuple[RunResult, Path]) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tensor_util = pytest.importorskip("tensorboard.util.tensor_util")
    result, _ = tracked_run
    events = event_accumulator.EventAccumulator(str(result.run_dir / "tensorboard")).Reload()
    for name in MIRRORED:
        found = {event.step: float(tensor_util.make_ndarray(event.tensor_proto)) for event in events.Tensors(name)}
        assert found == {int(row["step"]): pytest.approx(row[name], rel=1e-6) for row in logged(result)}
    heldout = {event.step: float(tensor_util.make_ndarray(event.tensor_proto))
               for event in events.Tensors("heldout/greedy/mean")}  # fmt: skip
    assert heldout == {
        0: pytest.approx(result.heldout_before[0.0].mean, rel=1e-6),
        STEPS: pytest.approx(result.heldout_after[0.0].mean, rel=1e-6),
    }


def test_wandb_offline_holds_the_numbers_of_the_run_folder(tracked_run: tuple[RunResult, Path]) -> None:
    pytest.importorskip("wandb")
    result, _ = tracked_run
    (file,) = (result.run_dir / "wandb").glob("offline-run-*/*.wandb")
    history = {int(row.pop("_step")): row for row in wandb_history(file.read_bytes())}
    for row in logged(result):
        step = int(row["step"])
        assert {name: history[step][name] for name in MIRRORED} == {name: row[name] for name in MIRRORED}
    assert history[STEPS]["heldout/greedy/mean"] == result.heldout_after[0.0].mean


def test_trackio_holds_the_numbers_of_the_run_folder(
    tracked_run: tuple[RunResult, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = pytest.importorskip("trackio.sqlite_storage")
    result, _ = tracked_run
    rows = storage.SQLiteStorage.get_logs("mint", result.run_dir.name)
    for row in logged(result):
        (found,) = [one for one in rows if one["step"] == int(row["step"]) and "reward/mean" in one]
        assert {name: found[name] for name in MIRRORED} == {name: row[name] for name in MIRRORED}


def test_which_trackers_mirror_a_run_is_not_part_of_what_it_is(
    tracked_run: tuple[RunResult, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be resumed without them."""
    result, folder = tracked_run
    monkeypatch.setenv("MINT_HOME", str(folder / "home"))
    choice = load_task("math", seed=0)
    config = choice.config.changed(**SIZE, run_dir=result.run_dir)
    assert run_grpo(choice.adapter, config, resume=True).checkpoint == result.checkpoint


def test_a_tracker_that_fails_is_dropped_and_reported_while_the_others_go_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    found: list[Finding] = []
    with Trackers(["tensorboard"], tmp_path, {}, found.append) as trackers:
        trackers("step", {"step": 1.0, "reward/mean": 0.5})
        trackers("step", {"step": 2.0, "reward/mean": "no number"})
        trackers("step", {"step": 3.0, "reward/mean": 0.5})
    assert [(finding.code, finding.severity, finding.step) for finding in found] == [("tracker_failed", "warning", 2)]


def test_trackers_are_named_in_one_word_or_many() -> None:
    assert RLConfig(trackers="tensorboard, wandb").trackers == ("tensorboard", "wandb")
    assert RLConfig(trackers=["trackio"]).trackers == ("trackio",)
    with pytest.raises(InvalidRequestError, match="trackers"):
        RLConfig(trackers="mlflow")


def wandb_history(data: bytes) -> Iterator[dict[str, float]]:
    """The rows of an offline W&B file: LevelDB's log format (7 bytes before each record) after 7 bytes of its own."""
    from wandb.proto import wandb_internal_pb2 as pb  # an optional package

    place = 7
    while place + 7 <= len(data):
        _, length, _ = struct.unpack_from("<IHB", data, place)
        record = pb.Record()
        record.ParseFromString(data[place + 7 : place + 7 + length])
        place += 7 + length
        if record.WhichOneof("record_type") == "history":
            yield {"/".join(item.nested_key) or item.key: float(item.value_json) for item in record.history.item}

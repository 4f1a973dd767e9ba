"""A run folder survives a kill at any line and refuses another run's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from mint.errors import InvalidRequestError
from mint.rl.run_log import ResumePoint, RunLog


def test_resuming_drops_what_came_after_the_checkpoint_and_a_half_line(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    assert log.start({"seed": 1}, resume=False) is None
    for step in range(1, 6):
        log.append("metrics.jsonl", {"step": step})
    log.save_point(ResumePoint(3, "mint://m/weights/step-3", {"samples": 3}))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')
    point = RunLog(tmp_path).start({"seed": 1}, resume=True)
    assert point == ResumePoint(3, "mint://m/weights/step-3", {"samples": 3})
    assert [row["step"] for row in log.read("metrics.jsonl")] == [1, 2, 3]


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    RunLog(tmp_path).start({"seed": 1}, resume=False)
    with pytest.raises(InvalidRequestError, match="resume=True"):
        RunLog(tmp_path).start({"seed": 1}, resume=False)


def test_a_run_is_not_resumed_with_other_settings(tmp_path: Path) -> None:
    RunLog(tmp_path).start({"seed": 1, "betas": (0.9, 0.999)}, resume=False)
    assert RunLog(tmp_path).start({"seed": 1, "betas": (0.9, 0.999)}, resume=True) is None
    with pytest.raises(InvalidRequestError, match="another seed"):
        RunLog(tmp_path).start({"seed": 2, "betas": (0.9, 0.999)}, resume=True)

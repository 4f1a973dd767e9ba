"""Snapshots cost at most a twentieth of the work, and leave at most a minute of it to a replay."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from service_harness import GOOD_PASS, STEP, Harness, open_service

from mint.server.worker import snapshot_policy, snapshots
from mint.server.worker.snapshot_policy import MAX_REPLAY_S, MAX_SHARE, SnapshotTimes, is_due


@pytest.fixture(autouse=True)
def real_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_policy, "MAX_SHARE", MAX_SHARE)


@pytest.mark.parametrize(
    ("is_small", "step_s", "replay_s", "snapshot_s", "expected"),
    [
        (True, 0.001, 0.001, None, True),  # the first of a process, whatever it may take
        (False, 1.0, 1.0, None, True),
        (True, 1.0, 1.0, 0.05, True),  # a small state after every step
        (True, 1.0, 1.0, 0.051, False),  # unless that is more than 5 %
        (True, 1.0, 2.0, 0.051, True),
        (False, 1.0, 9.0, 0.001, False),  # a large one not all the time, however fast it is
        (False, 1.0, 10.0, 0.5, True),
        (False, 1.0, 10.0, 0.6, False),
        (False, 1.0, 12.0, 0.6, True),
        (False, 1.0, 59.0, 10.0, False),
        (False, 1.0, 59.5, 10.0, True),  # the next step would be more than a minute behind
        (False, 90.0, 90.0, 10.0, True),  # a step alone is
        (False, 1.0, 30.0, math.inf, False),  # while one is written
        (False, 1.0, 60.0, math.inf, True),
    ],
)
def test_when_a_state_is_saved(
    is_small: bool, step_s: float, replay_s: float, snapshot_s: float | None, expected: bool
) -> None:
    assert is_due(SnapshotTimes(step_s, replay_s, snapshot_s), is_small=is_small) is expected


@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize("step_s", [0.003, 0.04, 0.7, 9.0, 45.0, 200.0])
@pytest.mark.parametrize("snapshot_s", [0.0004, 0.02, 0.3, 2.5, 20.0])
def test_over_many_steps_both_bounds_hold(is_small: bool, step_s: float, snapshot_s: float) -> None:
    work_s = behind_s = most_behind_s = 0.0
    count = 0
    known_s: float | None = None
    while work_s < 100 * max(step_s, snapshot_s):
        work_s += step_s
        behind_s += step_s
        most_behind_s = max(most_behind_s, behind_s)
        if is_due(SnapshotTimes(step_s, behind_s, known_s), is_small=is_small):
            known_s, behind_s, count = snapshot_s, 0.0, count + 1
    assert most_behind_s <= max(MAX_REPLAY_S, step_s) + 1e-6
    if max(snapshot_s / MAX_SHARE, step_s) + step_s <= MAX_REPLAY_S:  # both can hold
        assert (count - 1) * snapshot_s <= MAX_SHARE * work_s


def steps_and_snapshots(harness: Harness, steps: int) -> int:
    """Trains, and returns how many snapshots the journal has named."""
    model_id = harness.create_model()
    named: set[int] = set()
    for step in range(steps):
        harness.run("forward_backward", model_id, 2 * step + 1, GOOD_PASS)
        harness.run("optim_step", model_id, 2 * step + 2, STEP)
        named |= {row.seq_id for row in harness.stored(lambda journal: journal.snapshots(model_id))}
    return len(named)


def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each snapshot takes half a second, which is 10 s of work."""
    real = snapshots.write_snapshot

    def write(*arguments: Any, **named: Any) -> None:
        time.sleep(0.5)
        real(*arguments, **named)

    monkeypatch.setattr(snapshots, "write_snapshot", write)


def test_a_slow_disk_gets_fewer_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch)
    harness = Harness(open_service(tmp_path))
    assert steps_and_snapshots(harness, 6) == 1
    harness.service.stop()


def test_a_slow_disk_does_not_make_a_replay_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch)
    monkeypatch.setattr(snapshot_policy, "MAX_REPLAY_S", 0.0)
    harness = Harness(open_service(tmp_path))
    assert steps_and_snapshots(harness, 3) == 3
    harness.service.stop()

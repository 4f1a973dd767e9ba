"""When the state of a model is saved: often enough for a short replay, rarely enough to cost little.

Pure: knows seconds, not models or files.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_SHARE = 0.05
"""Snapshots take at most this part of the time of the work that they save."""

MAX_REPLAY_S = 60.0
"""After a restart, requests that took so long may have to run again, unless a single step takes longer."""

LARGE_INTERVAL_S = 10.0
"""Large states are saved after at least so much work: to write them all the time wears out a disk."""


@dataclass(frozen=True)
class SnapshotTimes:
    """What is known of a model when a step has ended.

    `step_s` is the time of this step with its passes, `replay_s` that of all passes and steps since the newest
    snapshot, this one included. `snapshot_s` is what the newest snapshot took: infinite while it is being written,
    None before the first of this process.
    """

    step_s: float
    replay_s: float
    snapshot_s: float | None


def is_due(times: SnapshotTimes, *, is_small: bool) -> bool:
    """Whether the state is saved now.

    A small state is saved after every step, as far as `MAX_SHARE` allows. `MAX_REPLAY_S` comes before `MAX_SHARE`: the
    next step is expected to take as long as this one.
    """
    if times.snapshot_s is None or times.replay_s + times.step_s > MAX_REPLAY_S:
        return True
    interval_s = max(times.snapshot_s / MAX_SHARE, 0.0 if is_small else LARGE_INTERVAL_S)
    return times.replay_s >= interval_s

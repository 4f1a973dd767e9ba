"""Saves the state of a model after steps and loads, so that recovery replays few requests.

`snapshot_policy` says when: a small state as a rule after every step, before the step is acknowledged; a large one
after some seconds of work, written in the background. So are the weights of samplers. Used on the worker's thread only.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mint.engine.protocol import ModelState
from mint.models.tensor_files import sync_file
from mint.server.ids import file_stem
from mint.server.limits import MAX_SNAPSHOTS
from mint.server.store.journal import Journal
from mint.server.store.rows import SnapshotRow
from mint.server.store.snapshot_files import size_bytes, write_snapshot, write_weights
from mint.server.worker.snapshot_policy import SnapshotTimes, is_due

SMALL_STATE_BYTES = 20 * 1024 * 1024
"""States up to this size are small: they are saved before the step is acknowledged."""

RETAINED_RESULTS = 4096
"""The result of a pass is kept until so many later requests of its model have run: the queue takes no more of an owner.
The results of steps and saves are small, and kept until the session ends."""

RETAINED_BYTES = 256 << 20
"""The results of a model's passes are larger together for a moment only: then the older half goes, not the newest."""

ROOM_SHARE = 8
"""Payloads, or results, of more than this part of what is left of the owner's quota of the journal are not kept."""

PRUNED_AT_ONCE = 64
STORAGE_CHECK_S = 0.1


def _written() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


@dataclass
class SnapshotHistory:
    """The snapshots of a live model.

    `written` is done once the newest one survives a power failure; it took `snapshot_s`. The passes and steps since
    then took `replay_s`, the last step with its passes `step_s`. Requests with `seq_id < pruned_below` have no payload
    in the journal any more; the next two say this of the results of passes with and without a gradient. Those below
    `too_large_below` shall have none, because all results together were too large.
    """

    rows: list[SnapshotRow] = field(default_factory=list)  # newest first
    snapshot_s: float | None = None  # None: there is none of this process
    replay_s: float = 0.0
    step_s: float = 0.0
    open_s: float = 0.0  # passes since the last step
    state_bytes: int = 0
    pruned_below: int = 0
    results_pruned_below: int = 0
    forwards_pruned_below: int = 0
    results: deque[tuple[int, int]] = field(default_factory=deque)  # seq_id and bytes of those in the journal
    result_bytes: int = 0
    too_large_below: int = 0
    written: Future[None] = field(default_factory=_written)

    @property
    def is_small(self) -> bool:
        return self.state_bytes <= SMALL_STATE_BYTES

    @property
    def times(self) -> SnapshotTimes:
        """What the policy reads."""
        is_ready = self.is_small or self.written.done()  # the time of a large one is known when it is written
        return SnapshotTimes(self.step_s, self.replay_s, self.snapshot_s if is_ready else math.inf)

    def note_pass(self, seconds: float) -> None:
        """Counts the time of a pass."""
        self.open_s += seconds
        self.replay_s += seconds

    def note_step(self, seconds: float) -> None:
        """Counts the time of a step."""
        self.step_s = self.open_s + seconds
        self.open_s = 0.0
        self.replay_s += seconds


def prune_results(
    history: SnapshotHistory, seq_id: int, size_bytes: int, *, room_bytes: int | None = None
) -> dict[str, tuple[int, int]]:
    """The fields of `Finish` that remove old results of passes, together with request `seq_id`, which has a result of
    this size. `room_bytes` is what is left of the owner's quota of the journal; None if that is enough.

    A replay compares the results behind the oldest snapshot, so those stay in any case.
    """
    changes: dict[str, tuple[int, int]] = {}
    before = history.too_large_below
    most_bytes = RETAINED_BYTES if room_bytes is None else min(RETAINED_BYTES, room_bytes // ROOM_SHARE)
    _count_result(history, seq_id, size_bytes, most_bytes)
    least = 1 if history.too_large_below > before else PRUNED_AT_ONCE
    needless_below = max(seq_id - RETAINED_RESULTS, history.too_large_below)
    first, last = history.results_pruned_below, min(needless_below, history.pruned_below)
    if last - first >= least:
        changes["pruned_results"] = (first, last)
        history.results_pruned_below = last
    first = history.forwards_pruned_below
    if needless_below - first >= least:
        changes["pruned_forwards"] = (first, needless_below)
        history.forwards_pruned_below = needless_below
    return changes


def _count_result(history: SnapshotHistory, seq_id: int, size_bytes: int, most_bytes: int) -> None:
    history.results.append((seq_id, size_bytes))
    history.result_bytes += size_bytes
    is_too_large = history.result_bytes > most_bytes
    while len(history.results) > 1:
        oldest, size = history.results[0]
        if not (is_too_large and history.result_bytes > most_bytes // 2) and oldest >= seq_id - RETAINED_RESULTS:
            break
        history.results.popleft()
        history.result_bytes -= size
        if is_too_large:
            history.too_large_below = oldest + 1


class Snapshots:
    """Writes the snapshots of one data directory."""

    def __init__(self, journal: Journal, data_dir: Path) -> None:
        self._durability = journal.durability
        self._storage = journal.storage
        self._data_dir = data_dir

    def save(
        self,
        history: SnapshotHistory,
        model_id: str,
        seq_id: int,
        read_state: Callable[[str], ModelState],
        digest: str,
        *,
        force: bool,
        frees_payloads: bool = False,
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Saves the state after request `seq_id`, if it is time or with `force`.

        Payloads are kept for a replay from the oldest snapshot; with `frees_payloads` from this one, and this waits for
        the disk.

        Returns the fields of `Finish` to commit, and the files to delete after that commit.

        Raises:
            JournalError: the storage does not work now.
        """
        if not (force or is_due(history.times, is_small=history.is_small)):
            return {}, ()
        began = time.perf_counter()
        state = read_state(model_id)
        history.state_bytes = size_bytes(state)
        row = SnapshotRow(model_id, seq_id, f"snapshots/{file_stem(model_id)}-{seq_id}.safetensors", digest)
        # so that a power failure can cost only the newest: replay starts at the one before
        self.wait_written(history)
        path = self._data_dir / row.file
        history.replay_s = 0.0
        history.snapshot_s = time.perf_counter() - began

        def note(seconds: float) -> None:  # until `written` is done, only the thread that writes calls this
            history.snapshot_s = (history.snapshot_s or 0.0) + seconds

        history.written = self._write(
            "a snapshot", path, history.state_bytes, lambda: write_snapshot(path, state, row), note
        )
        rows = [row, *history.rows]
        history.rows = rows[:MAX_SNAPSHOTS]
        old = rows[MAX_SNAPSHOTS:]
        if frees_payloads:
            self.wait_written(history)  # nothing else has this state then
        elif not old:
            return {"snapshot": row}, ()
        first = history.pruned_below
        oldest = row if frees_payloads else history.rows[-1]
        history.pruned_below = max(first, oldest.seq_id + 1)
        changes: dict[str, Any] = {
            "snapshot": row,
            "dropped_snapshots": tuple(gone.seq_id for gone in old),
            "pruned_payloads": (first, history.pruned_below),
        }
        return changes, tuple(gone.file for gone in old)

    def save_weights(self, file: str, weights: Mapping[str, np.ndarray]) -> None:
        """Saves weights alone, for a sampler. Returns when they survive a power failure.

        Only then may the sampler's row be committed: any later fsync of the journal makes that durable, and the weights
        of that moment cannot be made again from a row.

        Raises:
            JournalError: the storage does not work now.
        """
        path = self._data_dir / file
        size = sum(array.nbytes for array in weights.values())
        written = self._write(
            "published weights", path, size, lambda: write_weights(path, weights, sync=False, is_sealed=True)
        )
        self._wait_durable(written)

    def wait_written(self, history: SnapshotHistory) -> None:
        """Returns once the newest snapshot is durable; does not wait for a storage that does not work, because that
        would hold up sampling.

        Raises:
            JournalError: the storage does not work now.
        """
        self._wait_durable(history.written)

    def _wait_durable(self, written: Future[None]) -> None:
        while not wait([written], timeout=STORAGE_CHECK_S).done:
            self._storage.require_working()
        written.result()

    def _write(
        self,
        what: str,
        path: Path,
        size: int,
        write: Callable[[], None],
        note: Callable[[float], None] = lambda _seconds: None,
    ) -> Future[None]:
        """Writes a file, here if it is small, and makes it durable on the disk's thread, as soon as that can be.

        `note` is told the seconds that this took; syncing a small file does not count.
        """
        file = _PendingFile(path, write)
        work = file.write_durably
        if size <= SMALL_STATE_BYTES:
            with self._storage.writing(what, size):
                _timed(file.write, note)
        else:
            work = partial(_timed, file.write_durably, note)
        return self._durability.submit(self._storage.keep_trying, what, work, size)


class _PendingFile:
    """A file that is not durable yet. `write` writes all of it."""

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        self._path = path
        self._write = write
        self._is_written = False

    def write(self) -> None:
        self._write()
        self._is_written = True

    def write_durably(self) -> None:
        """Writes it if that is not done yet, and syncs it. After a failed sync the next call writes it again."""
        if not self._is_written:
            self.write()
        self._is_written = False  # a second sync could succeed although the first has lost the data
        sync_file(self._path)


def _timed(work: Callable[[], None], note: Callable[[float], None]) -> None:
    began = time.perf_counter()
    work()
    note(time.perf_counter() - began)

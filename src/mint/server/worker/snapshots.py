"""Saves the state of a model after steps and loads, so that recovery replays few requests.

A small state is saved after every step, before the step is acknowledged; a large one every few seconds, written in the
background. So are the weights of samplers. Used on the worker's thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mint.engine.protocol import ModelState
from mint.models.tensor_files import sync_file
from mint.server.ids import file_stem
from mint.server.store.durability import Durability
from mint.server.store.rows import SnapshotRow
from mint.server.store.snapshot_files import size_bytes, write_snapshot, write_weights

SMALL_STATE_BYTES = 20 * 1024 * 1024
"""States up to this size are saved before every step is acknowledged."""

SNAPSHOT_INTERVAL_S = 10.0
MAX_SNAPSHOTS = 3
"""The older ones are for the case that the newest cannot be read."""

KEPT_RESULTS = 4096
"""The result of a pass is kept until so many later requests of its model have run: the queue takes no more of an owner.
The results of steps and saves are small, and kept until the session ends."""

PRUNED_AT_ONCE = 64


def _written() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


@dataclass
class SnapshotHistory:
    """The snapshots of a live model.

    `written` is done once the newest one survives a power failure. Requests with `seq_id < pruned_below` have no
    payload in the journal any more; the next two say this of the results of passes with and without a gradient.
    """

    rows: list[SnapshotRow] = field(default_factory=list)  # newest first
    saved_at: float | None = None  # monotonic seconds
    state_bytes: int = 0
    pruned_below: int = 0
    results_pruned_below: int = 0
    forwards_pruned_below: int = 0
    written: Future[None] = field(default_factory=_written)


def prune_results(history: SnapshotHistory, seq_id: int) -> dict[str, tuple[int, int]]:
    """The fields of `Finish` that remove old results of passes, together with request `seq_id`.

    A replay compares the results behind the oldest snapshot, so those stay in any case.
    """
    changes: dict[str, tuple[int, int]] = {}
    first, last = history.results_pruned_below, min(seq_id - KEPT_RESULTS, history.pruned_below)
    if last - first >= PRUNED_AT_ONCE:
        changes["pruned_results"], history.results_pruned_below = (first, last), last
    first, last = history.forwards_pruned_below, seq_id - KEPT_RESULTS
    if last - first >= PRUNED_AT_ONCE:
        changes["pruned_forwards"], history.forwards_pruned_below = (first, last), last
    return changes


class Snapshots:
    """Writes the snapshots of one data directory."""

    def __init__(self, durability: Durability, data_dir: Path) -> None:
        self._durability = durability
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
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Saves the state after request `seq_id`, if it is time or with `force`.

        Returns the fields of `Finish` to commit, and the files to delete after that commit.
        """
        now = time.monotonic()
        due = history.saved_at is None or now - history.saved_at >= SNAPSHOT_INTERVAL_S
        if not (force or due or history.state_bytes <= SMALL_STATE_BYTES):
            return {}, ()
        state = read_state(model_id)
        history.state_bytes = size_bytes(state)
        history.saved_at = now
        file = f"snapshots/{file_stem(model_id)}-{seq_id}.safetensors"
        history.written.result()  # so that a power failure can cost only the newest: replay starts at the one before
        path = self._data_dir / file
        if history.state_bytes <= SMALL_STATE_BYTES:
            write_snapshot(path, state, digest=digest)
            history.written = self._durability.submit(sync_file, path)
        else:
            history.written = self._durability.submit(_write_durably, path, state, digest)
        row = SnapshotRow(model_id, seq_id, file, digest)
        rows = [row, *history.rows]
        history.rows, old = rows[:MAX_SNAPSHOTS], rows[MAX_SNAPSHOTS:]
        if not old:
            return {"snapshot": row}, ()
        first = history.pruned_below
        history.pruned_below = history.rows[-1].seq_id + 1
        changes: dict[str, Any] = {
            "snapshot": row,
            "dropped_snapshots": tuple(gone.seq_id for gone in old),
            "pruned_payloads": (first, history.pruned_below),
        }
        return changes, tuple(gone.file for gone in old)

    def save_weights(self, file: str, weights: Mapping[str, np.ndarray]) -> Future[None]:
        """Saves weights alone, for a sampler; they survive a power failure once the result is done."""
        path = self._data_dir / file
        if sum(array.nbytes for array in weights.values()) > SMALL_STATE_BYTES:
            return self._durability.submit(write_weights, path, weights)
        write_weights(path, weights, sync=False)
        return self._durability.submit(sync_file, path)


def _write_durably(path: Path, state: ModelState, digest: str) -> None:
    write_snapshot(path, state, digest=digest)
    sync_file(path)

"""Writes a model's state to safetensors files, and reads it back."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mint.engine.protocol import ModelState
from mint.errors import CheckpointError, JournalError
from mint.models.tensor_files import SEAL, read_tensors, write_tensors
from mint.server.store.rows import SnapshotRow

log = logging.getLogger("mint.store")

STATE_FORMAT, SNAPSHOT_FORMAT = "mint-state-1", "mint-state-2"


@contextmanager
def reading(what: str, *, remedy: str) -> Generator[None]:
    """A block that reads files of a user's: its errors tell the user what is damaged, and the log which file.

    Raises:
        CheckpointError: a file is missing or damaged.
        JournalError: a file cannot be opened now, for want of descriptors.
    """
    try:
        yield
    except CheckpointError as error:
        log.error("%s is damaged: %s", what, error)
        raise CheckpointError(f"{what} is damaged, and was not used", remedy=remedy) from error
    except JournalError as error:
        log.error("%s: %s", what, error)
        raise JournalError(f"{what} cannot be opened now", remedy=error.remedy) from error


def write_snapshot(path: Path, state: ModelState, row: SnapshotRow) -> None:
    """Writes weights and optimizer to one file. It survives a loss of power only after `sync_file`."""
    parts = {"weights": state.weights, "exp_avg": state.exp_avg or {}, "exp_avg_sq": state.exp_avg_sq or {}}
    metadata = {"format": SNAPSHOT_FORMAT, "step": str(state.step), "digest": row.digest, **_place(row)}
    write_tensors(path, _joined(parts), metadata, sync=False, seal="header")  # the digest covers the arrays


def read_snapshot(path: Path, row: SnapshotRow) -> ModelState:
    """Reads what `write_snapshot` wrote for this row. The caller must compare the row's digest with the arrays.

    Files of an older mint do not name their model and request.

    Raises:
        CheckpointError: the file is missing or damaged, or that of another row.
    """
    arrays, metadata = read_tensors(path)
    is_sealed = metadata.get("format") == STATE_FORMAT or f"header{SEAL}" in metadata  # the older form has no seal
    if (
        metadata.get("format") not in (STATE_FORMAT, SNAPSHOT_FORMAT)
        or metadata.get("digest") != row.digest
        or any(metadata.get(name, value) != value for name, value in _place(row).items())
        or not is_sealed
    ):
        raise CheckpointError(f"{path} is damaged: its header is not that of this snapshot")
    return ModelState(
        _picked("weights", arrays), _step(metadata, path), _picked("exp_avg", arrays), _picked("exp_avg_sq", arrays)
    )


def _place(row: SnapshotRow) -> dict[str, str]:
    """The metadata that say whose state a snapshot is, and after which request."""
    return {"model_id": row.model_id, "seq_id": str(row.seq_id)}


def write_weights(path: Path, weights: Mapping[str, np.ndarray], *, sync: bool = True, is_sealed: bool = False) -> None:
    """Writes weights alone, under their own names; durable when this returns, without `sync` after `sync_file`.

    `is_sealed` adds a checksum, for a file of which nothing else has one.
    """
    write_tensors(path, weights, {}, sync=sync, seal="content" if is_sealed else None)


def write_optimizer(path: Path, state: ModelState) -> None:
    """Writes moments and step count; durable when this returns."""
    parts = {"exp_avg": state.exp_avg or {}, "exp_avg_sq": state.exp_avg_sq or {}}
    write_tensors(path, _joined(parts), {"format": STATE_FORMAT, "step": str(state.step), "digest": ""})


def read_weights(path: Path, *, must_be_sealed: bool = False) -> dict[str, np.ndarray]:
    """Reads what `write_weights` wrote, or the weights of a snapshot of an older mint.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    arrays, metadata = read_tensors(path)
    if must_be_sealed and f"content{SEAL}" not in metadata:
        raise CheckpointError(f"{path} is damaged: its checksum is gone")
    return _picked("weights", arrays) if "step" in metadata else arrays


def read_optimizer(path: Path, weights: Mapping[str, np.ndarray]) -> ModelState:
    """Reads what `write_optimizer` wrote; the state has it together with `weights`.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    arrays, metadata = read_tensors(path)
    return ModelState(weights, _step(metadata, path), _picked("exp_avg", arrays), _picked("exp_avg_sq", arrays))


def size_bytes(state: ModelState) -> int:
    """The size of a state's arrays together."""
    total = 0
    for part in (state.weights, state.exp_avg or {}, state.exp_avg_sq or {}):
        for array in part.values():
            total += array.nbytes
    return total


def _joined(parts: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays of all parts under `part/name`."""
    arrays: dict[str, np.ndarray] = {}
    for part, named in parts.items():
        for name, array in named.items():
            arrays[f"{part}/{name}"] = array
    return arrays


def _picked(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    start = f"{prefix}/"
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}


def _step(metadata: Mapping[str, str], path: Path) -> int:
    try:
        return int(metadata["step"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} has no step count", remedy="Use another checkpoint") from error

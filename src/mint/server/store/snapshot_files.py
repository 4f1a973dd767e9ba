"""Writes a model's state to safetensors files, and reads it back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mint.engine.protocol import ModelState
from mint.errors import CheckpointError
from mint.models.tensor_files import read_tensors, write_tensors


def write_snapshot(path: Path, state: ModelState, *, digest: str) -> None:
    """Writes weights and optimizer to one file. It survives a loss of power only after `sync_file`."""
    parts = {"weights": state.weights, "exp_avg": state.exp_avg or {}, "exp_avg_sq": state.exp_avg_sq or {}}
    _write_parts(path, parts, state.step, digest, sync=False)


def read_snapshot(path: Path) -> ModelState:
    """Reads what `write_snapshot` wrote.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    arrays, metadata = read_tensors(path)
    return ModelState(
        _picked("weights", arrays), _step(metadata, path), _picked("exp_avg", arrays), _picked("exp_avg_sq", arrays)
    )


def write_weights(path: Path, weights: Mapping[str, np.ndarray], *, sync: bool = True) -> None:
    """Writes weights alone, under their own names; durable when this returns, without `sync` after `sync_file`."""
    write_tensors(path, weights, {}, sync=sync)


def write_optimizer(path: Path, state: ModelState) -> None:
    """Writes moments and step count; durable when this returns."""
    parts = {"exp_avg": state.exp_avg or {}, "exp_avg_sq": state.exp_avg_sq or {}}
    _write_parts(path, parts, state.step, digest="", sync=True)


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Reads what `write_weights` wrote, or the weights of a snapshot.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    arrays, metadata = read_tensors(path)
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


def _write_parts(
    path: Path, parts: Mapping[str, Mapping[str, np.ndarray]], step: int, digest: str, *, sync: bool
) -> None:
    """Writes the arrays of all parts under `part/name`."""
    arrays: dict[str, np.ndarray] = {}
    for part, named in parts.items():
        for name, array in named.items():
            arrays[f"{part}/{name}"] = array
    write_tensors(path, arrays, {"format": "mint-state-1", "step": str(step), "digest": digest}, sync=sync)


def _picked(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    start = f"{prefix}/"
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}


def _step(metadata: Mapping[str, str], path: Path) -> int:
    try:
        return int(metadata["step"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} has no step count", remedy="Use another checkpoint") from error

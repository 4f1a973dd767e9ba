"""Safetensors files: read, and written so that after a crash either the old file or the new one is there.

Nothing is ever unpickled. Knows nothing of models, loras or checkpoints: names and arrays only.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from mint.errors import CheckpointError

WRITTEN = frozenset({"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"})
"""The numpy dtypes that a file can hold."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, not read yet. `dtype` is safetensors' name, such as F32 or BF16."""

    dtype: str
    shape: tuple[int, ...]
    name: str
    file: Any
    path: Path

    def read(self) -> Any:
        """A `torch.Tensor` on the CPU (numpy has no bfloat16); needs torch.

        Raises:
            CheckpointError: the file is damaged.
        """
        with _damage_named(self.path):
            return self.file.get_tensor(self.name)


def write_tensors(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes the arrays to `path`, replacing it in one step.

    Raises:
        CheckpointError: an array's dtype does not exist in the format.
    """
    for name, array in arrays.items():
        if array.dtype.name not in WRITTEN:
            raise CheckpointError(f"tensor {name} has dtype {array.dtype}, which safetensors does not have")
    tensors = {name: np.array(arrays[name], order="C") for name in sorted(arrays)}
    write_file(path, [save(tensors, dict(metadata) or None)])


def read_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays (writable copies) and the metadata of a file without bfloat16.

    Raises:
        CheckpointError: the file is missing or damaged, or holds a dtype that numpy has not.
    """
    with _damage_named(path), safe_open(path, framework="np") as file:
        return {name: np.array(file.get_tensor(name)) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


def open_tensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a file by name: nothing is read until it is asked for, and then from the page cache.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    with _damage_named(path):
        file = safe_open(path, framework="pt")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return {
            name: StoredTensor(part.get_dtype(), tuple(part.get_shape()), name, file, path)
            for name, part in slices.items()
        }


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Writes a file through a temporary name in the same folder: fsync, rename, fsync of the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _damage_named(path: Path) -> Generator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError, TypeError) as error:  # TypeError: a dtype that numpy has not
        raise CheckpointError(f"the tensor file {path} cannot be read: {error}") from error

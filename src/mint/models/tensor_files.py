"""Reads safetensors files, and writes files so that after a crash either the old or the new one is there.

Never unpickles. Knows names and arrays only; nothing of models, loras or checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from mint.errors import CheckpointError, JournalError

WRITTEN = {
    np.dtype(name): code
    for name, code in (
        ("float64", "F64"),
        ("float32", "F32"),
        ("float16", "F16"),
        ("int64", "I64"),
        ("int32", "I32"),
        ("int16", "I16"),
        ("int8", "I8"),
        ("uint8", "U8"),
        ("bool", "BOOL"),
    )
}
"""The numpy dtypes that a file can hold → their names in the format."""


SEAL = "_sha256"
"""How the names of checksums in the metadata end."""

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""How the text begins that `git clone` leaves in the place of a large file without Git LFS."""

_IS_POINTER = "it is a pointer of Git LFS and has no weights; run `git lfs pull` in its folder"

BUFFER_BYTES = 1 << 20
"""A lora has many small tensors: a large buffer makes few writes of them."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; `read` reads it. `dtype` is safetensors' name, such as F32 or BF16, of what is read."""

    dtype: str
    shape: tuple[int, ...]
    name: str
    file: Any
    path: Path

    def read(self, part: int | slice | None = None) -> Any:
        """A `torch.Tensor` on the CPU (numpy has no bfloat16), or a `part` along its first dimension; needs torch.

        Raises:
            CheckpointError: the file is damaged.
        """
        with _read_errors(self.path):
            return self.file.get_tensor(self.name) if part is None else self.file.get_slice(self.name)[part]


@dataclass(frozen=True)
class LaterArray:
    """An array of a known dtype and shape, which `make` gives when it is written."""

    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Array = TypeVar("Array", np.ndarray, LaterArray)


def write_tensors(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
    *,
    sync: bool = True,
    seal: Literal["header", "content"] | None = None,
) -> None:
    """Writes the arrays to `path`, replacing it in one step; without `sync` as `write_file`.

    `seal` adds a checksum to the metadata: of the header alone, if something else covers the arrays, or of all.

    Raises:
        CheckpointError: an array's dtype does not exist in the format.
    """
    _require_written(arrays)
    ordered = _ordered(arrays)
    if seal is not None:
        metadata = {**metadata, f"{seal}{SEAL}": _checksum(ordered, metadata, with_content=seal == "content")}
    write_file(path, _parts(ordered, metadata), sync=sync)


def write_later_tensors(path: Path, arrays: Mapping[str, LaterArray], metadata: Mapping[str, str]) -> None:
    """Same as `write_tensors`, with one array in memory at a time. What `make` raises ends the file.

    Raises:
        CheckpointError: an array's dtype does not exist in the format, or `make` gives another one than was said.
    """
    _require_written(arrays)
    write_file(path, _later_parts(_ordered(arrays), metadata))


def _later_parts(arrays: Mapping[str, LaterArray], metadata: Mapping[str, str]) -> Generator[bytes | memoryview]:
    yield _header(arrays, metadata)
    for name, later in arrays.items():
        array = later.make()
        if (array.dtype, array.shape) != (later.dtype, later.shape):
            raise CheckpointError(f"tensor {name} is {array.dtype} {array.shape}, not {later.dtype} {later.shape}")
        if array.nbytes:
            yield _bytes(array)


def _require_written(arrays: Mapping[str, np.ndarray] | Mapping[str, LaterArray]) -> None:
    for name, array in arrays.items():
        if array.dtype not in WRITTEN:
            raise CheckpointError(f"tensor {name} has dtype {array.dtype}, which safetensors does not have")


def _ordered(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Largest items first, then by name: every array begins at a multiple of its own item size."""
    return dict(sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def _checksum(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str], *, with_content: bool) -> str:
    """SHA-256 of the file as it would be with this metadata, or of its header."""
    whole = hashlib.sha256(_header(arrays, metadata))
    for array in arrays.values() if with_content else ():
        whole.update(_bytes(array))
    return whole.hexdigest()


def _bytes(array: np.ndarray) -> memoryview:
    return np.asarray(array, order="C").reshape(-1).view(np.uint8).data


def _parts(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> Generator[bytes | memoryview]:
    """Yields the file: the header's size in 8 bytes, the header as JSON, then the arrays' memory, not copied."""
    header = _header(arrays, metadata)
    yield header[:8]
    yield header[8:]
    for array in arrays.values():
        if array.nbytes:
            yield _bytes(array)


def _header(arrays: Mapping[str, np.ndarray] | Mapping[str, LaterArray], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        code = WRITTEN[array.dtype]
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_header(file: BinaryIO) -> tuple[dict[str, dict[str, Any]], int]:
    """The dtype, shape and data_offsets of each tensor of an open file, and the byte at which the data begin.

    Raises:
        ValueError: it is no safetensors file.
    """
    size_bytes = os.fstat(file.fileno()).st_size
    begin = file.read(8)
    if begin == _LFS_POINTER[:8]:
        raise ValueError(_IS_POINTER)
    length = int.from_bytes(begin, "little")
    if not 2 <= length <= size_bytes - 8:
        raise ValueError(f"it has {size_bytes} bytes, and says that its header has {length}")
    header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def read_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays (writable copies) and the metadata of a file without bfloat16; a seal is checked.

    Raises:
        CheckpointError: the file is missing or damaged, or has a dtype that numpy does not have.
        JournalError: the file cannot be opened now, for want of descriptors.
    """
    with _read_errors(path), safe_open(path, framework="np") as file:
        arrays = {name: np.array(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118 - not a mapping
        metadata = dict(file.metadata() or {})
    seal = next((kind for kind in ("header", "content") if f"{kind}{SEAL}" in metadata), None)
    if seal is None:
        return arrays, metadata
    ordered = _ordered(arrays)
    header = _header(ordered, metadata)  # the file may have no other byte than those that follow from what was read
    with _read_errors(path), path.open("rb") as content:
        is_whole = content.read(len(header)) == header
    unsealed = {name: value for name, value in metadata.items() if name != f"{seal}{SEAL}"}
    found = _checksum(ordered, unsealed, with_content=seal == "content")
    if not is_whole or found != metadata[f"{seal}{SEAL}"]:
        raise CheckpointError(f"the tensor file {path} is damaged: its checksum differs")
    return arrays, metadata


def open_tensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a file by name. `StoredTensor.read` reads one of them from the memory-mapped file.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    with _read_errors(path):
        file = safe_open(path, framework="pt")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return {
            name: StoredTensor(part.get_dtype(), tuple(part.get_shape()), name, file, path)
            for name, part in slices.items()
        }


def write_file(path: Path, parts: Iterable[bytes | memoryview], *, sync: bool = True) -> None:
    """Writes a file through a temporary name in the same folder: fsync, rename, fsync of the folder.

    Without `sync`, the file survives the end of this process, but a loss of power only after `sync_file`.
    """
    _make_folder(path.parent)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb", buffering=BUFFER_BYTES) as file:
            for part in parts:
                file.write(part)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if sync:
        _sync(path.parent)


@contextmanager
def disk_errors() -> Generator[None]:
    """For files that safetensors writes itself: it has the error of the system, such as a full disk, as text.

    Raises:
        OSError: the system's error.
    """
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def sync_file(path: Path) -> None:
    """Returns when a file and its name survive a loss of power."""
    _sync(path)
    _sync(path.parent)


def _make_folder(folder: Path) -> None:
    """Makes a folder and those above it, for their owner alone; their names survive a loss of power."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        _sync(folder.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _read_errors(path: Path) -> Generator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError, TypeError) as error:  # TypeError: a dtype that numpy does not have
        # safetensors says of every file that it cannot open that it is not there
        if isinstance(error, FileNotFoundError) and os.access(path, os.R_OK):
            remedy = "Allow the process more open files (ulimit -n)"
            raise JournalError(f"the tensor file {path} cannot be opened now", remedy=remedy) from error
        if _is_lfs_pointer(path):
            raise CheckpointError(f"the tensor file {path} cannot be read: {_IS_POINTER}") from error
        raise CheckpointError(f"the tensor file {path} cannot be read: {error}") from error


def _is_lfs_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return False

"""Safetensors files: read within limits, written atomically, the same bytes for the same tensors.

The format is eight bytes of header length, a JSON header, and the data (https://github.com/huggingface/safetensors).
Reading trusts nothing: every offset, dtype and size is checked before a byte of data is touched, and nothing is ever
unpickled. Knows nothing of models, loras or checkpoints: names and arrays only.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mint.errors import CheckpointError

MAX_HEADER_BYTES = 64 * 1024 * 1024
"""A header beyond this is refused: the largest published models need about 5 MB."""

ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""The dtypes that mint reads, and the bytes of one element."""

_NUMPY = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("bool"),
}
_NAMES = {dtype: name for name, dtype in _NUMPY.items()}


@dataclass(frozen=True)
class RawTensor:
    """A tensor as it lies in the file: `data` is little-endian, row-major, `dtype` one of `ITEM_SIZES`."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def to_numpy(self) -> np.ndarray:
        """A view where numpy has the dtype; bfloat16, which it has not, becomes float32 (exact)."""
        if self.dtype == "BF16":
            halves = np.frombuffer(self.data, dtype="<u2").astype(np.uint32)
            return (halves << np.uint32(16)).view(np.float32).reshape(self.shape)
        return np.frombuffer(self.data, dtype=_NUMPY[self.dtype]).reshape(self.shape)


def to_bfloat16(array: np.ndarray) -> RawTensor:
    """A float32 array rounded to bfloat16, to the nearest and ties to even, as torch does; NaN stays NaN."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    halves = np.where(np.isnan(array), np.uint32(0x7FC0), rounded).astype("<u2")
    return RawTensor("BF16", tuple(array.shape), memoryview(halves.tobytes()))


def write_tensors(path: Path, arrays: Mapping[str, np.ndarray | RawTensor], metadata: Mapping[str, str]) -> None:
    """Writes the arrays to `path`, replacing it in one step: after a crash either the old file or the new one is there.

    Raises:
        CheckpointError: an array's dtype does not exist in the format.
    """
    tensors = {name: _to_raw(name, arrays[name]) for name in sorted(arrays)}
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    write_file(path, [len(text).to_bytes(8, "little"), text, *(tensor.data for tensor in tensors.values())])


def read_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays (writable copies; bfloat16 as float32) and the metadata of a file.

    Raises:
        CheckpointError: the file is missing, damaged, or beyond the limits.
    """
    tensors, metadata = map_tensors(path)
    return {name: tensor.to_numpy().copy() for name, tensor in tensors.items()}, metadata


def map_tensors(path: Path) -> tuple[dict[str, RawTensor], dict[str, str]]:
    """As `read_tensors`, but nothing is copied: the data stays in the page cache, read when touched.

    Raises:
        CheckpointError: the file is missing, damaged, or beyond the limits.
    """
    try:
        with path.open("rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"the tensor file {path} cannot be read: {error}") from error
    size = int.from_bytes(mapped[:8], "little")
    if len(mapped) < 8 or size > min(MAX_HEADER_BYTES, len(mapped) - 8):
        raise _damaged(path, f"its header claims {size} bytes")
    header, metadata = _parse_header(path, bytes(mapped[8 : 8 + size]))
    data = mapped[8 + size :]
    tensors = {name: _read_entry(path, name, entry, data) for name, entry in header.items()}
    if sum(len(tensor.data) for tensor in tensors.values()) != len(data):
        raise _damaged(path, "its tensors do not fill it exactly")
    return tensors, metadata


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


def _to_raw(name: str, array: np.ndarray | RawTensor) -> RawTensor:
    if isinstance(array, RawTensor):
        return array
    little = array.dtype.newbyteorder("<")
    if little not in _NAMES:
        raise CheckpointError(f"tensor {name} has dtype {array.dtype}, which safetensors does not have")
    flat = np.ascontiguousarray(array, dtype=little).reshape(-1)
    return RawTensor(_NAMES[little], tuple(array.shape), memoryview(flat.view(np.uint8).data))


def _parse_header(path: Path, text: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "its metadata is not a table of strings")
    return header, metadata


def _read_entry(path: Path, name: str, entry: Any, data: memoryview) -> RawTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]}:
            pass
        case _:
            raise _damaged(path, f"tensor {name} has no dtype, shape and data_offsets")
    if dtype not in ITEM_SIZES:
        raise _damaged(path, f"tensor {name} has dtype {dtype}; mint reads {', '.join(ITEM_SIZES)}")
    if not all(isinstance(length, int) and length >= 0 for length in shape):
        raise _damaged(path, f"tensor {name} has shape {shape}")
    if not 0 <= start <= end <= len(data) or end - start != math.prod(shape) * ITEM_SIZES[dtype]:
        raise _damaged(path, f"tensor {name} of shape {shape} ({dtype}) has offsets {start}..{end}")
    return RawTensor(dtype, tuple(shape), data[start:end])


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"the tensor file {path} is damaged: {what}")

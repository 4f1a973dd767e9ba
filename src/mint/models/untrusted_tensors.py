"""Reads a safetensors file from an untrusted source: checks every number of its header before it uses any.

Reads one tensor at a time, as float32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from mint.errors import InvalidRequestError

MAX_HEADER_BYTES = 1024 * 1024
MAX_TENSORS = 20_000
BYTES_PER_TENSOR = 256
"""What a header needs at most to describe one tensor of a lora."""

MAX_DIMENSION = 2**31
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class UntrustedTensor:
    """Where a tensor is in its file; `start` and `stop` are bytes from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class UntrustedTensors:
    """The tensors of an open file whose header was checked; errors call the file `name`."""

    def __init__(self, file: BinaryIO, name: str, *, expected: int = 0) -> None:
        """Reads the header, at most `MAX_HEADER_BYTES` and `MAX_TENSORS`, or what `expected` tensors need.

        Raises:
            InvalidRequestError: the header is malformed, or the file is not exactly what the header says.
        """
        self._file = file
        self._name = name
        file.seek(0, 2)
        size = file.tell()
        file.seek(0)
        prefix = file.read(_LENGTH_BYTES)
        length = int.from_bytes(prefix, "little")
        longest = max(MAX_HEADER_BYTES, BYTES_PER_TENSOR * expected)
        if len(prefix) < _LENGTH_BYTES or not 2 <= length <= min(longest, size - _LENGTH_BYTES):
            raise self._refused(f"has a header of {length} bytes in a file of {size}")
        header = self._parse(file.read(length))
        self.metadata = self._read_metadata(header.pop("__metadata__", {}))
        most = max(MAX_TENSORS, expected)
        if len(header) > most:
            raise self._refused(f"holds {len(header)} tensors, more than {most}")
        first = _LENGTH_BYTES + length
        entries = [self._entry(key, value, first) for key, value in header.items()]
        place = first
        for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
            if entry.start != place:
                raise self._refused(f"has a gap or an overlap before {_brief(entry.name)}")
            place = entry.stop
        if place != size:
            raise self._refused(f"has {size} bytes, its header describes {place}")
        self.entries: Mapping[str, UntrustedTensor] = {entry.name: entry for entry in entries}

    def read(self, name: str) -> np.ndarray:
        """A copy of one tensor, in float32.

        Raises:
            InvalidRequestError: a value is NaN or infinite.
        """
        entry = self.entries[name]
        self._file.seek(entry.start)
        array = _as_float32(self._file.read(entry.stop - entry.start), entry.dtype)
        if not np.isfinite(array).all():
            raise self._refused(f"has NaN or infinity in {_brief(name)}")
        return array.reshape(entry.shape)

    def _parse(self, text: bytes) -> dict[str, Any]:
        try:
            header = json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise self._refused("has a header that is not plain JSON without repeated keys") from error
        if not isinstance(header, dict):
            raise self._refused("has a header that is no JSON object")
        return header

    def _read_metadata(self, metadata: Any) -> dict[str, str]:
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._refused("has metadata other than text")
        return metadata

    def _entry(self, name: str, value: Any, first: int) -> UntrustedTensor:
        if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
            raise self._refused(f"does not say dtype, shape and data_offsets of {_brief(name)}")
        dtype = value["dtype"]
        shape = value["shape"]
        offsets = value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
            raise self._refused(f"has {_brief(name)} in {_brief(str(dtype))}, not in {', '.join(_ITEM_BYTES)}")
        sane = isinstance(shape, list) and len(shape) <= 2 and all(_is_count(size) for size in shape)
        if not sane or not (isinstance(offsets, list) and len(offsets) == 2 and all(_is_count(at) for at in offsets)):
            raise self._refused(f"has an impossible shape or place for {_brief(name)}")
        start, stop = offsets
        if stop - start != math.prod(shape) * _ITEM_BYTES[dtype]:
            raise self._refused(f"gives {_brief(name)} another number of bytes than its shape needs")
        return UntrustedTensor(name, dtype, tuple(shape), first + start, first + stop)

    def _refused(self, problem: str) -> InvalidRequestError:
        return InvalidRequestError(
            problem, field="file", value=self._name, remedy="Send a whole file that safetensors wrote"
        )


def _as_float32(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, "<f4" if dtype == "F32" else "<f2").astype(np.float32)


def _is_count(value: Any) -> bool:
    # an offset may be larger than a dimension, but no file of ours is that large
    return type(value) is int and 0 <= value < MAX_DIMENSION**2


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is repeated")
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _brief(name: str) -> str:
    return ascii(name if len(name) <= 80 else name[:77] + "...")

"""Runs the kernels in C over the parts of their work, on torch's own threads.

A kernel takes a struct of 8-byte fields and a range of parts. Callers give the fields by name, in the order of the
struct in C. Calls can be recorded, and then repeated by a single call. Knows nothing of what kernels compute.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

SERIAL_WORK = 1 << 14
"""Less work than this (elements, or pairs of a query and a key) is not worth several threads."""

OUT_OF_MEMORY, OUT_OF_RANGE = 2, 3
"""Codes that a kernel returns. The code 1 says that it is not compiled for such widths or this processor."""

Int64 = ctypes.c_int64

Field = Tensor | np.ndarray | ctypes.Structure | ctypes.Array[Any] | int | float | None


class Operation(ctypes.Structure):
    """`Operation` in threads.c: a kernel, where its struct is, and how many parts it has."""

    _fields_ = (("kernel", ctypes.c_void_p), ("arguments", ctypes.c_void_p), ("count", Int64), ("wide", Int64))


class _Sequence(ctypes.Structure):
    """`Sequence` in threads.c."""

    _fields_ = (("operations", ctypes.c_void_p), ("count", Int64))


class Recording:
    """The operations that ran, in order, with references to all that they read and write."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._kept: list[object] = []

    def add(self, operation: Operation, *kept: object) -> None:
        """Adds an operation, and the objects that must live as long as it may run."""
        self.operations.append(operation)
        self._kept.append(kept)


class NativeThreads:
    """Runs kernels. Their results do not depend on the number of threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """`library` is threads.c, compiled."""
        self.run_operations, self.run_sequences = library.run_operations, library.run_sequences
        self._here = _Here()

    def run(self, kernel: Any, count: int, work: int, /, **fields: Field) -> None:
        """Runs `kernel` over parts 0 to `count`, on several threads where so much `work` is worth it.

        `fields` are those of the kernel's struct, all of them and in its order.

        Raises:
            MemoryError: the kernel found no scratch memory.
            IndexError: a row number is out of range.
        """
        _check(self.try_run(kernel, count, work, **fields))

    def try_run(self, kernel: Any, count: int, work: int, /, **fields: Field) -> int:
        """Same as `run`; returns the kernel's code instead of raising."""
        words = (Int64 * len(fields))(*map(_word, fields.values()))
        wide = work >= SERIAL_WORK and count > 1
        operation = Operation(address(kernel), ctypes.addressof(words), count, wide)
        if self._here.recording is not None:
            self._here.recording.add(operation, words, fields)
        return self.run_operations(ctypes.byref(operation), Int64(1), Int64(torch.get_num_threads() if wide else 1))

    @contextmanager
    def recording(self) -> Generator[Recording]:
        """Records what this thread runs within the context. It may be repeated as long as the numbers among the fields
        and the addresses of the tensors hold. All that a kernel reads or writes must be a field, or outlive the
        recording."""
        self._here.recording = found = Recording()
        try:
            yield found
        finally:
            self._here.recording = None


class Replay:
    """Repeats recordings by one call, on the present contents of the memory that they read."""

    def __init__(self, threads: NativeThreads, recordings: Sequence[Recording]) -> None:
        """Several `recordings` must be independent of one another: each runs on one thread. A lone one splits each of
        its operations over all threads."""
        self._threads, self._recordings = threads, recordings
        self._operations = [(Operation * len(own.operations))(*own.operations) for own in recordings]
        places = [(ctypes.addressof(own), len(own)) for own in self._operations]
        self._sequences = (_Sequence * len(places))(*(_Sequence(*place) for place in places))

    def run(self) -> None:
        """Runs all of them.

        Raises:
            MemoryError: a kernel found no scratch memory.
            IndexError: a row number is out of range.
        """
        if len(self._operations) == 1:
            own, count = self._operations[0], Int64(torch.get_num_threads())
            _check(self._threads.run_operations(own, Int64(len(own)), count))
        else:
            _check(self._threads.run_sequences(self._sequences, Int64(len(self._sequences))))


class _Here(threading.local):
    """What the current thread records."""

    recording: Recording | None = None


def address(kernel: Any) -> int:
    """The address of a library's function."""
    found = ctypes.cast(kernel, ctypes.c_void_p).value
    if found is None:
        raise AssertionError("a function has an address")
    return found


def _check(code: int) -> None:
    if code == OUT_OF_MEMORY:
        raise MemoryError("no scratch memory for a kernel")
    if code == OUT_OF_RANGE:
        raise IndexError("a token or a position is out of the model's range")
    if code:
        raise AssertionError("the kernel was not compiled for such widths")


def _word(field: Field) -> int:
    """The 8 bytes of a field: numbers as they are, of all else the address."""
    if isinstance(field, Tensor):
        if not field.is_contiguous():
            raise AssertionError("kernels read contiguous tensors")
        return field.data_ptr()
    if isinstance(field, np.ndarray):
        if not field.flags.c_contiguous:
            raise AssertionError("kernels read contiguous arrays")
        return field.ctypes.data
    if isinstance(field, float):
        return struct.unpack("q", struct.pack("d", field))[0]
    if field is None:
        return 0
    return field if isinstance(field, int) else ctypes.addressof(field)

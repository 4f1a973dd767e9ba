"""Runs the kernels in C over the parts of their work, on the threads that torch uses too.

A kernel takes a struct of 8-byte fields and the parts that it is to do. Callers give the fields by name, in the order
of the struct in C. What ran can be recorded, and then be run again by a single call. Knows nothing of what kernels
compute."""

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
"""Less work (elements, or products of a query and a key) than this is not worth several threads."""

OUT_OF_MEMORY, OUT_OF_RANGE = 2, 3
"""What a kernel returns that found no memory, or was to read a row that there is not; 1 says that it was not compiled
for such widths or this processor."""

Int64 = ctypes.c_int64

Field = Tensor | np.ndarray | ctypes.Structure | ctypes.Array[Any] | int | float | None


class Operation(ctypes.Structure):
    """`Operation` in threads.c: a kernel, where its struct is, and how many parts it has."""

    _fields_ = (("kernel", ctypes.c_void_p), ("arguments", ctypes.c_void_p), ("count", Int64), ("wide", Int64))


class _Sequence(ctypes.Structure):
    """`Sequence` in threads.c."""

    _fields_ = (("operations", ctypes.c_void_p), ("count", Int64))


class Recording:
    """What ran, in order, with all that it read and wrote."""

    def __init__(self) -> None:
        """Nothing."""
        self.operations: list[Operation] = []
        self._kept: list[object] = []

    def add(self, operation: Operation, *kept: object) -> None:
        """One operation more, and what must be there as long as it may run."""
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
            MemoryError: the kernel found no memory for what it keeps meanwhile.
            IndexError: the kernel was to read a row that there is not.
        """
        _check(self.try_run(kernel, count, work, **fields))

    def try_run(self, kernel: Any, count: int, work: int, /, **fields: Field) -> int:
        """`run`; returns the kernel's code."""
        words = (Int64 * len(fields))(*map(_word, fields.values()))
        wide = work >= SERIAL_WORK and count > 1
        operation = Operation(address(kernel), ctypes.addressof(words), count, wide)
        if self._here.recording is not None:
            self._here.recording.add(operation, words, fields)
        return self.run_operations(ctypes.byref(operation), Int64(1), Int64(torch.get_num_threads() if wide else 1))

    @contextmanager
    def recording(self) -> Generator[Recording]:
        """What this thread runs meanwhile is recorded. It may be run again as long as the numbers among the fields and
        the places of the tensors are right: what a kernel writes or reads must be a field, or outlive the recording."""
        self._here.recording = found = Recording()
        try:
            yield found
        finally:
            self._here.recording = None


class Replay:
    """Recordings that are run again by one call, with what is now in the places that they read."""

    def __init__(self, threads: NativeThreads, recordings: Sequence[Recording]) -> None:
        """Several `recordings` are independent of one another: each runs on a thread of its own. A lone one shares out
        each of its operations among all threads."""
        self._threads, self._recordings = threads, recordings
        self._operations = [(Operation * len(own.operations))(*own.operations) for own in recordings]
        places = [(ctypes.addressof(own), len(own)) for own in self._operations]
        self._sequences = (_Sequence * len(places))(*(_Sequence(*place) for place in places))

    def run(self) -> None:
        """Runs all of them.

        Raises:
            MemoryError: a kernel found no memory for what it keeps meanwhile.
            IndexError: a kernel was to read a row that there is not.
        """
        if len(self._operations) == 1:
            own, count = self._operations[0], Int64(torch.get_num_threads())
            _check(self._threads.run_operations(own, Int64(len(own)), count))
        else:
            _check(self._threads.run_sequences(self._sequences, Int64(len(self._sequences))))


class _Here(threading.local):
    """What the thread at hand is recording."""

    recording: Recording | None = None


def address(kernel: Any) -> int:
    """Where a function of a library begins."""
    found = ctypes.cast(kernel, ctypes.c_void_p).value
    if found is None:
        raise AssertionError("a function has an address")
    return found


def _check(code: int) -> None:
    if code == OUT_OF_MEMORY:
        raise MemoryError("no memory for what a kernel keeps while it runs")
    if code == OUT_OF_RANGE:
        raise IndexError("a token or a position that the model does not have")
    if code:
        raise AssertionError("the kernel was not compiled for such widths")


def _word(field: Field) -> int:
    """A field's 8 bytes: numbers as they are, and of all else the place in memory."""
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

"""Runs the kernels in C over the parts of their work, on torch's own threads.

A kernel takes a struct of 8-byte fields and a range of parts. Callers give the fields by name, in the order of the
struct in C. Calls can be recorded, and then repeated by a single call.
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

NOT_COMPILED, OUT_OF_MEMORY, OUT_OF_RANGE = 1, 2, 3
"""Codes that a kernel returns."""

Int64 = ctypes.c_int64

Field = Tensor | np.ndarray | ctypes.Structure | ctypes.Array[Any] | int | float | None


class NotCompiledError(AssertionError):
    """The kernel is not compiled for such widths or this processor."""


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
        self._references: list[object] = []

    def add(self, operation: Operation, *references: object) -> None:
        """Adds an operation, and the objects that must live as long as it may run."""
        self.operations.append(operation)
        self._references.append(references)


class NativeThreads:
    """Runs operations. Their results do not depend on the number of threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """`library` is threads.c, compiled."""
        self.run_operations = library.run_operations
        self.run_sequences = library.run_sequences
        self.run_operations.argtypes = (ctypes.c_void_p, Int64, Int64)
        self.run_sequences.argtypes = (ctypes.c_void_p, Int64)
        self.thread_state = _ThreadState()

    @contextmanager
    def recording(self) -> Generator[Recording]:
        """Records what this thread runs within the context. It may be repeated as long as the numbers among the fields
        and the addresses of the tensors hold. All that a kernel reads or writes must be a field, or outlive the
        recording."""
        self.thread_state.recording = found = Recording()
        try:
            yield found
        finally:
            self.thread_state.recording = None


class _ThreadState(threading.local):
    """What the current thread records."""

    recording: Recording | None = None


class KernelLibrary:
    """The kernels of one file in C, each an attribute of its name."""

    def __init__(self, library: ctypes.CDLL, threads: NativeThreads) -> None:
        self._library = library
        self._threads = threads

    def __getattr__(self, name: str) -> Kernel:
        kernel = Kernel(getattr(self._library, name), self._threads)
        setattr(self, name, kernel)
        return kernel


class Kernel:
    """A compiled kernel, called with the fields of its struct."""

    def __init__(self, function: Any, threads: NativeThreads) -> None:
        self.address = ctypes.cast(function, ctypes.c_void_p).value
        self._threads = threads

    def __call__(self, count: int, work: int, /, **fields: Field) -> None:
        """Runs over parts 0 to `count`, on several threads where so much `work` is worth it.

        `fields` are those of the kernel's struct, all of them and in its order: numbers as they are, of all else the
        address.

        Raises:
            MemoryError: the kernel found no scratch memory.
            IndexError: a row number is out of range.
            NotCompiledError: the kernel does not know such widths, or this processor.
        """
        # One loop without calls of our own: a training step of a small base calls thousands of kernels.
        words: list[int] = []
        for field in fields.values():
            if isinstance(field, Tensor):
                if not field.is_contiguous():
                    raise AssertionError("kernels read contiguous tensors")
                words.append(field.data_ptr())
            elif isinstance(field, int):
                words.append(field)
            elif field is None:
                words.append(0)
            elif isinstance(field, float):
                words += struct.unpack("q", struct.pack("d", field))
            elif isinstance(field, np.ndarray):
                if not field.flags.c_contiguous:
                    raise AssertionError("kernels read contiguous arrays")
                words.append(field.ctypes.data)
            else:
                words.append(ctypes.addressof(field))
        arguments = (Int64 * len(words))(*words)
        wide = work >= SERIAL_WORK and count > 1
        operation = Operation(self.address, ctypes.addressof(arguments), count, wide)
        recording = self._threads.thread_state.recording
        if recording is not None:
            recording.add(operation, arguments, fields)
        code = self._threads.run_operations(ctypes.byref(operation), 1, torch.get_num_threads() if wide else 1)
        if code:
            _fail(code)


class Replay:
    """Repeats recordings by one call, on the present contents of the memory that they read."""

    def __init__(self, threads: NativeThreads, recordings: Sequence[Recording]) -> None:
        """Several `recordings` must be independent of one another: each runs on one thread. A lone one splits each of
        its operations over all threads."""
        self._threads = threads
        self._recordings = recordings
        self._operations = [(Operation * len(own.operations))(*own.operations) for own in recordings]
        places = [_Sequence(ctypes.addressof(own), len(own)) for own in self._operations]
        self._sequences = (_Sequence * len(places))(*places)

    def run(self) -> None:
        """Runs all of them.

        Raises:
            MemoryError: a kernel found no scratch memory.
            IndexError: a row number is out of range.
        """
        if len(self._operations) == 1:
            own = self._operations[0]
            code = self._threads.run_operations(own, len(own), torch.get_num_threads())
        else:
            code = self._threads.run_sequences(self._sequences, len(self._sequences))
        if code:
            _fail(code)


def _fail(code: int) -> None:
    if code == OUT_OF_MEMORY:
        raise MemoryError("no scratch memory for a kernel")
    if code == OUT_OF_RANGE:
        raise IndexError("a token or a position is out of the model's range")
    raise NotCompiledError("the kernel was not compiled for such widths")

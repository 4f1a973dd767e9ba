"""Records calls of kernels, and repeats them by a single call on the present contents of the same memory."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from mint.engine.cpu.threads import NativeThreads, Operation, OperationSequence, error_of


class Recording:
    """The operations that ran, in order, with references to all that they read and write."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._references: list[object] = []

    def add(self, operation: Operation, *references: object) -> None:
        """Adds an operation, and the objects that must live as long as it may run."""
        self.operations.append(operation)
        self._references.append(references)


class _Present(threading.local):
    """`recording` is where kernels that this thread calls add themselves; None: they run without being recorded."""

    recording: Recording | None = None


present = _Present()


@contextmanager
def record() -> Generator[Recording]:
    """Records the kernels that this thread calls within the context. They may be repeated as long as the numbers among
    the fields and the addresses of the tensors hold. All that a kernel reads or writes must be a field, or outlive the
    recording."""
    present.recording = found = Recording()
    try:
        yield found
    finally:
        present.recording = None


class Replay:
    """Repeats recordings by one call, on the present contents of the memory that they read."""

    def __init__(self, threads: NativeThreads, recordings: Sequence[Recording]) -> None:
        """Several `recordings` must be independent of one another: each runs on one thread. A lone one splits each of
        its operations over all threads."""
        self._threads = threads
        self._recordings = recordings
        self._operations = [(Operation * len(own.operations))(*own.operations) for own in recordings]
        places = [OperationSequence(ctypes.addressof(own), len(own)) for own in self._operations]
        self._sequences = (OperationSequence * len(places))(*places)

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
            raise error_of(code)

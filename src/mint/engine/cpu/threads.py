"""Runs operations on torch's own threads: calls of kernels in C, over the parts of their work.

Knows no kernel. `threads.c` splits the parts among the threads.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

NOT_COMPILED = 1
OUT_OF_MEMORY = 2
OUT_OF_RANGE = 3
"""Codes that a kernel returns."""

Int64 = ctypes.c_int64


class NotCompiledError(AssertionError):
    """The kernel is not compiled for such widths or this processor."""


class Split(IntEnum):
    """How several threads take the parts of an operation; as in threads.c."""

    ONE_THREAD = 0
    EQUAL_SHARES = 1
    ONE_BY_ONE = 2
    """For few parts that take long. A thread takes the next one when it has done with its last, so that it takes fewer
    while another program uses its core."""


class Operation(ctypes.Structure):
    """`Operation` in threads.c: a kernel, where its struct is, how many parts it has, and a `Split`."""

    _fields_ = (("kernel", ctypes.c_void_p), ("arguments", ctypes.c_void_p), ("count", Int64), ("split", Int64))


class OperationSequence(ctypes.Structure):
    """`Sequence` in threads.c."""

    _fields_ = (("operations", ctypes.c_void_p), ("count", Int64))


class NativeThreads:
    """Runs operations. Their results do not depend on the number of threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """`library` is threads.c, compiled."""
        self.run_operations = library.run_operations
        self.run_sequences = library.run_sequences
        self.run_operations.argtypes = (ctypes.c_void_p, Int64, Int64)
        self.run_sequences.argtypes = (ctypes.c_void_p, Int64)


def error_of(code: int) -> Exception:
    """The error for a code that is not 0."""
    if code == OUT_OF_MEMORY:
        return MemoryError("no scratch memory for a kernel")
    if code == OUT_OF_RANGE:
        return IndexError("a token or a position is out of the model's range")
    return NotCompiledError("the kernel was not compiled for such widths")

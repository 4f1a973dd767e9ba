"""Runs the kernels in C over the parts of their work, on the threads that torch uses too.

A kernel takes a struct of 8-byte fields and the parts that it is to do; here its fields are given in order. Knows
nothing of what kernels compute.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch
from torch import Tensor

SERIAL_WORK = 1 << 14
"""Less work (elements, or products of a query and a key) than this is not worth several threads."""

OUT_OF_MEMORY = 2
"""What a kernel returns that found no memory; 1 says that it was not compiled for such widths or this processor."""

Int64 = ctypes.c_int64

Field = Tensor | ctypes.Structure | ctypes.Array[Any] | int | float | None


class Operation(ctypes.Structure):
    """`Operation` in native_threads.c: a kernel, where its struct is, and how many parts it has."""

    _fields_ = (("kernel", ctypes.c_void_p), ("arguments", ctypes.c_void_p), ("count", Int64), ("wide", Int64))


class NativeThreads:
    """Runs kernels. Their results do not depend on the number of threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """`library` is native_threads.c, compiled."""
        self._run_operations = library.run_operations

    def run(self, kernel: Any, count: int, *fields: Field, work: int) -> None:
        """Runs `kernel` over parts 0 to `count`, on several threads where so much `work` is worth it.

        Raises:
            MemoryError: the kernel found no memory for what it keeps meanwhile.
        """
        code = self.try_run(kernel, count, *fields, work=work)
        if code == OUT_OF_MEMORY:
            raise MemoryError("no memory for what a kernel keeps while it runs")
        if code:
            raise AssertionError("the kernel was not compiled for such widths")

    def try_run(self, kernel: Any, count: int, *fields: Field, work: int) -> int:
        """`run`; returns the kernel's code."""
        words = (Int64 * len(fields))(*map(_word, fields))
        wide = work >= SERIAL_WORK and count > 1
        operation = Operation(address(kernel), ctypes.addressof(words), count, wide)
        return self._run_operations(ctypes.byref(operation), Int64(1), Int64(torch.get_num_threads() if wide else 1))


def address(kernel: Any) -> int:
    """Where a function of a library begins."""
    found = ctypes.cast(kernel, ctypes.c_void_p).value
    if found is None:
        raise AssertionError("a function has an address")
    return found


def _word(field: Field) -> int:
    """A field's 8 bytes: numbers as they are, and of all else the place in memory."""
    if isinstance(field, Tensor):
        if not field.is_contiguous():
            raise AssertionError("kernels read contiguous tensors")
        return field.data_ptr()
    if isinstance(field, float):
        return struct.unpack("q", struct.pack("d", field))[0]
    if field is None:
        return 0
    return field if isinstance(field, int) else ctypes.addressof(field)

"""The compiled kernels in C. A kernel takes a struct of 8-byte fields and a range of parts.

Callers give the fields by name, in the order of the struct in C.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mint.engine.cpu.build import NativeBuild
from mint.engine.cpu.recording import present
from mint.engine.cpu.threads import Int64, NativeThreads, Operation, Split, error_of
from mint.engine.memory.machine_memory import HugePages, huge_block
from mint.errors import MissingExtraError

HEAD_DIMS = frozenset({32, 64, 96, 128, 256})
"""Head dimensions that the kernels are compiled for."""

LANES = 16
"""Widths are multiples of this."""

MIN_HUGE_LORA_BYTES = 8 << 20
"""A smaller lora is not put on huge pages, of which it could leave more than a fifth unused."""

SERIAL_WORK = 1 << 14
"""Less work than this (elements, or pairs of a query and a key) is not worth several threads."""


class RowLayout(IntEnum):
    """How the numbers of rows lie, as in calls.h: as floats, as bfloat16, or as bfloat16 in tiles for AMX."""

    FLOATS = 0
    HALVES = 1
    TILES = 2


Field = Tensor | np.ndarray | ctypes.Structure | ctypes.Array[Any] | int | float | None


class NativeKernels:
    """The compiled functions. Their results do not depend on the number of threads."""

    def __init__(self, build: NativeBuild | Path) -> None:
        """Waits for `build`, or compiles into a folder.

        Raises:
            MissingExtraError: there is no C compiler, or it refuses, or this system cannot load what was compiled.
        """
        native = NativeBuild(build) if isinstance(build, Path) else build
        places = native.libraries()
        self.instructions = native.instructions.name
        self.has_amx = self.instructions == "avx512-amx"
        self.digest = native.digest
        """With the set of instructions it decides their bits: see `NativeBuild.digest`."""
        libraries = {source: _load(place) for source, place in places.items()}
        self.threads = NativeThreads(libraries.pop("threads"))
        self.libraries = {source: KernelLibrary(library, self.threads) for source, library in libraries.items()}
        """The kernels of each file in C, by its name without suffix."""
        self._matrix_memory = HugePages()

    def empty_matrix(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A frozen matrix whose numbers are not set yet; a large one lies on huge pages."""
        memory = self._matrix_memory.take(math.prod(shape) * dtype.itemsize)
        if memory is None:
            return torch.empty(*shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype).view(*shape)

    def empty_rows(self, rows: int, width: int) -> Tensor:
        """Float32 [rows, width] whose numbers are not set yet, for a result; large ones lie on huge pages."""
        memory = huge_block(4 * rows * width)
        if memory is None:
            return torch.empty(rows, width)
        return torch.frombuffer(memory, dtype=torch.float32).view(rows, width)

    def empty_lora(self, size: int, dtype: torch.dtype) -> Tensor:
        """The weights [size] of a published lora, which are not set yet; large ones lie on huge pages. Each token reads
        all of them, and on pages of 4 KB the processor fetches less ahead."""
        memory = huge_block(size * dtype.itemsize, MIN_HUGE_LORA_BYTES)
        return torch.empty(size, dtype=dtype) if memory is None else torch.frombuffer(memory, dtype=dtype)


def _load(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:  # compiled on a machine with a newer C library that has the same home folder
        raise MissingExtraError(
            f"the compiled kernels cannot be loaded: {error}",
            remedy=f"Delete {library.parent}, so that this machine compiles them, or set MINT_NATIVE=0 to compute "
            "with torch's kernels",
        ) from error


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

    def __call__(self, count: int, work: int, split: Split = Split.EQUAL_SHARES, /, **fields: Field) -> None:
        """Runs over parts 0 to `count`; several threads `split` them where so much `work` is worth it.

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
        if work < SERIAL_WORK or count < 2:
            split = Split.ONE_THREAD
        operation = Operation(self.address, ctypes.addressof(arguments), count, split)
        recording = present.recording
        if recording is not None:
            recording.add(operation, arguments, fields)
        threads = 1 if split == Split.ONE_THREAD else torch.get_num_threads()
        code = self._threads.run_operations(ctypes.byref(operation), 1, threads)
        if code:
            raise error_of(code)

"""A plugin of pytest: the kernels in C are compiled for 64-bit ARM, and each call of one runs in an emulator.

`aarch64-linux-gnu-gcc` compiles, `qemu-aarch64` or `qemu-aarch64-static` runs `emulated_kernel.c`; QEMU_LD_PREFIX says
where the emulated processor's libraries are, if not below /usr/aarch64-linux-gnu. A recorded step, which is a list of
such calls, is not emulated.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from mint.engine import instruction_sets
from mint.engine.cpu import build, kernels
from mint.engine.cpu.threads import error_of
from mint.engine.instruction_sets import InstructionSet
from mint.engine.memory.machine_memory import HugePages

COMPILER = "aarch64-linux-gnu-gcc"
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")


class Emulator:
    """One emulated process."""

    def __init__(self) -> None:
        program = Path(tempfile.mkdtemp()) / "emulated_kernel"
        source = Path(__file__).with_name("emulated_kernel.c")
        subprocess.run([COMPILER, "-O2", "-o", program, source, "-ldl"], check=True)
        emulator = next(filter(None, map(shutil.which, EMULATORS)))
        prefix = {"QEMU_LD_PREFIX": os.environ.get("QEMU_LD_PREFIX", "/usr/aarch64-linux-gnu")}
        self._process = subprocess.Popen(
            [emulator, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **prefix}
        )

    def run(self, request: bytes, answer_bytes: int) -> bytes:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(request)
        self._process.stdin.flush()
        answer = self._process.stdout.read(answer_bytes)
        assert len(answer) == answer_bytes, "the emulated process has ended"
        return answer


class Memory:
    """The blobs of a call, and the places that point to them."""

    def __init__(self) -> None:
        self.blobs: list[bytes] = []
        self.pointers: list[tuple[int, int, int]] = []
        self.results: list[tuple[int, int, int]] = []
        self._known: dict[int, int] = {}

    def add(self, address: int, size: int, *, is_result: bool) -> int:
        known = self._known.get(address)
        if known is not None and len(self.blobs[known]) >= size:
            return known
        self.blobs.append(ctypes.string_at(address, size))
        self._known[address] = len(self.blobs) - 1
        if is_result:
            self.results.append((len(self.blobs) - 1, address, size))
        return len(self.blobs) - 1

    def point(self, where: int, place: int, meant: int) -> None:
        self.pointers.append((where, place, meant))


class EmulatedKernel:
    """`Kernel`, in the emulator."""

    address = 0
    emulator: Emulator | None = None

    def __init__(self, library: Path, name: str) -> None:
        self._library = library
        self._name = name

    def __call__(self, count: int, work: int, /, **fields: Any) -> None:
        memory, words = Memory(), list[int]()
        for field in fields.values():
            if field is None or isinstance(field, int):
                words.append(field or 0)
                continue
            if isinstance(field, float):
                words += struct.unpack("q", struct.pack("d", field))
                continue
            if isinstance(field, Tensor):
                own = memory.add(field.data_ptr(), field.numel() * field.itemsize, is_result=True)
            elif isinstance(field, np.ndarray):
                own = memory.add(field.ctypes.data, field.nbytes, is_result=True)
            else:
                own = _add_struct(memory, field, fields)
            memory.point(-1, len(words), own)
            words.append(0)
        texts = [str(self._library).encode(), self._name.encode()]
        request = b"".join(struct.pack("q", len(text)) + text for text in texts)
        request += struct.pack(f"{3 + len(words)}q", count, len(words), len(memory.blobs), *words)
        request += b"".join(struct.pack("q", len(blob)) + blob for blob in memory.blobs)
        request += struct.pack("q", len(memory.pointers)) + b"".join(struct.pack("3q", *own) for own in memory.pointers)
        EmulatedKernel.emulator = EmulatedKernel.emulator or Emulator()
        answer = EmulatedKernel.emulator.run(request, 8 + sum(map(len, memory.blobs)))
        starts = np.cumsum([8, *map(len, memory.blobs)])
        for blob, address, size in memory.results:
            ctypes.memmove(address, answer[starts[blob] : starts[blob] + size], size)
        (code,) = struct.unpack("q", answer[:8])
        if code:
            raise error_of(code)


def _add_struct(memory: Memory, field: Any, fields: dict[str, Any]) -> int:
    """A struct or an array of C, and the arrays that it points to."""
    own = memory.add(ctypes.addressof(field), ctypes.sizeof(field), is_result=False)
    if isinstance(field, ctypes.Array):
        if field._type_ is ctypes.c_void_p:  # the bs of a lora
            for index, address in enumerate(field):
                size = 4 * fields["widths"][index] * fields["rank"]
                memory.point(own, 8 * index, memory.add(address, size, is_result=False))
        return own
    sizes = {array.ctypes.data: array.nbytes for array in field.arrays}
    for name, kind in field._fields_:
        address = getattr(field, name)
        if kind is ctypes.c_void_p and address:
            memory.point(own, getattr(type(field), name).offset, memory.add(address, sizes[address], is_result=False))
    return own


class EmulatedLibrary:
    """`KernelLibrary`, in the emulator."""

    def __init__(self, library: Path) -> None:
        self._library = library

    def __getattr__(self, name: str) -> EmulatedKernel:
        return EmulatedKernel(self._library, name)


def _open(self: Any, native: build.NativeBuild | Path) -> None:
    """The constructor of `NativeKernels`."""
    made = build.NativeBuild(native) if isinstance(native, Path) else native
    places = made.libraries()
    self.instructions, self.digest = made.instructions.name, made.digest
    self.libraries = {source: EmulatedLibrary(place) for source, place in places.items()}
    self._matrix_memory = HugePages()


build.COMPILERS = (COMPILER,)
build.target_name = lambda: "linux_aarch64_glibc"
instruction_sets.SETS = (InstructionSet("neon", frozenset(), frozenset(), ()),)
kernels.NativeKernels.__init__ = _open


@pytest.fixture(autouse=True)
def _is_emulated() -> None:
    """Fails early where the emulator cannot run."""
    assert shutil.which(COMPILER) and any(map(shutil.which, EMULATORS))

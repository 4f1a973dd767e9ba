"""The sets of vector instructions that the kernels in C are compiled for, and which one a processor has; and by which
ones MKL sums.

A set is a fixed list of flags of the compiler, so that a library which another machine compiled for the same set is the
same kernel.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mint.errors import InvalidRequestError

log = logging.getLogger(__name__)

_ARCH_PRCTL = 158
"""The number of the system call on x86-64."""

_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@dataclass(frozen=True)
class InstructionSet:
    """Flags for gcc and clang; `machines` are the names of `platform.machine()`, and `features` those of
    /proc/cpuinfo that a processor must have. No machine: any."""

    name: str
    machines: frozenset[str]
    features: frozenset[str]
    flags: tuple[str, ...]
    has_matrix_registers: bool = False
    """Whether it is for AMX, whose registers a process must ask Linux for."""


_X86 = frozenset({"x86_64", "AMD64"})
_ARM = frozenset({"aarch64", "arm64"})
_AVX2_FEATURES = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"})
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mbmi", "-mbmi2", "-mf16c", "-mmovbe")
_AVX512_FEATURES = _AVX2_FEATURES | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")

_HALVES_FEATURES = _AVX512_FEATURES | {"avx512_bf16", "avx512_vnni", "avx512vbmi"}
_HALVES_FLAGS = (*_AVX512_FLAGS, "-mavx512bf16", "-mavx512vnni", "-mavx512vbmi")

SETS = (
    InstructionSet(
        "avx512-amx",
        _X86,
        _HALVES_FEATURES | {"amx_tile", "amx_bf16"},
        (*_HALVES_FLAGS, "-mamx-tile", "-mamx-bf16"),
        has_matrix_registers=True,
    ),
    InstructionSet("avx512-bf16", _X86, _HALVES_FEATURES, _HALVES_FLAGS),
    InstructionSet("avx512", _X86, _AVX512_FEATURES, _AVX512_FLAGS),
    InstructionSet("avx2", _X86, _AVX2_FEATURES, _AVX2_FLAGS),
    InstructionSet("neon", _ARM, frozenset(), ()),
    InstructionSet("portable", frozenset(), frozenset(), ()),
)
"""The fastest first. `neon` needs no flag: every 64-bit ARM processor has it."""


def instruction_set(name: str | None = None) -> InstructionSet:
    """The set of this name, or the fastest one that this processor has.

    Raises:
        InvalidRequestError: the processor does not have it.
    """
    present = sets_of_processor()
    if name is None:
        return present[0]
    for own in present:
        if own.name == name:
            return own
    raise InvalidRequestError(
        "is not a set of instructions of this processor",
        field="MINT_INSTRUCTIONS",
        value=name,
        remedy=f"Unset it, or choose one of {', '.join(own.name for own in present)}",
    )


def sets_of_processor() -> list[InstructionSet]:
    """The sets that this processor has, the fastest first."""
    return [own for own in SETS if _is_present(own)]


def sets_of_machine() -> list[InstructionSet]:
    """The sets that processors of this machine's kind may have, the fastest first."""
    return [own for own in SETS if not own.machines or platform.machine() in own.machines]


def multiplies_by_amx() -> bool:
    """Whether oneDNN multiplies bfloat16 by AMX here. Then the bits of a row depend on the other rows of a product."""
    return "amx_bf16" in _features()


def sum_in_one_order() -> None:
    """Makes MKL, by which torch multiplies float32, sum a row in one order, whatever other rows there are. On Intel's
    processors it has a mode for that, and does not do so by itself.

    Works until the process first multiplies. A variable of the environment that is set already is not changed. See
    "Conditional Numerical Reproducibility" in the manual of oneMKL.
    """
    if _vendor() == "GenuineIntel" and "avx2" in _features():
        branch = b"AVX512,STRICT" if _features() >= _AVX512_FEATURES else b"AVX2,STRICT"
        ctypes.CDLL(None).setenv(b"MKL_CBWR", branch, 0)


def _is_present(own: InstructionSet) -> bool:
    if own not in sets_of_machine() or not own.features <= _features():
        return False
    return not own.has_matrix_registers or _may_use_matrix_registers()


@cache
def _may_use_matrix_registers() -> bool:
    """Whether Linux lets this process use the registers of AMX, which it does from the first time on that it is asked.

    See `Documentation/arch/x86/xstate.rst` of Linux. Sandboxes may name the instructions and not have this call; and
    Linux refuses while a thread has a signal stack on which the registers have no room.
    """
    may_use = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0
    if not may_use:
        log.warning(
            "The processor has AMX, and Linux does not let this process use it: a sandbox refuses, or a library has "
            "set a signal stack of less than 16 KB. mint is slower, and its last bits are others"
        )
    return may_use


@cache
def _features() -> frozenset[str]:
    """The features that Linux names; none on other systems."""
    return frozenset(_fact("flags").split())


@cache
def _vendor() -> str:
    return _fact("vendor_id").strip()


def _fact(name: str) -> str:
    """A line of /proc/cpuinfo about the first processor; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2] for line in lines if line.startswith(name)), "")

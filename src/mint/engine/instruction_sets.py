"""The sets of vector instructions that the kernels in C are compiled for, and which one a processor has.

A set is a fixed list of flags of the compiler, so that a library which another machine compiled for the same set is the
same kernel.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mint.errors import InvalidRequestError


@dataclass(frozen=True)
class InstructionSet:
    """Flags for gcc and clang; `machines` are the names of `platform.machine()`, and `features` those of
    /proc/cpuinfo that a processor must have. No machine: any."""

    name: str
    machines: frozenset[str]
    features: frozenset[str]
    flags: tuple[str, ...]


_X86 = frozenset({"x86_64", "AMD64"})
_ARM = frozenset({"aarch64", "arm64"})
_AVX2_FEATURES = frozenset({"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"})
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mbmi", "-mbmi2", "-mf16c", "-mmovbe")
_AVX512_FEATURES = _AVX2_FEATURES | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")

SETS = (
    InstructionSet(
        "avx512-bf16",
        _X86,
        _AVX512_FEATURES | {"avx512_bf16", "avx512_vnni", "avx512vbmi"},
        (*_AVX512_FLAGS, "-mavx512bf16", "-mavx512vnni", "-mavx512vbmi"),
    ),
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
    present = [own for own in SETS if _is_present(own)]
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


def sets_of_machine() -> list[InstructionSet]:
    """The sets that processors of this machine's kind may have, the fastest first."""
    return [own for own in SETS if not own.machines or platform.machine() in own.machines]


def _is_present(own: InstructionSet) -> bool:
    return own in sets_of_machine() and own.features <= _features()


@cache
def _features() -> frozenset[str]:
    """The features that Linux names; none on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())

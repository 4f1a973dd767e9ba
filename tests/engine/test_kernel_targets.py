"""The kernels in C compile and link for systems that no test here runs on: musl (Alpine) and macOS.

`zig cc` is a clang that has the C libraries of these systems: `pip install ziglang`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mint.engine.cpu.build import FLAGS, SOURCES
from mint.engine.instruction_sets import SETS

pytest.importorskip("ziglang", reason="pip install ziglang")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TARGETS = {"x86_64-linux-musl": "avx2", "aarch64-linux-musl": "neon", "aarch64-macos": "neon", "x86_64-macos": "avx2"}
"""Of clang, and the set of instructions of each."""

FORMATS = {"linux": b"\x7fELF", "macos": b"\xcf\xfa\xed\xfe"}
"""How a library begins."""


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_and_links_without_a_warning(target: str, tmp_path: Path) -> None:
    (instructions,) = (own for own in SETS if own.name == TARGETS[target])
    # zig brings no OpenMP: as on macOS, the pragmas are left out, which gives one thread.
    flags = [flag for flag in FLAGS if flag != "-fopenmp"]
    for source in SOURCES:
        library = tmp_path / f"{source.stem}.so"
        command = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-Wall", "-Wno-unknown-pragmas", *flags]
        done = subprocess.run(
            [*command, *instructions.flags, str(source), "-o", str(library)], capture_output=True, text=True
        )
        assert done.returncode == 0 and not done.stderr, f"{source.name}: {done.stderr[-4000:]}"
        assert library.read_bytes().startswith(FORMATS["macos" if target.endswith("macos") else "linux"])

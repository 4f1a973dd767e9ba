"""The compiled kernels in C: their libraries, and the threads that run them."""

from __future__ import annotations

import ctypes
from pathlib import Path

from mint.engine.cpu.build import NativeBuild
from mint.engine.cpu.threads import KernelLibrary, NativeThreads

HEAD_DIMS = frozenset({32, 64, 128})
"""Head dimensions that the kernels are compiled for."""

LANES = 16
"""Widths are multiples of this."""


class NativeKernels:
    """The compiled functions. Their results do not depend on the number of threads."""

    def __init__(self, build: NativeBuild | Path) -> None:
        """Waits for `build`, or compiles into a folder.

        Raises:
            MissingExtraError: there is no C compiler, or it refuses.
        """
        places = (NativeBuild(build) if isinstance(build, Path) else build).libraries()
        libraries = {source: ctypes.CDLL(str(place)) for source, place in places.items()}
        self.threads = NativeThreads(libraries.pop("threads"))
        self.libraries = {source: KernelLibrary(library, self.threads) for source, library in libraries.items()}
        """The kernels of each file in C, by its name without suffix."""

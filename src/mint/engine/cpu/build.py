"""Compiles the engine's kernels in C for this machine, in background threads while torch is imported.

Libraries are cached in a folder by source, flags and processor. The compiler is not part of the key: its upgrade must
not change the bits of a run in progress.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path

from mint.errors import MissingExtraError

_FOLDER = Path(__file__).parent / "sources"
SOURCES = tuple(sorted(_FOLDER.glob("*.c")))
HEADERS = tuple(sorted(_FOLDER.glob("*.h")))
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-O2",
    "-march=native",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-Wno-psabi",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
)
COMPILE_SECONDS = 60
"""One file takes about one second; a compiler that takes so long hangs."""

TESTED_HERE = sys.platform == "linux" and platform.machine() == "x86_64"
"""Whether the kernels are tested on this kind of machine, so that they are used by default."""

REMEDY = "Install gcc or clang, or set MINT_NATIVE=0 to compute with torch's kernels"


class NativeBuild:
    """The libraries of all sources. The constructor starts to compile them, in parallel."""

    def __init__(self, folder: Path, *, required: bool = True) -> None:
        """Compiles into `folder` what it does not have. If that fails, an engine does without unless they are
        `required`."""
        self.required = required
        missing = [source for source in SOURCES if not _library(folder, source).exists()]
        # The threads are joined at exit, so that no compiler outlives the process.
        pool = ThreadPoolExecutor(max(len(missing), 1), thread_name_prefix="mint-compile")
        self._parts: list[Future[None]] = [pool.submit(_compile, folder, source) for source in missing]
        pool.shutdown(wait=False)
        self._folder = folder

    def libraries(self) -> dict[str, Path]:
        """Where each library is, by the name of its source without suffix; waits until all are there.

        Raises:
            MissingExtraError: there is no C compiler, or it refuses or hangs, or the folder cannot be written.
        """
        wait(self._parts)
        for part in self._parts:
            part.result()
        return {source.stem: _library(self._folder, source) for source in SOURCES}


def _library(folder: Path, source: Path) -> Path:
    made_of = "\n".join([*(path.read_text() for path in (source, *HEADERS)), *FLAGS, _processor()])
    return folder / f"{source.stem}-{hashlib.blake2b(made_of.encode(), digest_size=12).hexdigest()}.so"


def _compile(folder: Path, source: Path) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise MissingExtraError("native kernels need a C compiler, and none is installed", remedy=REMEDY)
    library = _library(folder, source)  # named before it is compiled: an upgrade may replace the source meanwhile
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place) / source.stem
            command = [compiler, *FLAGS, "-o", str(made), str(source), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_SECONDS)
            if done.returncode != 0:
                raise MissingExtraError(
                    f"{source.name} could not be compiled by {compiler}: {done.stderr.strip()[-500:]}", remedy=REMEDY
                )
            made.replace(library)  # atomic, also with two processes at once
    except subprocess.TimeoutExpired as error:
        raise MissingExtraError(f"{compiler} took more than {COMPILE_SECONDS} s", remedy=REMEDY) from error
    except OSError as error:
        raise MissingExtraError(f"native kernels could not be kept in {folder}: {error}", remedy=REMEDY) from error


@cache
def _processor() -> str:
    """The processor's features, which decide what `-march=native` may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())

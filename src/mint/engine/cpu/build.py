"""Compiles the engine's kernels in C for this machine, in background threads while torch is imported.

Libraries are cached in a folder by target, source, flags and set of instructions, so that machines of several kinds may
share a home folder. The compiler is not part of the key: its upgrade must not change the bits of a run in progress.
Neither is the C library's version.

A library is code that runs with the rights of its user. Therefore the folder is the user's own, and the name of each
file ends in the checksum of its content: a file that is cut off, damaged or written by somebody else is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path

from mint.engine.instruction_sets import InstructionSet, instruction_set, sets_of_machine, sets_of_processor
from mint.errors import MissingExtraError

log = logging.getLogger("mint.kernels")

_FOLDER = Path(__file__).parent / "sources"
PREBUILT = Path(__file__).parent / "prebuilt"
"""Libraries that came with the package, in a folder for each set of instructions; not there in a checkout."""

SOURCES = tuple(sorted(_FOLDER.glob("*.c")))
HEADERS = tuple(sorted(_FOLDER.glob("*.h")))
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-O2",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-Wno-psabi",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    *(() if sys.platform == "darwin" else ("-fopenmp",)),  # Apple's clang has none: one thread
)
COMPILE_SECONDS = 900.0
"""One file takes about one second of a processor. A busy machine may need a minute; a compiler that takes so long
hangs."""

FLAG_SECONDS = 10.0
"""A compiler reads an empty file in a few hundredths of a second."""

NOTICE_SECONDS = 20.0
"""After so long the log says that the compiler is still at work."""

TESTED_HERE = sys.platform == "linux" and platform.machine() == "x86_64"
"""Whether the kernels are tested on this kind of machine, so that they are used by default."""

_WRITABLE_FOR_OTHERS = 0o022
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)

REMEDY = "Install gcc or clang, or set MINT_NATIVE=0 to compute with torch's kernels"


class NativeBuild:
    """The libraries of all sources. The constructor starts to compile those that are missing, in parallel."""

    def __init__(self, folder: Path, *, required: bool = True, instructions: str | None = None) -> None:
        """Compiles into `folder` what it does not have. If that fails, an engine does without unless they are
        `required`. `instructions` is the name of a set; None: the fastest one that the processor has and the compiler
        knows.

        Raises:
            InvalidRequestError: the processor does not have these instructions.
        """
        self.required = required
        self.instructions = _fastest_set(folder) if instructions is None else instruction_set(instructions)
        # The threads are joined at exit, so that no compiler outlives the process.
        pool = ThreadPoolExecutor(len(SOURCES), thread_name_prefix="mint-compile")
        self._parts = {source.stem: pool.submit(_library, folder, source, self.instructions) for source in SOURCES}
        pool.shutdown(wait=False)

    @property
    def digest(self) -> str:
        """The digest of sources and flags. With the set of instructions it decides the kernels' bits."""
        return sources_digest(self.instructions)

    def libraries(self) -> dict[str, Path]:
        """Where each library is, by the name of its source without suffix; waits until all are there.

        Raises:
            MissingExtraError: there is no C compiler, or it refuses or hangs, or the folder cannot be used.
        """
        if wait(self._parts.values(), timeout=NOTICE_SECONDS).not_done:
            log.info("the C kernels are still being compiled; this machine is busy")
        return {stem: part.result() for stem, part in self._parts.items()}


def _fastest_set(folder: Path) -> InstructionSet:
    """The fastest set of this processor whose kernels are there, or can be compiled: old compilers lack the newest
    sets. Without a compiler, the fastest of all."""
    compiler = _compiler()
    for instructions in sets_of_processor():
        places = [PREBUILT / instructions.name, folder]
        with contextlib.suppress(OSError):  # said when the folder is needed
            if all(_libraries(places, source, instructions) for source in SOURCES):
                return instructions
        if compiler is not None and _takes(compiler, instructions.flags):
            return instructions
    return instruction_set()


@cache
def _takes(compiler: str, flags: tuple[str, ...]) -> bool:
    """Whether a compiler does not refuse such flags."""
    command = [compiler, *flags, "-E", "-x", "c", os.devnull]
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=FLAG_SECONDS).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return True  # its first file says what is wrong


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def _libraries(folders: Sequence[Path], source: Path, instructions: InstructionSet) -> list[Path]:
    """The files in these folders that are named as a library of a source, sound or not.

    Raises:
        OSError: a folder cannot be read.
    """
    name = f"{source.stem}-{target_name()}-{_key(source, instructions)}-*.so"
    return [library for folder in folders for library in sorted(folder.glob(name))]


def sources_digest(instructions: InstructionSet) -> str:
    """The digest of all sources and of the compiler's flags. Comments and white space are left out: they change no
    bit."""
    texts = (re.sub(r"\s+", " ", _COMMENT.sub(" ", path.read_text())) for path in (*SOURCES, *HEADERS))
    return _checksum("\n".join([*texts, *FLAGS, *instructions.flags]).encode())[:12]


def _library(folder: Path, source: Path, instructions: InstructionSet) -> Path:
    """The library of a source, compiled if neither the package nor the folder has a sound one."""
    key = _key(source, instructions)  # before it is compiled: an upgrade may replace the source meanwhile
    for library in _libraries([PREBUILT / instructions.name], source, instructions):
        # Belongs to whoever has installed the package, as its Python files do.
        if _is_whole(library):
            return library
        log.warning("%s is not loaded: its content is not what was compiled. Install mint again", library)
    try:
        _make_private(folder)
        for library in _libraries([folder], source, instructions):
            if (fault := _fault_of(library)) is None:
                return library
            log.warning("%s is not loaded but compiled again: %s", library, fault)
            library.unlink(missing_ok=True)
        return _compile(folder, source, key, instructions)
    except OSError as error:
        raise MissingExtraError(f"native kernels could not be kept in {folder}: {error}", remedy=REMEDY) from error


def _key(source: Path, instructions: InstructionSet) -> str:
    """The checksum of the source, the headers and the flags of a library."""
    texts = (path.read_text() for path in (source, *HEADERS))
    return _checksum("\n".join([*texts, *FLAGS, *instructions.flags]).encode())


def target_name() -> str:
    """Which systems can load what is compiled here: the operating system, the processor's architecture and, on Linux,
    the C library, as in `linux_x86_64_glibc`. It is no part of `sources_digest`."""
    parts = [sys.platform, platform.machine()]
    if sys.platform == "linux":
        parts.append("glibc" if "CS_GNU_LIBC_VERSION" in os.confstr_names else "musl")
    return "_".join(parts)


def _make_private(folder: Path) -> None:
    """Makes the folder, or takes the right to write there away from others.

    Raises:
        MissingExtraError: it belongs to another user, who could put code there.
        OSError: it cannot be made or changed.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise MissingExtraError(
            f"native kernels are not kept in {folder}: it belongs to user {found.st_uid}, not to {os.geteuid()}",
            remedy="Set XDG_CACHE_HOME to a folder of your own, or MINT_NATIVE=0 to compute with torch's kernels",
        )
    if found.st_mode & _WRITABLE_FOR_OTHERS:
        folder.chmod(found.st_mode & ~_WRITABLE_FOR_OTHERS & 0o777)


def _fault_of(library: Path) -> str | None:
    """Why a library must not be loaded; None if it is sound. A cut-off library would end the process by a signal."""
    found = library.lstat()
    if not stat.S_ISREG(found.st_mode):
        return "it is not a file"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & _WRITABLE_FOR_OTHERS:
        return "others can write it"
    return None if _is_whole(library) else "its content is not what was compiled"


def _is_whole(library: Path) -> bool:
    """Whether a library has the content for which it is named."""
    return library.stem.endswith(f"-{_checksum(library.read_bytes())}")


def prebuild(folder: Path) -> list[Path]:
    """Compiles all sources into `folder`, below it a folder for each set of instructions that this kind of machine may
    have; for a package.

    Raises:
        MissingExtraError: there is no C compiler, or it refuses.
    """
    made = []
    for instructions in sets_of_machine():
        own = folder / instructions.name
        own.mkdir()
        made += [_compile(own, source, _key(source, instructions), instructions) for source in SOURCES]
    return made


def _compile(folder: Path, source: Path, key: str, instructions: InstructionSet) -> Path:
    compiler = _compiler()
    if compiler is None:
        raise MissingExtraError("native kernels need a C compiler, and none is installed", remedy=REMEDY)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        made = Path(place) / source.stem
        command = [compiler, *FLAGS, *instructions.flags, "-o", str(made), str(source), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise MissingExtraError(
                f"{compiler} did not end in {COMPILE_SECONDS:.0f} s",
                remedy="Look why it hangs, or set MINT_NATIVE=0 to compute with torch's kernels",
            ) from error
        if done.returncode != 0:
            raise MissingExtraError(
                f"{source.name} could not be compiled by {compiler}: {done.stderr.strip()[-500:]}", remedy=REMEDY
            )
        made.chmod(0o700)  # whatever the umask is
        _sync(made)
        library = folder / f"{source.stem}-{target_name()}-{key}-{_checksum(made.read_bytes())}.so"
        made.replace(library)  # atomic, also with two processes at once
    _sync(folder)
    return library


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""A GGUF file as a Hugging Face folder: converted once, and kept in the cache under a hash of its content.

The folder has a note of its files, which is written last: so it is noticed when one was cut off or changed. Knows
nothing of the format; see `conversion`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from mint.config import read_settings
from mint.errors import InvalidRequestError
from mint.models.gguf.conversion import convert, require_convertible
from mint.models.tensor_files import write_file

log = logging.getLogger(__name__)

_READING = 5
"""Counts the ways in which files were read: a folder of an earlier one is not used."""

NOTE = "conversion.json"
"""The note in a folder: of each file the size, of small ones the SHA-256, too."""

_HASHED_BYTES = 32 << 20
"""Larger files are compared by their size alone: to hash weights at every start would take seconds."""

_LOCK = "lock"
_FORGOTTEN_S = 24 * 3600
"""After so long a temporary folder without a lock is nobody's."""


def gguf_folder(file: Path) -> Path:
    """The folder with the content of a GGUF file. It is written when it is first asked for, or when it is damaged.

    Copies of a file share it, whatever their names are.

    Raises:
        InvalidRequestError: the file is damaged or not complete, transformers does not know its architecture, the disk
            has too little space, or the folder cannot be written.
    """
    caches = read_settings().cache_dir
    cache = caches / "gguf"
    key = f"{_content_hash(file, caches / 'gguf-hashes')[:24]}-{_READING}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        whole = next(filter(_is_whole, _conversions(cache, key)), None)
        if whole is not None:
            return whole
        with _alone(caches / "gguf-locks" / key, file):
            kept = _conversions(cache, key)  # again: another process may have written it meanwhile
            whole = next(filter(_is_whole, kept), None)
            if whole is not None:
                return whole
            folder = kept[0] if kept else cache / f"{file.stem}-{key}"
            log.info("reading %s, %s", file, "again: its conversion is damaged" if kept else "once")
            _write_folder(file, folder)
            return folder
    except OSError as error:
        raise InvalidRequestError(
            f"cannot be written to {cache}, which needs about 4 bytes for each parameter: {error.strerror}",
            field="base_model",
            value=str(file),
            remedy="Free disk space there, or set XDG_CACHE_HOME to another folder",
        ) from error


def _conversions(cache: Path, key: str) -> list[Path]:
    return sorted(folder for folder in cache.glob(f"*-{key}") if folder.is_dir())


@contextmanager
def _alone(lock_file: Path, file: Path) -> Generator[None]:
    """A block that one process at a time is in: two would need the memory for a model twice."""
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with lock_file.open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another process, which reads %s", file)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _content_hash(file: Path, hashes: Path) -> str:
    """SHA-256 of all bytes of a file. As hashing takes 1.4 s for a GB, it is noted in the folder `hashes`, and holds as
    long as path, size and time of change stay.

    Raises:
        InvalidRequestError: the file cannot be read.
    """
    try:
        stat = file.stat()
        named = f"{file.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}"
        note = hashes / hashlib.sha256(named.encode()).hexdigest()[:32]
        with suppress(OSError, ValueError, KeyError, TypeError):  # not hashed yet, or the note is damaged
            return str(json.loads(note.read_bytes())["sha256"])
        with file.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise InvalidRequestError(
            f"cannot be read: {error.strerror}", field="base_model", value=str(file), remedy="Allow reading it"
        ) from error
    with suppress(OSError):  # it is hashed again at the next start
        write_file(note, [json.dumps({"sha256": found, "file": str(file)}).encode()])
    return found


def _is_whole(folder: Path) -> bool:
    """Whether the files are there, as they were written."""
    try:
        files = json.loads((folder / NOTE).read_bytes())["files"]
        return all(_described(folder / name) == described for name, described in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _described(file: Path) -> dict[str, int | str]:
    size_bytes = file.stat().st_size
    if size_bytes > _HASHED_BYTES:
        return {"size_bytes": size_bytes}
    return {"size_bytes": size_bytes, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def _write_folder(file: Path, folder: Path) -> None:
    remove_leftovers(folder.parent)  # first: they may take the room that is needed
    require_convertible(file, folder.parent)
    with temporary_folder(folder) as temporary:
        content = temporary / "folder"
        convert(file, content)
        files = {own.name: _described(own) for own in sorted(content.iterdir())}
        write_file(content / NOTE, [json.dumps({"source": str(file), "files": files}, indent=2).encode()])
        try:
            content.rename(folder)
        except OSError:  # a damaged one is there
            folder.rename(temporary / "damaged")
            content.rename(folder)


@contextmanager
def temporary_folder(folder: Path) -> Generator[Path]:
    """A folder beside `folder`, which is removed at the end. A lock on a file in it says that this process lives."""
    with (
        tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary,
        (Path(temporary) / _LOCK).open("wb") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(temporary)


def remove_leftovers(cache: Path) -> None:
    """Removes the temporary folders of processes that were killed, of conversions and of downloads."""
    for folder in cache.glob(".*-*"):
        if folder.is_dir() and _is_forgotten(folder):
            log.info("removing %s, which a process has left that was ended", folder)
            shutil.rmtree(folder, ignore_errors=True)


def _is_forgotten(folder: Path) -> bool:
    try:
        with (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except FileNotFoundError:  # it has just been made
        return folder.is_dir() and time.time() - folder.stat().st_mtime > _FORGOTTEN_S
    except OSError:  # its process lives
        return False

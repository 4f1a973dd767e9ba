"""Takes the state of a data directory at one moment while a service writes to it: the journal, and the files in it.

Nobody waits for this. The journal is read in one transaction, beside its writers. Files never change, so each new one
gets a second name (a hard link) at once, and may be deleted under its first one while it is read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mint.server.mirror.manifest import MirroredFile
from mint.server.store.journal import JOURNAL_FILE

log = logging.getLogger("mint.mirror")

FOLDER = "mirror"
"""Where a copy lies in the data directory while it is sent."""

ATTEMPTS = 3
"""How often the state is taken anew because a file was deleted just before it got its second name."""

READ_TIMEOUT_S = 5.0

Mark = tuple[int, int]
"""What tells that a file is the same as before: its size in bytes and its time of change."""

_FILES = "SELECT file FROM samplers WHERE file IS NOT NULL AND file != '' UNION SELECT folder FROM checkpoints"
_SNAPSHOTS = "SELECT model_id, file FROM snapshots"


@dataclass
class Known:
    """The files and folders of the last copy, so that only new ones are read: by name, each with its mark."""

    files: dict[str, tuple[Mark, MirroredFile]] = field(default_factory=dict)
    folders: dict[str, tuple[Mark, tuple[str, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Copy:
    """A state: the journal as a file, all files that it names, and where the content of the new ones lies now.

    `version` is that of the journal (`Source.version`), `taken_at` in seconds since the epoch. `missing` are files that
    rows name and that are not there. `known` is for the next copy.
    """

    version: int
    taken_at: float
    journal: Path
    files: tuple[MirroredFile, ...]
    new: dict[str, Path]
    missing: tuple[str, ...]
    known: Known


class Source:
    """One data directory, which a service has open. One thread uses it."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._staging = data_dir / FOLDER
        address = f"{(data_dir / JOURNAL_FILE).absolute().as_uri()}?mode=ro"
        self._connection = sqlite3.connect(
            address, uri=True, timeout=READ_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        self._known = Known()

    def close(self) -> None:
        """Closes the journal, and removes what a copy has left."""
        self._connection.close()
        shutil.rmtree(self._staging, ignore_errors=True)

    def version(self) -> int:
        """A number that changes with each commit of anybody."""
        return self._connection.execute("PRAGMA data_version").fetchone()[0]

    @contextmanager
    def copy(self) -> Generator[Copy]:
        """The state now. Its files are there until the end of the block.

        Raises:
            OSError, sqlite3.Error: it cannot be read, or there is no room for a copy of the journal.
        """
        shutil.rmtree(self._staging, ignore_errors=True)
        self._staging.mkdir(mode=0o700)
        try:
            yield self._take()
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)

    def note_sent(self, copy: Copy) -> None:
        """Takes the files of a copy for known: the next one does not read them again."""
        self._known = copy.known

    def _take(self) -> Copy:
        for attempt in range(ATTEMPTS):
            self._connection.execute("BEGIN")
            try:
                version, taken_at = self.version(), time.time()
                names = [row[0] for row in self._connection.execute(_FILES)]
                snapshots: dict[str, list[str]] = {}
                for model_id, file in self._connection.execute(_SNAPSHOTS):
                    snapshots.setdefault(model_id, []).append(file)
                found = _Files(self._data_dir, self._staging, self._known)
                missing = [name for name in names if not found.add(name)]
                for files in snapshots.values():
                    # the newest one may not be written yet, and the oldest be deleted by now: any one is enough
                    absent = [file for file in files if not found.add(file)]
                    missing += absent if len(absent) == len(files) else []
                if missing and attempt < ATTEMPTS - 1:  # deleted since the rows were read
                    continue
                journal = self._staging / JOURNAL_FILE
                self._copy_journal(journal)
            finally:
                self._connection.rollback()
            files = tuple(file for _, file in found.known.files.values())
            return Copy(version, taken_at, journal, files, found.new, tuple(missing), found.known)
        raise AssertionError("unreachable: the last attempt returns")

    def _copy_journal(self, target: Path) -> None:
        with closing(sqlite3.connect(target, isolation_level=None)) as copy:
            copy.execute("PRAGMA synchronous = OFF")  # it is sent, and not kept
            self._connection.backup(copy)
        target.chmod(0o600)


class _Files:
    """Gives each new file a second name, and reads its content."""

    def __init__(self, data_dir: Path, staging: Path, before: Known) -> None:
        self._data_dir = data_dir
        self._staging = staging
        self._before = before
        self.known = Known()
        self.new: dict[str, Path] = {}  # content → where it lies

    def add(self, name: str) -> bool:
        """Adds a file, or all files of a folder; whether it is there."""
        path = self._data_dir / name
        try:
            if not path.is_dir():
                self._add_file(name)
                return True
            mark = _mark(path)
            known = self._before.folders.get(name)
            members = known[1] if known is not None and known[0] == mark else _members(path)
            self.known.folders[name] = mark, members
            for member in members:
                self._add_file(f"{name}/{member}")
        except FileNotFoundError:
            return False
        return True

    def _add_file(self, name: str) -> None:
        path = self._data_dir / name
        mark = _mark(path)
        known = self._before.files.get(name)
        if known is not None and known[0] == mark:
            self.known.files[name] = known
            return
        staged = self._staging / f"file{len(self.new)}"
        _link(path, staged)
        with staged.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        self.known.files[name] = _mark(staged), MirroredFile(name, staged.stat().st_size, content)
        self.new[content] = staged


def _members(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")))


def _mark(path: Path) -> Mark:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _link(path: Path, target: Path) -> None:
    target.unlink(missing_ok=True)  # of an earlier attempt
    try:
        os.link(path, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copy2(path, target)

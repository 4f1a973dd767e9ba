"""Simulates a loss of power: copies a data directory as it would be found if no unsynced write survived.

`Disk` intercepts every `os.fsync` of this process, and records what was synced. Killing a process cannot show a missing
fsync, because the kernel still writes what the process had written.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from mint.server.store.journal import JOURNAL_FILE

PATIENCE_S = 600.0


class Disk:
    """The part of a data directory that is durable.

    The journal is there as it was when the last fsync of its log began. A file is there if it was fsynced, and then its
    name by an fsync of its folder. What was there before this process is durable.
    """

    def __init__(self, data_dir: Path, replace_fsync: Callable[[Callable[[int], None]], None]) -> None:
        """`replace_fsync` puts the given function in the place of `os.fsync`."""
        self._data_dir = data_dir
        self._journal = data_dir.with_name("journal")
        self._contents: set[tuple[int, int]] = set()
        self._names: dict[Path, tuple[int, int]] = {}
        self.syncs = self.journal_syncs = 0
        self._lock = threading.Lock()
        self._copies = 0
        self._kept = 0
        self._may_sync = threading.Event()
        self._may_sync.set()
        self._fsync = os.fsync
        if data_dir.is_dir():
            for entry in [data_dir, *data_dir.rglob("*")]:
                self._names[entry] = _identity(entry.stat())
                self._contents.add(_identity(entry.stat()))
            if (data_dir / JOURNAL_FILE).is_file():
                self._keep(*self._copy())
        replace_fsync(self._sync)

    def _sync(self, handle: int) -> None:
        path = path_of(handle)
        if not path.is_relative_to(self._data_dir):
            self._fsync(handle)
        elif path.name.endswith("-wal"):
            before = self._copy()  # what is written while a sync is under way may be lost
            self._fsync(handle)
            self._keep(*before)
        elif path.is_dir():
            found = {}
            for entry in path.iterdir():
                with suppress(FileNotFoundError):  # another thread may remove it meanwhile
                    if not entry.name.endswith(".tmp"):
                        found[entry] = _identity(entry.stat())
            self._fsync(handle)
            for entry, identity in found.items():
                if entry.is_dir() or identity in self._contents:
                    self._names[entry] = identity
        else:
            self._fsync(handle)
            self._contents.add(_identity(os.fstat(handle)))
        with self._lock:
            self.syncs += 1
        self._may_sync.wait(PATIENCE_S)

    def _copy(self) -> tuple[int, bytes]:
        """The journal as it is, and its number among the copies."""
        with (
            self._lock,
            closing(sqlite3.connect(self._data_dir / JOURNAL_FILE)) as now,
            closing(sqlite3.connect(":memory:")) as copy,
        ):
            now.backup(copy)
            self._copies += 1
            return self._copies, copy.serialize()

    def _keep(self, number: int, journal: bytes) -> None:
        with self._lock:
            if number > self._kept:  # another sync, that ended before this one, may have kept more
                fresh = self._journal.with_suffix(".new")
                fresh.write_bytes(journal)
                fresh.replace(self._journal)  # before it is counted: what this sync lets go of goes after that
                self._kept = number
            self.journal_syncs += 1

    def freeze(self) -> None:
        """From now on no sync returns, so that nothing is acknowledged that a copy made after this does not have."""
        self._may_sync.clear()

    def after_power_loss(self, folder: Path, *, torn: bool = False) -> Path:
        """A copy of the directory as it would be found at one moment: made again if a sync has come in between.

        `torn`: files that were not synced are there as well, the first half of each.
        """
        syncs = -1
        while syncs != self.syncs:
            shutil.rmtree(folder, ignore_errors=True)
            syncs = self.syncs
            folder.mkdir()
            shutil.copy(self._journal, folder / JOURNAL_FILE)
            for path, identity in sorted(self._names.copy().items()):
                copy = folder / path.relative_to(self._data_dir)
                with suppress(FileNotFoundError):  # its folder has no durable name, or nobody names the file any more
                    if path.is_dir():
                        copy.mkdir(exist_ok=True)
                    elif _identity(path.stat()) == identity and not path.name.startswith(JOURNAL_FILE):
                        shutil.copy(path, copy)
            if torn:
                self._tear(folder)
        return folder

    def _tear(self, folder: Path) -> None:
        for path in sorted(self._data_dir.rglob("*")):
            copy = folder / path.relative_to(self._data_dir)
            with suppress(FileNotFoundError):
                if path.is_dir():
                    copy.mkdir(exist_ok=True)
                elif not copy.exists() and not path.name.startswith(JOURNAL_FILE):
                    content = path.read_bytes()
                    copy.write_bytes(content[: len(content) // 2])


def path_of(handle: int) -> Path:
    """The file that is open under a handle."""
    return Path(f"/proc/self/fd/{handle}").readlink()


def _identity(status: os.stat_result) -> tuple[int, int]:
    """A value that changes when the file is written to, and not when it is renamed."""
    return status.st_ino, status.st_mtime_ns

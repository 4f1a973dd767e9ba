"""Space on the disk of a data directory that is kept for the day on which nothing else is left.

To delete something, SQLite must first write to the journal, which it cannot on a disk without a free byte. So a file
beside the journal takes some space. A deletion, or a command of the operator, removes it where the disk is full; it is
made again when there is room. What a service writes besides never uses this space: it would be gone when it is needed.

Knows nothing of the journal but its name. Any thread may call.
"""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("mint.storage")

SPARE_BYTES = 2 << 20
"""A deletion writes less than 100 KB; a process that waits for space may take some of it meanwhile."""

ROOM = 4
"""The file is made while the disk has so many times its size."""


class SpareSpace:
    """The file of one data directory."""

    def __init__(self, journal: Path) -> None:
        """`journal` is the database, which need not exist."""
        self._path = journal.with_suffix(".spare")

    def take(self) -> None:
        """Makes the file, if it is not there and the disk has room for it. No error if it cannot be made."""
        try:
            if self._is_taken() or shutil.disk_usage(self._path.parent).free < ROOM * SPARE_BYTES:
                return
            self.release()  # a loss of power may have left it without its blocks
            handle = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except OSError as error:  # another process was first; or the folder cannot be written, which others report
            log.debug("no spare space was taken: %s", error)
            return
        try:
            _allocate(handle)
        except OSError as error:
            log.debug("no spare space was taken: %s", error)
            self.release()
        finally:
            os.close(handle)

    def _is_taken(self) -> bool:
        try:
            return self._path.stat().st_blocks * 512 >= SPARE_BYTES
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Removes the file."""
        with suppress(OSError):
            self._path.unlink()

    def release_if_short(self) -> None:
        """Removes the file if the disk has less left than it holds."""
        with suppress(OSError):
            if shutil.disk_usage(self._path.parent).free < SPARE_BYTES and self._path.exists():
                log.warning("the disk of %s is full: the space that was kept for this is used now", self._path.parent)
                self.release()


def _allocate(handle: int) -> None:
    """Gives an empty file its size in blocks that are its own."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, SPARE_BYTES)
    if os.fstat(handle).st_blocks * 512 < SPARE_BYTES:  # a file system that compresses, or leaves zeros out
        os.pwrite(handle, os.urandom(SPARE_BYTES), 0)

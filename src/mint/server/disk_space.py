"""The free space on the disk of a data directory, and the reserve that nothing new may use.

What is accepted still needs space when the disk is nearly full: its snapshots and results. So new passes, sessions,
models, samplers, named saves, uploads and copies are refused before. Any thread may call.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mint.errors import JournalError, OverloadedError
from mint.server.limits import default_reserve

log = logging.getLogger("mint.storage")

FRESH_S = 1.0

NEAR_RESERVES = 2.0
FAR_RESERVES = 2.5
"""The disk is nearly full below so many reserves of free space, until there are more than `FAR_RESERVES` again."""


class DiskSpace:
    """The disk of one data directory."""

    def __init__(
        self, data_dir: Path, reserve_bytes: int | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`reserve_bytes` None: a share of the disk."""
        self._data_dir = data_dir
        self._clock = clock
        self._read_at = float("-inf")
        self._free_bytes = 0
        self._is_nearly_full = False
        self.promised_bytes = 0
        """Bytes that copies and imports of uploads have still to write. Nothing else may use this space."""
        self.announced_bytes = 0
        """Bytes of uploads that clients have still to send. They may never come, so they limit other uploads only."""
        self.reserve_bytes = (
            default_reserve(shutil.disk_usage(data_dir).total) if reserve_bytes is None else reserve_bytes
        )

    @property
    def free_bytes(self) -> int:
        """The free space, as it was at most a second ago."""
        now = self._clock()
        if now - self._read_at >= FRESH_S:
            self._free_bytes = shutil.disk_usage(self._data_dir).free
            self._read_at = now
        return self._free_bytes

    @property
    def is_short(self) -> bool:
        """Whether the disk is filled up to the reserve, or will be by what is promised."""
        return self.shortage() is not None

    def look(self) -> bool:
        """Whether the disk is nearly full. The log says once when it becomes so, and once when it no longer is."""
        reserves = self.free_bytes / max(1, self.reserve_bytes)
        if reserves < NEAR_RESERVES and not self._is_nearly_full:
            self._is_nearly_full = True
            log.warning(
                "the disk of %s is nearly full: %s are free; below %s, new passes, sessions, models, named saves and "
                "uploads are refused. Delete checkpoints (mint checkpoints delete), or free disk space",
                self._data_dir,
                _in_mib(self.free_bytes),
                _in_mib(self.reserve_bytes),
            )
        elif reserves > FAR_RESERVES and self._is_nearly_full:
            self._is_nearly_full = False
            log.warning("the disk of %s has free space again: %s are free", self._data_dir, _in_mib(self.free_bytes))
        return self._is_nearly_full

    def warning(self) -> str | None:
        """What is wrong or soon will be, without numbers: everybody who reaches the server may read it."""
        if not self.look():
            return None
        if self.is_short:
            return "the disk is filled up to its reserve: new passes, sessions, models, saves and uploads are refused"
        return "the disk is nearly full: new passes, sessions, models, saves and uploads will be refused soon"

    def shortage(self, size_bytes: int = 0) -> OverloadedError | None:
        """The error if nothing new of so many bytes may be stored, else None."""
        if self.free_bytes - self.promised_bytes - size_bytes >= self.reserve_bytes:
            return None
        needed = f", and {size_bytes} more are needed" if size_bytes else ""
        return OverloadedError(
            f"bytes of the server's disk must stay free; {self.free_bytes} are, copies under way will take "
            f"{self.promised_bytes} of them{needed}; what runs goes on",
            field="disk_reserve",
            value=self.reserve_bytes,
            remedy="Delete checkpoints (mint checkpoints delete); the operator can free disk space, or lower "
            "MINT_DISK_RESERVE_MIB",
        )

    def require_space_for_passes(self) -> None:
        """Checks that the data of a new pass may be stored.

        Raises:
            JournalError: the disk is filled up to the reserve; the pass may be sent again.
        """
        error = self.shortage()
        if error is not None:
            raise JournalError(error.message, field=error.field, value=error.value, remedy=error.remedy)

    def require_room(self, size_bytes: int) -> None:
        """Checks by the free space of this moment that so many bytes can be promised.

        Raises:
            OverloadedError: the disk would be filled up to the reserve.
        """
        self._read_at = float("-inf")
        room = self.free_bytes - self.promised_bytes - self.announced_bytes - self.reserve_bytes
        if size_bytes > room:
            raise OverloadedError(
                f"bytes of the server's disk must stay free; beside them and what uploads under way will take, "
                f"{max(0, room)} are free, and {size_bytes} more are needed",
                field="disk_reserve",
                value=self.reserve_bytes,
                remedy="Delete checkpoints (mint checkpoints delete), or try again later; the operator can free space",
            )

    def require_free_space(self, size_bytes: int = 0, *, fresh: bool = False) -> None:
        """Checks that something new of so many bytes may be stored, with `fresh` by the free space of this moment.

        Raises:
            OverloadedError: the disk is filled up to the reserve, or would be.
        """
        if fresh:
            self._read_at = float("-inf")
        error = self.shortage(size_bytes)
        if error is not None:
            raise error


def _in_mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.0f} MiB"


def folder_bytes(folder: Path) -> int:
    """The size of the files in a folder together; 0 if there is no such folder."""
    total = 0
    for path in folder.glob("*"):
        with suppress(FileNotFoundError):  # removed just now
            total += path.stat().st_size
    return total

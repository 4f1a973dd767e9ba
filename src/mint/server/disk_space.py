"""The room on the disk of a data directory, and the reserve that nothing new may use.

What is accepted still needs room when the disk is nearly full: its journal, snapshots and results. So new models, named
saves, uploads and copies are refused before. Any thread may call.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from mint.errors import OverloadedError
from mint.server.limits import default_reserve

FRESH_S = 1.0


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
        self.reserve_bytes = (
            default_reserve(shutil.disk_usage(data_dir).total) if reserve_bytes is None else reserve_bytes
        )

    @property
    def free_bytes(self) -> int:
        """The free room, as it was at most a second ago."""
        now = self._clock()
        if now - self._read_at >= FRESH_S:
            self._free_bytes, self._read_at = shutil.disk_usage(self._data_dir).free, now
        return self._free_bytes

    @property
    def is_short(self) -> bool:
        """Whether the disk is filled up to the reserve."""
        return self.free_bytes < self.reserve_bytes

    def shortage(self) -> OverloadedError | None:
        """The error if nothing new may be stored, else None."""
        if not self.is_short:
            return None
        return OverloadedError(
            f"bytes of the server's disk must stay free, and {self.free_bytes} are; what runs goes on",
            field="disk_reserve",
            value=self.reserve_bytes,
            remedy="Delete checkpoints (mint checkpoints delete); the operator can free disk space, or lower "
            "MINT_DISK_RESERVE_MIB",
        )

    def require_room(self) -> None:
        """Checks that something new may be stored.

        Raises:
            OverloadedError: the disk is filled up to the reserve.
        """
        error = self.shortage()
        if error is not None:
            raise error

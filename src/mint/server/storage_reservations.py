"""What uploads and copies under way will store: it counts against the owner's quota and the disk's reserve already.

Each of them is checked when it begins and as it grows. So however many run side by side, together they exceed neither
the quota nor the reserve. The end of one, whatever it is, gives back what it had reserved.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

from mint.errors import InvalidRequestError
from mint.server.disk_space import DiskSpace


class StorageReservations:
    """The reservations of one data directory. Any thread may call."""

    def __init__(self, disk: DiskSpace, stored_bytes: Callable[[str], int]) -> None:
        """`stored_bytes` gives what the checkpoints of an owner take; it may read the database."""
        self._disk = disk
        self._stored_bytes = stored_bytes
        self._lock = threading.Lock()
        self._of_owners: Counter[str] = Counter()

    def used_bytes(self, owner: str) -> int:
        """What the checkpoints of an owner take, with those that are being stored."""
        return self._stored_bytes(owner) + self._of_owners[owner]

    @contextmanager
    def open(self, owner: str, max_bytes: int | None) -> Generator[Reservation]:
        """A reservation of no bytes, which can grow; `max_bytes` is the owner's quota, None no limit."""
        reservation = Reservation(self, owner, max_bytes)
        try:
            yield reservation
        finally:
            with self._lock:
                self._change(reservation, 0, 0, 0)

    def hold(self, reservation: Reservation, stored_bytes: int, unwritten_bytes: int, announced_bytes: int) -> None:
        """As `Reservation.hold`, and `announced_bytes` are to be sent by a client."""
        with self._lock:
            owner, max_bytes = reservation.owner, reservation.max_bytes
            if max_bytes is not None and stored_bytes > reservation.stored_bytes:
                used = self._stored_bytes(owner)
                others = self._of_owners[owner] - reservation.stored_bytes
                if used + others + stored_bytes > max_bytes:
                    raise InvalidRequestError(
                        f"is the quota for checkpoints; {used} bytes are in use, {others} are being stored, and "
                        f"{stored_bytes} more are needed",
                        field="max_checkpoint_bytes",
                        value=max_bytes,
                        remedy="Delete checkpoints, save with ttl_seconds, or wait for what is being stored",
                    )
            more_bytes = unwritten_bytes + announced_bytes - reservation.unwritten_bytes - reservation.announced_bytes
            if more_bytes > 0:
                self._disk.require_room(more_bytes)
            self._change(reservation, stored_bytes, unwritten_bytes, announced_bytes)

    def require_space(self) -> None:
        """Checks that an upload may be written further.

        Raises:
            OverloadedError: the disk is filled up to its reserve.
        """
        with self._lock:
            self._disk.require_free_space(fresh=True)

    def _change(self, reservation: Reservation, stored_bytes: int, unwritten_bytes: int, announced_bytes: int) -> None:
        self._of_owners[reservation.owner] += stored_bytes - reservation.stored_bytes
        if not self._of_owners[reservation.owner]:
            del self._of_owners[reservation.owner]
        self._disk.promised_bytes += unwritten_bytes - reservation.unwritten_bytes
        self._disk.announced_bytes += announced_bytes - reservation.announced_bytes
        reservation.stored_bytes, reservation.unwritten_bytes = stored_bytes, unwritten_bytes
        reservation.announced_bytes = announced_bytes


class Reservation:
    """What one upload or copy will store."""

    def __init__(self, reservations: StorageReservations, owner: str, max_bytes: int | None) -> None:
        self._reservations = reservations
        self.owner = owner
        self.max_bytes = max_bytes
        self.stored_bytes = 0
        self.unwritten_bytes = 0
        self.announced_bytes = 0

    def hold(self, stored_bytes: int, unwritten_bytes: int) -> None:
        """Reserves this instead of what was reserved: `stored_bytes` count for the owner, and `unwritten_bytes` are not
        on the disk yet, but will be soon. Afterwards nothing has changed if it raises.

        Raises:
            InvalidRequestError: the owner's checkpoints would have more than the quota.
            OverloadedError: the disk would be filled up to its reserve.
        """
        self._reservations.hold(self, stored_bytes, unwritten_bytes, 0)

    def announce(self, stored_bytes: int, awaited_bytes: int) -> None:
        """As `hold`; but of the `stored_bytes`, a client has still to send `awaited_bytes`, and may never do so.

        Raises:
            InvalidRequestError: the owner's checkpoints would have more than the quota.
            OverloadedError: the disk is filled up to its reserve, or would be.
        """
        self._reservations.require_space()
        self._reservations.hold(self, stored_bytes, 0, awaited_bytes)

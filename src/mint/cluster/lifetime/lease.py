"""How long a rank or replica lives without its server, and whose orders it takes, in a Ray that outlives the server.

Each start of a server on a data directory has a higher incarnation number. A process obeys the highest one that it has
heard of. It ends by itself if nobody has renewed its lease for `lease_s`. Until then the next start of the server may
take it over.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

FIRST_LEASE_S = 300.0
"""The same while it starts: it loads torch, and waits for the others."""

RENEW_S = 5.0
"""How often a server renews the leases."""

ORPHANED_STATUS = 0


class SupersededError(RuntimeError):
    """A later start of the server has taken this process over."""


@dataclass(frozen=True)
class Crew:
    """The processes of one data directory.

    `name` is the same at each start of its server, and is their namespace in Ray. `incarnation` counts the starts.
    `kind` names code and settings: only processes of the same kind are taken over. They live `lease_s` after the last
    sign of the server.
    """

    name: str
    incarnation: int
    kind: str
    lease_s: float


class ServerLease:
    """That of one process. Any thread may call."""

    def __init__(
        self,
        incarnation: int,
        lease_s: float,
        *,
        on_end: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_end` is called before the process ends by itself."""
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._clock = clock
        self._incarnation = incarnation
        self._ends_at = clock() + FIRST_LEASE_S
        self._on_end = on_end

    def watch(self) -> None:
        """Ends this process when the lease is over; a thread sees to it."""
        threading.Thread(target=self._watch, name="mint-lease", daemon=True).start()

    def renew(self, incarnation: int) -> bool:
        """Takes a sign of life of a server: with a higher number, its orders alone are taken from now on; False if the
        number is lower than that of another one."""
        with self._lock:
            if incarnation < self._incarnation:
                return False
            self._incarnation = incarnation
            self._ends_at = self._clock() + self._lease_s
            return True

    def require(self, incarnation: int) -> None:
        """Checks that orders of this server are to be taken.

        Raises:
            SupersededError: another start of the server has this process.
        """
        with self._lock:
            if incarnation != self._incarnation:
                raise SupersededError(f"start {self._incarnation} of the server has this process, not {incarnation}")

    @property
    def is_over(self) -> bool:
        """Whether nobody has renewed it in time."""
        return self._clock() > self._ends_at

    def _watch(self) -> None:
        while not self.is_over:
            time.sleep(1.0)
        log.warning("no server has been heard of for %.0f s: this process ends", self._lease_s)
        self._on_end()
        os._exit(ORPHANED_STATUS)

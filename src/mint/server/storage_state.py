"""Whether a data directory can be written: one state for its journal and all of its files.

A write that fails (disk full, I/O error, read-only, no inode, no descriptor, a database that stays locked) puts the
storage out of work, with the time and the reason. Until it works again, new training requests are refused with that
reason, and what was accepted waits. A thread of its own tries to write, after pauses that grow, and asks for as many
bytes as the largest write that failed: so a step is not run again and again for a snapshot that finds no space. Then
everything goes on by itself.

Knows no rows, no files by name, and no requests.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from mint.errors import JournalError

log = logging.getLogger("mint.storage")

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0
RELAPSE_S = 30.0
"""A fault that comes back sooner goes on where the pauses were: the disk is still nearly full."""

REMIND_S = 60.0
"""How often the log repeats that the storage does not work."""

LEAST_FREE_BYTES = 1 << 20
START_REMEDY = "Free disk space, or choose another data directory (--data-dir, MINT_HOME), and start again"
DAMAGE_REMEDY = (
    "The operator restores a backup, or lets the models that have stopped go on (mint recover): docs/operations.md"
)
REMEDY = "Free disk space, or see the server's log; requests are accepted again by themselves"


@dataclass(frozen=True)
class StorageProblem:
    """Since when (seconds since the epoch) nothing can be written, what was to be written, and why it failed."""

    since: float
    what: str
    reason: str

    def __str__(self) -> str:
        moment = datetime.fromtimestamp(self.since, UTC).isoformat(timespec="seconds")
        return f"storage has not been working since {moment}: {self.what} cannot be written ({self.reason})"


class StorageState:
    """The state of one data directory. Any thread may call."""

    def __init__(self, probe: Callable[[int], None]) -> None:
        """`probe(size_bytes)` writes to the journal and to a file of that size, or raises OSError or JournalError."""
        self._probe = probe
        self._changed = threading.Condition()
        self.problem: StorageProblem | None = None
        """What is wrong; None while the storage works. For others to read."""
        self.damage: str | None = None
        """What is wrong with the journal's file, as it was found first; None while no damage was found."""
        self._free_bytes = LEAST_FREE_BYTES
        self._pause_s = FIRST_PAUSE_S
        self._recovered_at = float("-inf")
        self._is_closed = False
        self.on_recovery: Callable[[], None] = lambda: None
        """Called when the storage works again, on the thread that has tried it."""

    def require_working(self) -> None:
        """Refuses to go on while the storage does not work.

        Raises:
            JournalError: it does not.
        """
        problem = self.problem  # once: another thread may clear it
        if problem is not None:
            raise JournalError(str(problem), remedy=REMEDY)

    @contextmanager
    def writing(self, what: str, size_bytes: int = 0) -> Generator[None]:
        """A block that writes files of `size_bytes` together; its OSError puts the storage out of work.

        Raises:
            JournalError: the block raised an OSError.
        """
        try:
            yield
        except OSError as error:
            self.note_failure(what, error, size_bytes)
            raise JournalError(f"{what} cannot be written: {reason_of(error)}", remedy=REMEDY) from error

    def note_failure(self, what: str, error: Exception, size_bytes: int = 0) -> None:
        """Puts the storage out of work, until it can be written again."""
        with self._changed:
            self._free_bytes = max(self._free_bytes, size_bytes)
            if self.problem is not None or self._is_closed:
                return
            if time.monotonic() - self._recovered_at > RELAPSE_S:
                self._pause_s = FIRST_PAUSE_S
            self.problem = StorageProblem(time.time(), what, reason_of(error))
            threading.Thread(target=self._try_again, name="mint-storage", daemon=True).start()

    def note_damage(self, reason: str) -> None:
        """Remembers that a page or a row of the journal is damaged. What does not need it goes on."""
        if self.damage is None:
            self.damage = f"the journal is damaged ({reason}); what needs the damaged part has stopped"
            log.error("%s. %s", self.damage, DAMAGE_REMEDY)

    def keep_trying(self, what: str, write: Callable[[], None], size_bytes: int = 0) -> None:
        """Calls `write` until the storage lets it pass, and waits while the storage does not work.

        Raises:
            JournalError: this was closed before.
        """
        while True:
            try:
                with self.writing(what, size_bytes):
                    return write()
            except JournalError:
                if not self.wait_until_works():
                    raise

    def wait_until_works(self) -> bool:
        """Returns True once the storage works, or False once this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.problem is None or self._is_closed)
            return not self._is_closed

    def close(self) -> None:
        """Lets all go that wait."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _try_again(self) -> None:
        remind_at = float("-inf")  # at once, unless a process that cannot start has closed this
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closed, self._pause_s):
                    return
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
                free_bytes = self._free_bytes
            if time.monotonic() >= remind_at:
                log.error("%s; training waits, sampling goes on", self.problem)
                remind_at = time.monotonic() + REMIND_S
            try:
                self._probe(free_bytes)
                break
            except (OSError, JournalError) as error:
                log.debug("the storage does not work yet: %s", error)
            except Exception:  # the boundary: if this thread ended, nothing would ever go on
                log.exception("trying the storage failed")
        with self._changed:
            problem, self.problem = self.problem, None
            self._free_bytes = LEAST_FREE_BYTES
            self._recovered_at = time.monotonic()
            self._changed.notify_all()
        if problem is not None:
            log.warning("storage works again after %.1f s", time.time() - problem.since)
        self.on_recovery()


@contextmanager
def starting() -> Generator[None]:
    """A block without which a service cannot start: nothing goes on by itself after an error of its storage.

    Raises:
        JournalError: the block raised one; it says what to do before the next start.
    """
    try:
        yield
    except JournalError as error:
        if error.remedy != REMEDY:
            raise
        raise JournalError(error.message, remedy=START_REMEDY) from error


def reason_of(error: Exception) -> str:
    """Why a write failed, without a path; the texts of SQLite's errors have none."""
    if not isinstance(error, OSError):
        return str(error)
    return type(error).__name__ if error.errno is None else os.strerror(error.errno)

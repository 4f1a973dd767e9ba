"""Whether the service works, as opposed to being there: the journal can be written, and requests are being run.

Answers from a look that is at most a second old, so that asking costs nothing however often it is done.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass

from mint.errors import JournalError
from mint.server.service.service import Service

STUCK_AFTER_S = 600.0
"""Long, because a training step of a large model takes its time; the worker answers between two requests."""

LOOK_AGE_S = 1.0
WRITE_PATIENCE_S = 5.0


@dataclass(frozen=True)
class Verdict:
    """`problems` in words; ready where there are none."""

    problems: tuple[str, ...]

    @property
    def is_ready(self) -> bool:
        """Whether requests can be sent here."""
        return not self.problems


class Readiness:
    """Looks after one service. One event loop at a time."""

    def __init__(self, service: Service, *, stuck_after_s: float = STUCK_AFTER_S) -> None:
        """The worker counts as stuck once it has not come to an errand for `stuck_after_s`."""
        self._service = service
        self._stuck_after_s = stuck_after_s
        self._lock = threading.Lock()
        self._asked_at: float | None = None
        self._looked_at = float("-inf")
        self._write: asyncio.Future[None] | None = None
        self._verdict = Verdict(())

    async def look(self) -> Verdict:
        """The verdict of now, or of a second ago."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_AGE_S:
            self._looked_at = now
            found = (self._of_worker(now), await self._of_journal())
            self._verdict = Verdict(tuple(problem for problem in found if problem is not None))
        return self._verdict

    def _of_worker(self, now: float) -> str | None:
        if not self._service.is_working:
            return "the engine's thread has ended"
        with self._lock:
            asked_at = self._asked_at
            if asked_at is None:
                self._asked_at = now
        if asked_at is None:
            self._service.run_soon(self._answered)
        elif now - asked_at > self._stuck_after_s:
            return f"the engine has been busy with one request for {now - asked_at:.0f} s"
        return None

    def _answered(self) -> None:
        with self._lock:
            self._asked_at = None

    async def _of_journal(self) -> str | None:
        # one write at a time: a disk that hangs must not take a thread with every look
        if self._write is None or self._write.done():
            self._write = asyncio.ensure_future(asyncio.to_thread(self._service.journal.database.probe))
        try:
            await asyncio.wait_for(asyncio.shield(self._write), WRITE_PATIENCE_S)
        except TimeoutError:
            return f"the journal could not be written within {WRITE_PATIENCE_S:g} s"
        except JournalError:
            return "the journal cannot be written"
        return None

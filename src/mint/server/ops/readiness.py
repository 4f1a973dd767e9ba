"""Whether the service works: the journal can be written, and requests are being run.

Repeats a check that is at most a second old, so that asking often costs nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from mint.errors import DamagedDataError, JournalError
from mint.server.mirror.mirror import Mirror
from mint.server.service.service import Service

STUCK_AFTER_S = 600.0
"""Long, because a training step of a large model takes its time; the worker answers between two requests."""

LANES: tuple[Literal["training", "sampling"], ...] = ("training", "sampling")
"""An engine with one lane has one thread for both."""

CHECK_AGE_S = 1.0
WRITE_TIMEOUT_S = 5.0


class Readiness:
    """Checks one service. One event loop at a time."""

    def __init__(self, service: Service, *, stuck_after_s: float = STUCK_AFTER_S, mirror: Mirror | None = None) -> None:
        """The worker counts as stuck if one of its lanes has not come to a call between two requests for
        `stuck_after_s`."""
        self._service = service
        self._mirror = mirror
        self._stuck_after_s = stuck_after_s
        self._lock = threading.Lock()
        self._asked_at: dict[str, float] = {}  # those that have not replied yet
        self._checked_at = float("-inf")
        self._write: asyncio.Future[None] | None = None
        self._problems: tuple[str, ...] = ()

    async def problems(self) -> tuple[str, ...]:
        """What is wrong, in words, now or a second ago; empty if the service is ready."""
        now = time.monotonic()
        storage = self._service.storage_problem
        if storage is not None:  # known without trying, and the storage tries by itself
            self._checked_at = float("-inf")
            worker = self._worker_problem(now)
            return (str(storage),) if worker is None else (worker, str(storage))
        if now - self._checked_at >= CHECK_AGE_S:
            self._checked_at = now
            found = (self._worker_problem(now), await self._journal_problem(), self._service.journal_damage)
            self._problems = tuple(problem for problem in found if problem is not None)
        return self._problems

    @property
    def cluster(self) -> Mapping[str, Any]:
        """Numbers of the processes that train and sample; empty without a cluster."""
        return self._service.cluster_state

    @property
    def mirror(self) -> Mapping[str, Any]:
        """How far behind the mirror is, and what was sent; empty without one."""
        if self._mirror is None:
            return {}
        state = self._mirror.state
        return {
            "lag_s": round(state.lag_s, 1),
            "states": state.states,
            "sent_bytes": state.sent_bytes,
            "works": state.problem is None,
        }

    async def warnings(self) -> tuple[str, ...]:
        """What will be wrong soon unless somebody sees to it; the service is ready."""
        disk = await asyncio.to_thread(self._service.disk.warning)
        mirror = None if self._mirror is None else self._mirror.state.warning
        return tuple(warning for warning in (disk, mirror) if warning is not None)

    def _worker_problem(self, now: float) -> str | None:
        if not self._service.is_working:
            return "the engine's thread has ended"
        with self._lock:
            free = [lane for lane in LANES if lane not in self._asked_at]
            self._asked_at |= dict.fromkeys(free, now)
            busy_s = now - min(self._asked_at.values())
        for lane in free:
            self._service.call_soon(partial(self._note_reply, lane), lane=lane)
        if busy_s > self._stuck_after_s:
            return f"the engine has been busy with one request for {busy_s:.0f} s"
        return None

    def _note_reply(self, lane: str) -> None:
        with self._lock:
            del self._asked_at[lane]

    async def _journal_problem(self) -> str | None:
        # one write at a time: while a disk hangs, no further check may block a thread
        if self._write is None or self._write.done():
            self._write = asyncio.ensure_future(asyncio.to_thread(self._service.probe_storage))
        try:
            await asyncio.wait_for(asyncio.shield(self._write), WRITE_TIMEOUT_S)
        except TimeoutError:
            return f"the journal could not be written within {WRITE_TIMEOUT_S:g} s"
        except (JournalError, DamagedDataError):
            return "the journal cannot be written"
        return None

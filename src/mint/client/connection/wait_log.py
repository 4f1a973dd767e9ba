"""The log lines of a long wait: which result is waited for, and why. One line now and then for a whole session."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger("mint.client")

LOG_INTERVAL_S = 60.0


class WaitLog:
    """The results that a session waits for. At most one line every `LOG_INTERVAL_S`, however many there are."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self.has_logged = False
        """Whether a line was logged since the server last answered."""
        self._clock = clock
        self._since: dict[str, float] = {}
        self._logged_at = -LOG_INTERVAL_S

    def start(self, request_id: str) -> None:
        """The wait for a result begins."""
        self._since.setdefault(request_id, self._clock())

    def stop(self, request_id: str) -> None:
        """The wait for a result ends."""
        self._since.pop(request_id, None)

    def try_again(self, request_id: str, answer: Mapping[str, Any]) -> None:
        """The server has no result yet. Only the oldest of the results is logged, once its wait is long."""
        waited_s = self._clock() - self._since.get(request_id, self._clock())
        if waited_s >= LOG_INTERVAL_S and request_id == next(iter(self._since), None):
            count = len(self._since)
            several = f" ({count} results are waited for; this is the oldest)" if count > 1 else ""
            self._write(f"waiting for {request_id} since {waited_s:.0f} s{several}: {describe(answer)}")

    def unreachable(self, problem: str, pause_s: float) -> None:
        """The server does not answer, or cannot take the request now."""
        self._write(f"{problem}; trying again in {pause_s:.1f} s")

    def answered(self) -> None:
        """The server answers: the next problem is logged at once, unless results are still waited for."""
        if not self._since:
            self._logged_at = -LOG_INTERVAL_S
            self.has_logged = False

    def _write(self, line: str) -> None:
        now = self._clock()
        if now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            self.has_logged = True
            log.warning("%s", line)
        else:
            log.debug("%s", line)


def describe(answer: Mapping[str, Any]) -> str:
    """The state of the queue, from the body of a 408. Nothing is said twice: mint's reason has place and time in it."""
    reason = str(answer.get("queue_state_reason") or "")
    parts = [f"queue {answer.get('queue_state') or 'state unknown'}", *([reason] if reason else [])]
    position, wait_s = answer.get("queue_position"), answer.get("estimated_wait_s")
    if position is not None and " before it" not in reason:
        parts.append(f"{position} requests before it")
    if isinstance(wait_s, int | float) and wait_s >= 1 and "expected in about" not in reason:
        parts.append(f"about {wait_s:.0f} s to go")
    return ", ".join(parts)

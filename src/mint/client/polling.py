"""When to ask again, and what people are told meanwhile.

Pauses grow and are drawn at random, so that many clients of a server that comes back do not all come at once. Whoever
waits for long is told what for and why, in one line now and then for a whole session. Knows no HTTP library.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger("mint.client")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0
LONGEST_RETRY_AFTER_S = 60.0
TOLD_EVERY_S = 60.0


class Pauses:
    """The pauses of one request that is tried again and again."""

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        """`draw` gives numbers in [0, 1)."""
        self._draw = draw
        self._longest_s = FIRST_PAUSE_S

    def next_s(self, retry_after: str | None = None) -> float:
        """How long to wait now: between half and all of a time that doubles, and no less than the server has asked."""
        pause_s = self._longest_s * (0.5 + self._draw() / 2)
        self._longest_s = min(2 * self._longest_s, LONGEST_PAUSE_S)
        return max(pause_s, min(_seconds(retry_after), LONGEST_RETRY_AFTER_S))


def _seconds(retry_after: str | None) -> float:
    """The header in seconds; its other form, a date, counts as none."""
    text = (retry_after or "").strip()
    return float(text) if text.isascii() and text.isdigit() else 0.0


class WaitingRoom:
    """What a session waits for. At most one line every `TOLD_EVERY_S`, however many requests there are."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._since: dict[str, float] = {}
        self._told_at = -TOLD_EVERY_S

    def enter(self, request_id: str) -> None:
        """Somebody waits for this from now on."""
        self._since.setdefault(request_id, self._clock())

    def leave(self, request_id: str) -> None:
        """Nobody does any more."""
        self._since.pop(request_id, None)

    def not_yet(self, request_id: str, answer: Mapping[str, Any]) -> None:
        """The server has said "ask again": tells about it where that has been going on for long."""
        waited_s = self._clock() - self._since.get(request_id, self._clock())
        if waited_s >= TOLD_EVERY_S and request_id == next(iter(self._since), None):
            count = len(self._since)
            several = f" ({count} results are waited for; this is the oldest)" if count > 1 else ""
            self._tell(f"waiting for {request_id} since {waited_s:.0f} s{several}: {describe(answer)}")

    def unreachable(self, problem: str, pause_s: float) -> None:
        """The server does not answer, or not now."""
        self._tell(f"{problem}; trying again in {pause_s:.1f} s")

    def answered(self) -> None:
        """The server answers again: the next trouble is told about at once."""
        if not self._since:
            self._told_at = -TOLD_EVERY_S

    def _tell(self, line: str) -> None:
        now = self._clock()
        if now - self._told_at >= TOLD_EVERY_S:
            self._told_at = now
            log.warning("%s", line)
        else:
            log.debug("%s", line)


def describe(answer: Mapping[str, Any]) -> str:
    """The queue as the body of a 408 tells about it."""
    parts = [f"queue {answer.get('queue_state') or 'state unknown'}"]
    if answer.get("queue_state_reason"):
        parts.append(str(answer["queue_state_reason"]))
    if answer.get("queue_position") is not None:
        parts.append(f"{answer['queue_position']} requests before it")
    if isinstance(answer.get("estimated_wait_s"), int | float):
        parts.append(f"about {answer['estimated_wait_s']:.0f} s to go")
    return ", ".join(parts)

"""How long to wait before a request is sent again.

Pauses grow and are drawn at random, so that the many clients of a server that comes back do not all come at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0
LONGEST_RETRY_AFTER_S = 60.0
"""A proxy's longer `retry-after` does not stop a run for hours."""


class Backoff:
    """The pauses of one request that is sent again and again."""

    def __init__(self, draw: Callable[[], float] = random.random) -> None:
        """`draw` gives numbers in [0, 1)."""
        self._draw = draw
        self._longest_s = FIRST_PAUSE_S

    def next_s(self, retry_after: str | None = None) -> float:
        """Seconds until the next try: between half and all of a time that doubles, and at least what the server asks
        for in its `retry-after` header."""
        pause_s = self._longest_s * (0.5 + self._draw() / 2)
        self._longest_s = min(2 * self._longest_s, LONGEST_PAUSE_S)
        return max(pause_s, min(_seconds(retry_after), LONGEST_RETRY_AFTER_S))


def _seconds(retry_after: str | None) -> float:
    """The header in seconds; its other form, a date, counts as 0."""
    text = (retry_after or "").strip()
    return float(text) if text.isascii() and text.isdigit() else 0.0

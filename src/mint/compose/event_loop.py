"""The event loop of a served process: it takes a few sockets in one turn, so that a burst of requests delays nobody.

asyncio reads all sockets that are ready before it looks at its timers and at what other threads have done. When a
thousand clients ask at once, that one turn takes a second.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import deque

SOCKETS_IN_A_TURN = 16


class _FewAtOnce(selectors.DefaultSelector):
    """Hands out what is ready in small portions, and asks the system again only when all of it is handed out."""

    def __init__(self) -> None:
        super().__init__()
        self._ready: deque[tuple[selectors.SelectorKey, int]] = deque()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Up to `SOCKETS_IN_A_TURN` of the sockets that are ready."""
        if not self._ready:
            self._ready.extend(super().select(timeout))
        portion: list[tuple[selectors.SelectorKey, int]] = []
        watched = self.get_map()
        while self._ready and len(portion) < SOCKETS_IN_A_TURN:
            key, events = self._ready.popleft()
            if watched.get(key.fd) is key:  # otherwise it was closed meanwhile, or waits for something else
                portion.append((key, events))
        return portion


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop of asyncio that waits in this way."""
    return asyncio.SelectorEventLoop(_FewAtOnce())

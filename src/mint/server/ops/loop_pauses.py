"""Measures the pauses of the server's event loop, and logs what ran during the long ones.

A timer on the loop fires every `BEAT_S`; how late it comes is a pause. A pause has two causes: something on the loop
takes time, or another thread holds the interpreter's lock in one long call. A second thread looks at the stacks while a
long pause lasts; the log then names functions and lines, no values. Knows no metrics and no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType

log = logging.getLogger("mint.loop")

BEAT_S = 0.02
WATCH_S = 0.1
LOGGED_S = 0.25
"""Pauses from here on are logged."""

WORST_OVER_S = 60.0
"""The window of `worst_s`."""

FRAMES = 4


class LoopPauses:
    """Watches one event loop, from `start` until it is closed. The other methods may be called from any thread."""

    def __init__(self, observe: Callable[[float], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        """`observe` is called with each pause, in seconds, on the loop; `clock` gives monotonic seconds."""
        self._observe = observe
        self._clock = clock
        self._lock = threading.Lock()
        self._worst: deque[tuple[float, float]] = deque()  # (when, seconds), each longer than all after it
        self._loop_thread = 0
        self._due_at = float("inf")
        self._seen = ""
        self._is_over = threading.Event()

    def start(self) -> None:
        """Watches the running loop. Call on it."""
        self._loop_thread = threading.get_ident()
        threading.Thread(target=self._watch, name="mint-loop-watch", daemon=True).start()
        self._schedule(asyncio.get_running_loop())

    def stop(self) -> None:
        """Ends the thread that looks at stacks."""
        self._is_over.set()

    def worst_s(self) -> float:
        """The longest pause of the last `WORST_OVER_S`."""
        with self._lock:
            self._forget_old()
            return self._worst[0][1] if self._worst else 0.0

    def note(self, pause_s: float) -> None:
        """Counts a pause that ends now."""
        with self._lock:
            while self._worst and self._worst[-1][1] <= pause_s:
                self._worst.pop()
            self._worst.append((self._clock(), pause_s))
            self._forget_old()
        self._observe(pause_s)

    def _forget_old(self) -> None:
        while self._worst and self._worst[0][0] < self._clock() - WORST_OVER_S:
            self._worst.popleft()

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_at = self._clock() + BEAT_S
        loop.call_later(BEAT_S, self._beat, loop)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        pause_s = max(0.0, self._clock() - self._due_at)
        if pause_s >= LOGGED_S:
            # while one call holds the interpreter's lock nobody can look; its thread has hardly moved on since
            what = self._seen or self._stacks()
            log.warning("the event loop did nothing for %.0f ms; running: %s", pause_s * 1000, what)
        self._seen = ""
        self.note(pause_s)
        if not self._is_over.is_set():
            self._schedule(loop)

    def _watch(self) -> None:
        while not self._is_over.wait(WATCH_S):
            if not self._seen and self._clock() - self._due_at >= LOGGED_S:
                self._seen = self._stacks()

    def _stacks(self) -> str:
        """The innermost frames of the loop and of the server's other threads that are not waiting for something."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        found = {}
        for identity, frame in frames.items():
            name = "event loop" if identity == self._loop_thread else names.get(identity, "")
            if identity != threading.get_ident() and name and not _waits(frame):
                found[name] = _described(frame)
        return "; ".join(f"{name}: {stack}" for name, stack in found.items()) or "(nothing that could be seen)"


def _waits(frame: FrameType) -> bool:
    """Whether a thread waits for work, a lock or a socket, as far as the module of its innermost frame tells."""
    return Path(frame.f_code.co_filename).stem in {"threading", "selectors", "thread", "queue", "socket", "subprocess"}


def _described(frame: FrameType | None) -> str:
    parts = []
    while frame is not None and len(parts) < FRAMES:
        parts.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(parts)

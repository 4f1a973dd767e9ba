"""The thread of a lane: it takes one step of the engine after another, and runs calls of other threads between two."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class LaneThread:
    """One thread with its queue of calls. The loop that it runs calls `run_calls`, and ends once `stopping` is set."""

    def __init__(self, name: str, loop: Callable[[], None], *, wake: Callable[[], None]) -> None:
        """`wake` ends a sleep of the loop."""
        self._wake = wake
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=loop, name=name, daemon=True)
        self.stopping = threading.Event()

    @property
    def is_alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether this is the thread that asks."""
        return threading.current_thread() is self._thread

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns after the step that is running."""
        self.stopping.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join()
        self.run_calls()  # those that came too late for the loop: among other things they delete files

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Runs something on the thread, between two steps."""
        self._calls.put(callback)
        self._wake()

    def call(self, callback: Callable[[], None]) -> None:
        """Runs something on the thread, between two steps, and returns when it is done or has failed; the thread's loop
        sees its error.

        The lane that samples must not wait so for the one that trains, which may be waiting for it.
        """
        if self.is_current:
            callback()
            return
        done = threading.Event()

        def run() -> None:
            try:
                callback()
            finally:
                done.set()

        self.call_soon(run)
        done.wait()

    def run_calls(self) -> None:
        """Runs the calls that wait. For the thread itself, and once it has ended."""
        while not self._calls.empty():
            self._calls.get()()

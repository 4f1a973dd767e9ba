"""A process under supervision: started, heard of, signalled, and started again."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from functools import cache
from multiprocessing.context import ForkServerContext
from typing import Any

from mint.chaos.process import Target

PRELOADED = ["mint.chaos.preloaded"]

_ASKING = threading.Lock()
"""Held while a process is started or its exit code is read. A start reads the codes of all others, too. A code can be
read once: of two threads that read it at once, one finds the pipe at its end, and multiprocessing gives it 255."""

END_POLL_S = 0.02


@cache
def forks() -> ForkServerContext:
    """Starts processes as forks of one that has imported everything and runs no thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class SupervisedProcess:
    """One life of a server or program."""

    def __init__(self, target: Target, life: Any) -> None:
        self._here, there = forks().Pipe()
        self._process = forks().Process(target=target, args=(life, there), daemon=True)
        self.started_at = time.monotonic()
        self.up_at: float | None = None
        with _ASKING:
            self._process.start()
        there.close()

    @property
    def exit_code(self) -> int | None:
        """None while it lives; minus the signal that ended it."""
        with _ASKING:
            return self._process.exitcode

    def message(self) -> tuple[str, Any] | None:
        """What it has said since the last time, if anything."""
        try:
            return self._here.recv() if self._here.poll() else None
        except (EOFError, OSError):
            return None

    def tell(self, text: str) -> None:
        """Says something to it, if it still listens."""
        with suppress(OSError):
            self._here.send(text)

    def signal(self, number: int) -> None:
        """Sends a signal, if it lives."""
        if self._process.pid is not None and self.exit_code is None:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(self._process.pid, number)

    def end(self, patience_s: float) -> bool:
        """Waits for its end, and kills it after `patience_s` seconds; whether it has ended by itself."""
        ended = self._has_ended_within(patience_s)
        if not ended:
            self.signal(signal.SIGKILL)
            self._has_ended_within(math.inf)
        self._here.close()
        return ended

    def _has_ended_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.exit_code is None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(END_POLL_S)
        return True

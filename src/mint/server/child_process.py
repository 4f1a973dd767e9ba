"""A Python process beside the server that takes messages from a socket and answers them, one after another.

It runs a module of mint; the first argument is the number of its socket. The first thing that it sends is `READY`,
once its imports are done. It ends with the server, because its socket is closed then. Knows nothing of what it does.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

READY = b"ready"
START_S = 120.0
"""How long the imports may take on a machine that is busy."""


class ChildProcess:
    """One such process, started when it is needed, and again when it has ended. One thread at a time may ask it."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        self._arguments = arguments
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    @property
    def process_id(self) -> int | None:
        """Its id; None while there is none."""
        return None if self._child is None else self._child.pid

    def start(self) -> Connection:
        """Starts the process, unless it has been started; the socket to it.

        Raises:
            EOFError, OSError: it does not start.
        """
        with self._lock:
            if self._connection is None:
                self._connection = self._opened()
            return self._connection

    def ask(
        self, question: Sequence[bytes], answers: int, *, limit_s: float | None = None, max_bytes: int | None = None
    ) -> list[bytes] | None:
        """Sends messages, and receives that many; None if the first of them did not come in `limit_s`.

        After None and after an error, the state of the process is unknown: `close` it.

        Raises:
            EOFError, OSError: the process has ended, or an answer has more than `max_bytes`.
        """
        connection = self.start()
        for message in question:
            connection.send_bytes(message)
        if limit_s is not None and not connection.poll(limit_s):
            return None
        return [connection.recv_bytes(max_bytes) for _ in range(answers)]

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            if self._child is not None:
                self._child.kill()
                self._child.wait()
            self._connection = self._child = None

    def _opened(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", self._module, str(theirs.fileno()), *self._arguments],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # an interrupt from the terminal is for the server
                )
            except OSError:
                ours.close()
                raise
        connection = Connection(ours.detach())
        if not connection.poll(START_S) or connection.recv_bytes() != READY:
            connection.close()
            raise EOFError(f"{self._module} did not start")
        return connection

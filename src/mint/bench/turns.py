"""A worker process that computes only when it is asked to: JSON lines over stdin and stdout.

The worker says `{"event": "ready"}` by itself, then answers each command with one line. Between two commands it is
blocked on a read. Knows nothing of what a step is.
"""

from __future__ import annotations

import json
import select
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mint.errors import RequestFailedError

LOG_LINES_SHOWN = 15


class Worker:
    """One running worker; use it as a context manager, so that it never outlives the benchmark.

    `environment` is added to the inherited one, and the variables in `without` are removed from it, both by env(1).
    What the worker prints besides its answers goes to `log_path`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_path: Path,
        environment: Mapping[str, str],
        without: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.log_path = log_path
        self.command = [
            "env",
            *(part for variable in without for part in ("-u", variable)),
            *(f"{variable}={value}" for variable, value in environment.items()),
            *command,
        ]

    def __enter__(self) -> Self:
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def ask(self, command: str, *, answer: str, timeout_s: float) -> dict[str, Any]:
        """Sends a command and waits for its answer.

        Raises:
            RequestFailedError: the worker died, took longer than `timeout_s`, or answered with another event.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"command": command}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failed("ended too early") from error
        return self.hear(answer, timeout_s=timeout_s)

    def hear(self, event: str, *, timeout_s: float) -> dict[str, Any]:
        """Waits for the next line, which must be of this event.

        Raises:
            RequestFailedError: as `ask`.
        """
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        if not readable:
            raise self._failed(f"gave no answer within {timeout_s:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise self._failed(f"ended with exit code {self.process.wait()}")
        answer = json.loads(line)
        if answer.get("event") != event:
            raise self._failed(f"answered {line.strip()!r} where {event!r} belongs")
        return answer

    @property
    def peak_rss_bytes(self) -> int:
        """VmHWM: the most memory that the worker has held at once so far; 0 where the kernel does not say."""
        try:
            lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)

    def _failed(self, what: str) -> RequestFailedError:
        tail = "\n".join(self.log_path.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
        return RequestFailedError(
            f"the {self.name} worker {what}; the end of its log:\n{tail}", remedy=f"All of it is in {self.log_path}"
        )

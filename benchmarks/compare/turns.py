"""Worker processes that compute only when they are asked to, one after another: JSON lines over stdin and stdout.

A worker says `{"event": "ready"}` by itself, then answers each command with one line. Between two commands it is
blocked on a read. Knows nothing of what a step is.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mint.errors import RequestFailedError

ROOT = Path(__file__).resolve().parents[2]
"""The checkout, from which `python -m benchmarks.…` finds the workers."""

LOG_LINES_SHOWN = 15
START_TIMEOUT_S = 600.0
STEP_TIMEOUT_S = 1800.0
END_S = 30.0
"""How long a worker that is done may take to end by itself, and with it the server that it has started."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """All answers of one contender: `ready` and `finished` once, `steps` one for each timed step.

    `failure` says why it could not take part to the end; of such a one only the name is known besides. `first_s` is how
    long its very first step took.
    """

    name: str
    ready: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    finished: Mapping[str, Any]
    peak_rss_bytes: int
    failure: str = ""
    first_s: float = 0.0

    def column(self, key: str) -> list[float]:
        """One figure of every timed step, in order."""
        return [float(step[key]) for step in self.steps]


class Worker:
    """One running worker; use it as a context manager, so that it never outlives the benchmark.

    `environment` is added to the inherited one, and the variables in `without` are removed from it, both by env(1).
    What the worker prints besides its answers goes to `log_path`. If it `may_fail`, the others go on without it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_path: Path,
        environment: Mapping[str, str],
        without: Sequence[str] = (),
        may_fail: bool = False,
    ) -> None:
        self.name = name
        self.may_fail = may_fail
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
                self.command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=END_S if kind is None else 0)  # at the end of its stdin a worker ends
        with suppress(ProcessLookupError):
            os.killpg(
                self.process.pid, signal.SIGKILL
            )  # also what it has started: servers outlive those who forget them
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
        """VmHWM: the most memory that the worker has held at once so far; 0 once it has ended, or where the kernel
        does not say."""
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


def take_turns(workers: Sequence[Worker], *, warm_ups: int, repeats: int, say: Say) -> list[Measured]:
    """Starts all workers, then gives each its turn, round by round; every second round goes in the opposite order.

    The first `warm_ups` rounds are not among the steps that are returned.

    Raises:
        RequestFailedError: a worker failed that may not.
    """
    answers: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
    failures: dict[str, str] = {}

    def attempt(worker: Worker, call: Callable[[], dict[str, Any]]) -> None:
        if worker.name in failures:
            return
        try:
            answers[worker.name].append(call())
        except RequestFailedError as error:
            if not worker.may_fail:
                raise
            failures[worker.name] = str(error)
            say(f"{worker.name} is out: {error}")

    with ExitStack() as running:
        for worker in workers:  # one after the other, so that nobody loads while another one does
            say(f"starting {worker.name}")
            running.enter_context(worker)
            attempt(worker, partial(worker.hear, "ready", timeout_s=START_TIMEOUT_S))
        for turn in range(warm_ups + repeats):
            for worker in workers if turn % 2 == 0 else reversed(workers):
                attempt(worker, partial(worker.ask, "step", answer="step", timeout_s=STEP_TIMEOUT_S))
            label = f"step {turn - warm_ups + 1} of {repeats}" if turn >= warm_ups else "warm-up"
            latest = {name: given[-1] for name, given in answers.items() if name not in failures}
            say(f"{label}: " + ", ".join(f"{name} {answer['wall_s']:.3f} s" for name, answer in latest.items()))
        peaks = {worker.name: worker.peak_rss_bytes for worker in workers}
        for worker in workers:
            attempt(worker, partial(worker.ask, "finish", answer="finished", timeout_s=START_TIMEOUT_S))
    return [_measured(name, given, warm_ups, peaks[name], failures.get(name, "")) for name, given in answers.items()]


def _measured(
    name: str, answers: Sequence[Mapping[str, Any]], warm_ups: int, peak_rss_bytes: int, failure: str
) -> Measured:
    if failure:
        return Measured(name, {}, (), {}, peak_rss_bytes, failure)
    ready, *steps, finished = answers
    return Measured(name, ready, steps[warm_ups:], finished, peak_rss_bytes, first_s=steps[0]["wall_s"])

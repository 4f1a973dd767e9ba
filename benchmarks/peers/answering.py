"""The worker's side of `benchmarks.compare.turns`: answers each command with one JSON line, and times every step.

Imports only the standard library, so that a peer in an environment without mint can use it. Knows nothing of what a
step is.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TextIO


class Side(Protocol):
    """What one contender does. Every answer is a dict for JSON."""

    def ready(self) -> dict[str, Any]:
        """What was loaded; at least `dtype` and `threads`."""
        ...

    def step(self, index: int) -> dict[str, Any]:
        """Does the step `index` and says what it made, at least `tokens`: how many of them. Only this is timed."""
        ...

    def finished(self) -> dict[str, Any]:
        """What holds at the end; at least `versions`."""
        ...


def open_answers() -> TextIO:
    """The real stdout, for answers only; whatever else is printed goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


def read_spec() -> dict[str, Any]:
    """The spec whose path is the first argument. A `memory_limit_bytes` in it bounds this process from now on."""
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    if "memory_limit_bytes" in spec:
        resource.setrlimit(resource.RLIMIT_AS, (spec["memory_limit_bytes"],) * 2)
    return spec


def answer_turns(side: Side, answers: TextIO, cpu_seconds: Callable[[], float] = time.process_time) -> None:
    """One step for each command, until `finish` or the end of stdin; between two of them this process reads.

    `cpu_seconds` gives the CPU seconds so far of all processes that take part.
    """
    print(json.dumps({"event": "ready", **side.ready()}), file=answers)
    index = 0
    while True:
        idle_from_s = cpu_seconds()
        command = json.loads(sys.stdin.readline() or '{"command": "finish"}')["command"]
        started_s, cpu_started_s = time.perf_counter(), cpu_seconds()
        if command == "finish":
            break
        made = side.step(index)
        index += 1
        times = {
            "wall_s": time.perf_counter() - started_s,
            "cpu_s": cpu_seconds() - cpu_started_s,
            "idle_cpu_s": cpu_started_s - idle_from_s,
        }
        print(json.dumps({"event": "step", **times, **made}), file=answers)
    print(json.dumps({"event": "finished", **side.finished()}), file=answers)

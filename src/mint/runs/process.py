"""The process of a run in `process.json`: which one it is, how it ended, and whether it is still alive.

Checks processes of this machine; for another machine it only sees when the run last wrote a file.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal, get_args

from mint.runs.interrupt import RunInterrupted
from mint.runs.json_lines import encode_line, replace_file

Outcome = Literal["finished", "stopped", "failed"]
State = Literal["running", "finished", "stopped", "failed", "died"]

PROCESS = "process.json"
SILENT_S = 600.0
"""A run on another machine that has written nothing for this long counts as died."""
STALE_S = 300.0
STALE_STEPS = 10
"""A run whose process lives is stale if it has written nothing for `STALE_S`, and for as long as `STALE_STEPS` of its
slowest recent step took."""

CLOCK_SLACK_S = 5.0
LONGEST_ERROR = 2_000
INTERRUPTED = "interrupted"
"""Begins the recorded error of a run that a person stopped; `by Ctrl-C` or `by a request to stop` may follow."""


@dataclass(frozen=True)
class RunProcess:
    """The latest process of a run. Times are unix seconds; `outcome` is None until it ends."""

    pid: int
    host: str
    began_at: float
    ended_at: float | None = None
    outcome: Outcome | None = None
    error: str | None = None
    directory: str | None = None
    """The working directory, from which the relative paths among the settings are seen. Older versions wrote none."""


@contextmanager
def recorded_process(folder: Path) -> Generator[RunEnd]:
    """Writes into the run folder that this process runs it, and at the end of the block how it ended.

    An exception is `failed`, the user's interrupt is `stopped`; both are raised again.
    """
    end = RunEnd()
    process = RunProcess(os.getpid(), socket.gethostname(), time.time(), directory=working_directory())
    _write(folder, process)
    try:
        yield end
    except KeyboardInterrupt as interrupt:
        end.outcome = "stopped"
        end.error = f"{INTERRUPTED} by {interrupt.by}" if isinstance(interrupt, RunInterrupted) else INTERRUPTED
        raise
    except BaseException as error:
        end.outcome = "failed"
        end.error = f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
        raise
    finally:
        _write(folder, replace(process, ended_at=time.time(), outcome=end.outcome, error=end.error))


@dataclass
class RunEnd:
    """How a run ends if no exception ends it."""

    outcome: Outcome = "finished"
    error: str | None = None


def read_process(folder: Path) -> RunProcess | None:
    """The process of a run; None if there is no such file (older versions wrote none) or it cannot be read."""
    try:
        found = dict(json.loads((folder / PROCESS).read_bytes()))
        process = RunProcess(**{each.name: found[each.name] for each in fields(RunProcess) if each.name in found})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return process if _is_sound(process) else None


def other_living_process(folder: Path) -> RunProcess | None:
    """The process that runs the run of a folder now, if it is another one of this machine."""
    process = read_process(folder)
    if process is None or process.outcome is not None or process.host != socket.gethostname():
        return None
    return process if process.pid != os.getpid() and lives(process.pid, process.began_at) else None


def _is_sound(process: RunProcess) -> bool:
    """Whether the values have the types of their fields: the file may be damaged."""
    return (
        isinstance(process.pid, int)
        and isinstance(process.host, str)
        and isinstance(process.began_at, int | float)
        and isinstance(process.ended_at, int | float | None)
        and process.outcome in (None, *get_args(Outcome))
        and isinstance(process.error, str | None)
        and isinstance(process.directory, str | None)
    )


def run_state(process: RunProcess | None, *, is_complete: bool, updated_at: float, now: float) -> State:
    """The state of a run. `is_complete`: its log reaches the planned end, which decides for a run without a process.
    `updated_at` and `now` are unix seconds."""
    if process is None:
        return "finished" if is_complete else "died"
    if process.outcome is not None:
        return process.outcome
    if process.host == socket.gethostname():
        return "running" if lives(process.pid, process.began_at) else "died"
    return "running" if now - updated_at < SILENT_S else "died"


def is_stale(state: State, *, silent_s: float, slowest_step_s: float) -> bool:
    """Whether a running run has been silent for suspiciously long. `slowest_step_s` is 0 before the first step."""
    return state == "running" and silent_s > max(STALE_S, STALE_STEPS * slowest_step_s)


def state_notice(
    state: State, *, step: int, error: str | None, stale_for_s: float | None, is_ending: bool = False
) -> str:
    """One sentence about a run that needs attention or has no step yet; empty for one that goes well or has finished.

    `stale_for_s` is how long a stale run has been silent, None for others. `is_ending`: it was asked to end.
    """
    place = f"after step {step}" if step else "before its first step"
    if stale_for_s is not None:
        minutes = int(stale_for_s // 60)
        return f"Its process lives, but has written nothing for {minutes} minutes. It may hang."
    if state == "running" and is_ending:
        return "It was asked to stop: it ends after this step and saves it."
    if state == "running":
        return "" if step else "The first step is not done yet."
    if state == "died":
        return f"Its process ended {place} without a word: it was killed, or the machine stopped."
    if state in ("failed", "stopped"):
        told = "" if error is None else error
        is_interrupted = state == "stopped" and told.startswith(INTERRUPTED)
        because = f": {told}" if told and not is_interrupted else f"{told.removeprefix(INTERRUPTED)}."
        return f"It {'failed' if state == 'failed' else 'was stopped'} {place}{because}"
    return "" if step else "It finished without a step."


def lives(pid: int, began_at: float) -> bool:
    """Whether the process of this machine that had `pid` at `began_at` (unix seconds) still runs."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass  # it belongs to another user
    except (OSError, OverflowError):
        return False
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        booted = float(Path("/proc/stat").read_text().partition("btime ")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return True  # not Linux, or hidden: assume that it is the same process
    started_at = booted + int(numbers[18]) / os.sysconf("SC_CLK_TCK")
    return state not in "ZX" and started_at < began_at + CLOCK_SLACK_S  # otherwise another process has the id now


def working_directory() -> str | None:
    """The working directory of this process; None if it was removed."""
    try:
        return str(Path.cwd())
    except OSError:
        return None


def _write(folder: Path, process: RunProcess) -> None:
    replace_file(folder / PROCESS, encode_line(asdict(process)))

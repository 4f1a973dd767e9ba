"""Who runs a run, and how it ended: `process.json`. Whether a run still lives, from there and from its other files.

Knows processes of this machine; of another machine only what it has written.
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
from typing import Literal

from mint.runs.json_lines import encode_line, replace_file

Outcome = Literal["finished", "stopped", "failed"]
State = Literal["running", "finished", "stopped", "failed", "died"]

PROCESS = "process.json"
SILENT_S = 600.0
"""A run on another machine that has written nothing for so long is taken to have died."""
CLOCK_SLACK_S = 5.0
LONGEST_ERROR = 2_000


@dataclass(frozen=True)
class RunProcess:
    """The latest process of a run. Times are unix seconds; `outcome` is None as long as it has not come to an end."""

    pid: int
    host: str
    began_at: float
    ended_at: float | None = None
    outcome: Outcome | None = None
    error: str | None = None


@contextmanager
def recorded_process(folder: Path) -> Generator[RunEnd]:
    """Says in the run folder that this process runs it, and when the block is left, how that ended.

    Leaving it by an exception is `failed`, by the user's interrupt `stopped`; neither is swallowed.
    """
    end = RunEnd()
    process = RunProcess(os.getpid(), socket.gethostname(), time.time())
    _write(folder, process)
    try:
        yield end
    except KeyboardInterrupt:
        end.outcome, end.error = "stopped", "interrupted"
        raise
    except BaseException as error:
        end.outcome, end.error = "failed", f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
        raise
    finally:
        _write(folder, replace(process, ended_at=time.time(), outcome=end.outcome, error=end.error))


@dataclass
class RunEnd:
    """How a run ends, unless an exception says otherwise."""

    outcome: Outcome = "finished"
    error: str | None = None


def read_process(folder: Path) -> RunProcess | None:
    """None for a run from before there was such a file, or where it cannot be read."""
    try:
        found = dict(json.loads((folder / PROCESS).read_bytes()))
        return RunProcess(**{each.name: found[each.name] for each in fields(RunProcess)})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def run_state(process: RunProcess | None, *, is_complete: bool, updated_at: float, now: float) -> State:
    """What became of a run. `is_complete`: its log says that it came to its planned end (all that is known of a run
    without a process). `updated_at` and `now` are unix seconds."""
    if process is None:
        return "finished" if is_complete else "died"
    if process.outcome is not None:
        return process.outcome
    if process.host == socket.gethostname():
        return "running" if lives(process.pid, process.began_at) else "died"
    return "running" if now - updated_at < SILENT_S else "died"


def lives(pid: int, began_at: float) -> bool:
    """Whether the process of this machine that had `pid` at `began_at` (unix seconds) is still there."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass  # another user's
    except (OSError, OverflowError):
        return False
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        booted = float(Path("/proc/stat").read_text().partition("btime ")[2].split()[0])
    except (OSError, ValueError, IndexError):
        return True  # not Linux, or hidden: what has the id is taken to be it
    started_at = booted + int(numbers[18]) / os.sysconf("SC_CLK_TCK")
    return state not in "ZX" and started_at < began_at + CLOCK_SLACK_S  # else the id has gone to another process


def _write(folder: Path, process: RunProcess) -> None:
    replace_file(folder / PROCESS, encode_line(asdict(process)))

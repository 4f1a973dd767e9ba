"""One command of a shell: its process, its output, and the limits that end it.

Knows nothing of sandboxes: it gets the words of a command line, and a function that ends what they started.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mint.errors import InvalidRequestError, RequestFailedError

Ending = Literal["exit", "timeout", "memory", "files", "output"]
"""How a command ended: by itself, or by a limit."""

LOOK_EVERY_S = 0.1
"""How often time, memory, files and output are compared with their limits."""

READ_BYTES = 64 << 20
"""A command that writes more than this is ended."""

STOP_S = 20.0
"""How long the end of a sandbox may take."""

COUNTED_TIMES = 64
"""How many times its limit a folder that is too large is counted, so that a command may still make it smaller."""

ENTRY_BYTES = 1024
"""The least that a file counts: so the limit on bytes limits the number of empty files, too."""


@dataclass(frozen=True)
class ShellLimits:
    """The limits of one command. What it uses is looked at ten times a second, so it may exceed them briefly."""

    wall_s: float = 10.0
    memory_bytes: int = 512 << 20
    """The memory of all processes of the command together."""
    processes: int = 64
    """Processes and threads."""
    folder_bytes: int = 64 << 20
    """The working folder and `/tmp` together, as the disk counts them. A command that makes them larger than this is
    ended."""
    output_bytes: int = 16 << 10
    """What is kept of the output: its beginning and its end, half each."""

    def __post_init__(self) -> None:
        minimums = {"wall_s": 0.1, "memory_bytes": 32 << 20, "processes": 8, "folder_bytes": 1 << 12, "output_bytes": 2}
        for name, least in minimums.items():
            if not least <= getattr(self, name) < math.inf:
                raise InvalidRequestError(
                    f"must be a number of at least {least}",
                    field=f"ShellLimits.{name}",
                    value=getattr(self, name),
                    remedy="Leave it out for the default",
                )


FILE_TOO_LARGE = (128 + signal.SIGXFSZ, -signal.SIGXFSZ)
"""The exit codes of a command, and of a shell, that wrote beyond the limit of a file's size."""


@dataclass(frozen=True)
class ShellResult:
    """What a command wrote (standard output and error in their order), its exit code (None: a limit ended it), and its
    time."""

    output: str
    exit_code: int | None
    ended: Ending
    seconds: float

    @property
    def text(self) -> str:
        """The output as an agent reads it: with the exit code unless that is 0, or with the limit that ended it."""
        too_large = ": a file became larger than a file may be" if self.exit_code in FILE_TOO_LARGE else ""
        notes = {
            "exit": f"[exit code {self.exit_code}{too_large}]" if self.exit_code not in (0, None) else "",
            "timeout": f"[ended after {self.seconds:.0f} s]",
            "memory": "[ended: too much memory]",
            "files": "[ended: too much in the working folder and /tmp]",
            "output": "[ended: too much output]",
        }
        separator = "\n" if self.output and not self.output.endswith("\n") else ""
        note = notes[self.ended]
        return f"{self.output}{separator}{note}" if note else self.output


@dataclass
class CommandLine:
    """How to start a command: its words, what its process is given, and how to end it from outside.

    `environment` None is that of this process. `identity` are the arguments `user`, `group` and `extra_groups` of a
    process; `descriptors` are closed in this process once it runs. `lifeline` is the end of a pipe that this process
    keeps open for as long as the command may begin.
    """

    words: Sequence[str]
    environment: dict[str, str] | None = None
    descriptors: Sequence[int] = ()
    identity: dict[str, Any] = field(default_factory=dict)
    stop: Callable[[], Awaitable[None]] | None = None
    lifeline: int | None = None

    def close(self) -> None:
        """Closes the descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def forbid_beginning(self) -> None:
        """Closes the lifeline."""
        if self.lifeline is not None:
            os.close(self.lifeline)
            self.lifeline = None


async def run_command(
    line: CommandLine, limits: ShellLimits, folders: Sequence[Path], stdin: bytes = b""
) -> ShellResult:
    """Runs a command and waits for its end. `folders` are those whose size is limited.

    Raises:
        RequestFailedError: its processes did not end.
    """
    began = time.monotonic()
    output = _Output(limits.output_bytes)
    try:
        before_bytes = await asyncio.to_thread(_size_bytes, folders, COUNTED_TIMES * limits.folder_bytes)
        process = await _start(line, stdin)
    except BaseException:
        line.forbid_beginning()
        raise
    finally:
        line.close()
    reading = asyncio.create_task(output.read(process))
    writing = asyncio.create_task(_write(process, stdin))
    waiting = asyncio.create_task(process.wait())
    watching = asyncio.create_task(_first_limit(process.pid, output, limits, folders, before_bytes))
    try:
        await asyncio.wait({waiting, watching}, return_when=asyncio.FIRST_COMPLETED)
        ended: Ending = "exit" if waiting.done() else watching.result()
    finally:  # also when this call is cancelled
        writing.cancel()
        watching.cancel()
        await _end(process, line, {reading, waiting})
    exit_code = process.returncode if ended == "exit" else None
    return ShellResult(output.text, exit_code, ended, time.monotonic() - began)


async def _start(line: CommandLine, stdin: bytes) -> asyncio.subprocess.Process:
    """Starts the process of a command, in a group of its own. If this call is cancelled, it ends the whole group:
    asyncio would end the first process only, which may have started others."""
    starting = asyncio.create_task(
        asyncio.create_subprocess_exec(
            *line.words,
            stdin=asyncio.subprocess.PIPE if stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=tuple(line.descriptors),
            cwd="/",
            env=line.environment,
            start_new_session=True,
            **line.identity,
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        process = await starting
        await _end(process, line, {asyncio.create_task(_Output(0).read(process)), asyncio.create_task(process.wait())})
        raise


async def _end(process: asyncio.subprocess.Process, line: CommandLine, ending: set[asyncio.Task[Any]]) -> None:
    """Ends the process and waits for `ending`: its own end, and that of its output. When nobody can write that any
    more, all that it started has ended."""
    line.forbid_beginning()
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it has started and not yet let go
        if line.stop is not None:
            await line.stop()
    _, pending = await asyncio.wait(ending, timeout=STOP_S)
    if pending:
        for task in pending:
            task.cancel()
        raise RequestFailedError("the processes of a command did not end", field="command", value=line.words[0])


async def _write(process: asyncio.subprocess.Process, stdin: bytes) -> None:
    if process.stdin is None:
        return
    with suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(stdin)
        await process.stdin.drain()
    process.stdin.close()


async def _first_limit(
    pid: int, output: _Output, limits: ShellLimits, folders: Sequence[Path], before_bytes: int
) -> Ending:
    """Waits until the command exceeds a limit; returns which."""
    deadline = time.monotonic() + limits.wall_s
    allowed_bytes = max(limits.folder_bytes, before_bytes)
    while True:
        await asyncio.sleep(max(0.0, min(LOOK_EVERY_S, deadline - time.monotonic())))
        if output.count_bytes > READ_BYTES:
            return "output"
        if time.monotonic() >= deadline:
            return "timeout"
        if await asyncio.to_thread(_memory_bytes, pid) > limits.memory_bytes:
            return "memory"
        if await asyncio.to_thread(_size_bytes, folders, allowed_bytes) > allowed_bytes:
            return "files"


class _Output:
    """The beginning and the end of what a command writes, in bounded memory."""

    def __init__(self, limit_bytes: int) -> None:
        self._half = limit_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.count_bytes = 0

    async def read(self, process: asyncio.subprocess.Process) -> None:
        """Reads to the end."""
        assert process.stdout is not None
        while chunk := await process.stdout.read(1 << 16):
            self.count_bytes += len(chunk)
            kept = self._half - len(self._head)
            self._head += chunk[:kept]
            self._tail += chunk[kept:]
            del self._tail[: -self._half]

    @property
    def text(self) -> str:
        """What is kept, with a note of what is not."""
        left_out = self.count_bytes - len(self._head) - len(self._tail)
        note = f"\n[... {left_out} bytes are left out ...]\n".encode() if left_out else b""
        return (bytes(self._head) + note + bytes(self._tail)).decode(errors="replace")


def _size_bytes(folders: Sequence[Path], enough_bytes: int) -> int:
    """What the files below `folders` take; stops counting beyond `enough_bytes`. A folder whose path is too long for
    the system counts as beyond it. Links are not followed."""
    waiting = deque(os.fspath(folder) for folder in folders)
    size_bytes = 0
    while waiting and size_bytes <= enough_bytes:
        try:
            with os.scandir(waiting.popleft()) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        size_bytes += max(ENTRY_BYTES, 512 * entry.stat(follow_symlinks=False).st_blocks)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    if size_bytes > enough_bytes:
                        break
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return enough_bytes + 1
    return size_bytes


def _memory_bytes(pid: int) -> int:
    """The memory of a process and all below it, without that of files; 0 where there is no /proc."""
    waiting, total_bytes = [str(pid)], 0
    while waiting:
        process = Path("/proc") / waiting.pop()
        with suppress(OSError):  # it has ended meanwhile
            waiting += [
                child for thread in (process / "task").iterdir() for child in (thread / "children").read_text().split()
            ]
        with suppress(OSError):
            for line in (process / "status").read_text(errors="replace").splitlines():
                if line.startswith(("RssAnon:", "RssShmem:")):
                    total_bytes += 1024 * int(line.split()[1])
    return total_bytes

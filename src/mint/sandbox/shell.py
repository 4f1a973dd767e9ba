"""A shell for an agent: bash commands on a working folder, each in a sandbox of its own.

The folder lives as long as the `Shell`. All processes of a command end with it, so nothing of the agent runs while a
grader looks at its work. Files are read in the sandbox, too: a link that the agent made leads nowhere outside.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
import weakref
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Self

from mint.errors import InvalidRequestError
from mint.sandbox.shell_process import ShellLimits, ShellResult, run_command
from mint.sandbox.shell_sandboxes import (
    DEFAULT_IMAGE,
    FOLDERS,
    SandboxName,
    find_sandbox,
    make_folders,
    remove_folders,
)


class Shell:
    """A working folder, `/work` inside the sandbox, and the commands that run in it, one at a time.

    `tool(shell.bash)` is a tool of an environment. Close the shell at the end of its episode.
    """

    def __init__(
        self,
        files: Mapping[str, str] | None = None,
        *,
        sandbox: SandboxName = "auto",
        image: str = DEFAULT_IMAGE,
        limits: ShellLimits | None = None,
    ) -> None:
        """`files` are texts by their paths in the working folder. `image` is that of Docker; it must have bash.

        Raises:
            MissingExtraError: the sandbox does not run on this machine; names what to install.
            InvalidRequestError: a path leads out of the working folder, or there is no such sandbox.
        """
        self.limits = limits or ShellLimits()
        self._sandbox = find_sandbox(sandbox, image)
        self._turn = asyncio.Lock()
        self._folder, self._owner = make_folders({_inside(path): text for path, text in (files or {}).items()})
        # Also removes the folder of a shell that nobody closes, at the latest when Python ends.
        self._remove = weakref.finalize(self, remove_folders, self._folder)

    async def run(self, command: str, *, stdin: bytes = b"") -> ShellResult:
        """Runs a command with `bash -c` in the working folder, and waits until all its processes have ended.

        Raises:
            RequestFailedError: they did not end.
        """
        if "\0" in command:
            return ShellResult("bash: a command has no NUL character", 126, "exit", 0.0)
        async with self._turn:
            run = f"mint-shell-{secrets.token_hex(8)}"
            line = self._sandbox.start(command, self._folder, self._owner, self.limits, run)
            return await run_command(line, self.limits, [self._folder / name for name in FOLDERS], stdin)

    async def bash(self, command: str) -> str:
        """Runs a bash command in /work and returns its output. Each command starts a new shell: files stay, variables
        and background processes do not. There is no network."""
        return (await self.run(command)).text

    async def read_text(self, path: str) -> str | None:
        """The text of a file of the working folder (the same part as of any output); None if it cannot be read."""
        result = await self.run(f"cat -- {shlex.quote(_inside(path))}")
        return result.output if result.exit_code == 0 else None

    def close(self) -> None:
        """Removes the working folder."""
        self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _inside(path: str) -> str:
    """The path of a file, if it cannot lead out of the working folder by itself."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise InvalidRequestError(
            "is no path below the working folder", field="path", value=path, remedy="Give one as notes/todo.txt"
        )
    return str(pure)

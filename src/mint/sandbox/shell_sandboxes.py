"""The sandboxes in which a shell's commands run: bubblewrap or Docker, as command lines.

Both see an empty network, the working folder and `/tmp`, and programs that they cannot change: bubblewrap those of this
machine's `/usr`, Docker those of an image.
"""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal, get_args

from mint.errors import InvalidRequestError, MissingExtraError
from mint.sandbox.lockdown import NOBODY
from mint.sandbox.shell_process import CommandLine, ShellLimits
from mint.sandbox.syscalls import REFUSED_IN_SHELLS, shell_filter

SandboxName = Literal["auto", "bubblewrap", "docker"]
"""`auto`: bubblewrap if it runs here, else Docker."""

DEFAULT_IMAGE = "python:3.12-slim"

FOLDERS = {"work": "/work", "tmp": "/tmp"}
"""Folder of a shell → where its commands see it."""

ENVIRONMENT = {
    "HOME": "/work",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "TERM": "dumb",
    "USER": "agent",
}

INSIDE_USER = 1000
PASSWD = f"agent:x:{INSIDE_USER}:{INSIDE_USER}::/work:/bin/bash\n"
OPEN_FILES = 256
SHARED_MEMORY_BYTES = 16 << 20
REMOVE_AGAIN_S = 1.0
ENDS_ITSELF_S = 5.0

PROBE_S = 30.0
"""How long a sandbox may take to show that it works."""


@dataclass(frozen=True)
class Bubblewrap:
    """bubblewrap (`bwrap`): namespaces of its own for everything, no capabilities, a filter of system calls.

    Root starts it as the user `owner`; for any other user it needs unprivileged user namespaces.
    """

    name: ClassVar[SandboxName] = "bubblewrap"

    @property
    def remedy(self) -> str:
        """What to do where it does not run."""
        if shutil.which("bwrap") is None:
            return "apt-get install bubblewrap"
        return "let this user make user namespaces, and set TMPDIR to a folder that every user may enter"

    def start(self, command: str, folder: Path, owner: int, limits: ShellLimits, run: str) -> CommandLine:
        """The command line of a command in `folder`, which has those of `FOLDERS` and belongs to `owner`. No other
        command has the name `run`."""
        program = shutil.which("bwrap")
        machine = platform.machine()
        if program is None:
            raise OSError("bwrap is not installed")
        if machine not in REFUSED_IN_SHELLS:
            raise OSError(f"no system call table for {machine}")
        seccomp, filter_end = os.pipe()
        with os.fdopen(filter_end, "wb") as pipe:
            pipe.write(shell_filter(machine))
        words = [
            program, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--clearenv",
            "--uid", str(INSIDE_USER), "--gid", str(INSIDE_USER), "--hostname", "sandbox", "--seccomp", str(seccomp),
            "--ro-bind", "/usr", "/usr", *_top_folders(), "--dir", "/etc",
            "--ro-bind-try", "/etc/alternatives", "/etc/alternatives",
            "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache",
            "--ro-bind", str(folder / "passwd"), "/etc/passwd",
            "--proc", "/proc", "--dev", "/dev", "--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm",
        ]  # fmt: skip
        for ours, theirs in FOLDERS.items():
            words += ["--bind", str(folder / ours), theirs]
        for key, value in ENVIRONMENT.items():
            words += ["--setenv", key, value]
        # The roots of bwrap's own file systems are in memory that no limit counts.
        words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", FOLDERS["work"], "--"]
        alive, lifeline = os.pipe()
        words += ["bash", "-c", _begin_if_alive(alive), "bash", *_limited(command, limits, of_user=True)]
        identity = {"user": owner, "group": owner, "extra_groups": ()} if os.geteuid() == 0 else {}
        return CommandLine(words, {}, (seccomp, alive), identity, lifeline=lifeline)


@dataclass(frozen=True)
class Docker:
    """Docker: a container for each command, from a local `image` that has bash. The kernel counts all its memory."""

    image: str = DEFAULT_IMAGE
    name: ClassVar[SandboxName] = "docker"

    @property
    def remedy(self) -> str:
        """What to do where it does not run."""
        return f"start Docker, and run: docker pull {self.image}"

    def start(self, command: str, folder: Path, owner: int, limits: ShellLimits, run: str) -> CommandLine:
        """The same as for bubblewrap."""
        program = shutil.which("docker")
        if program is None:
            raise OSError("docker is not installed")
        words = [
            program, "run", "--rm", "--interactive", "--name", run, "--pull", "never", "--init", "--log-driver", "none",
            "--network", "none", "--hostname", "sandbox", "--read-only", "--user", f"{owner}:{owner}",
            "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--pids-limit", str(limits.processes),
            "--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes),
            "--shm-size", str(SHARED_MEMORY_BYTES), "--workdir", FOLDERS["work"],
        ]  # fmt: skip
        for ours, theirs in FOLDERS.items():
            words += ["--mount", f"type=bind,source={folder / ours},target={theirs}"]
        for key, value in ENVIRONMENT.items():
            words += ["--env", f"{key}={value}"]
        words += ["--entrypoint", "", self.image, *_limited(command, limits, of_user=False)]
        return CommandLine(words, stop=lambda: _remove_container(program, run))


ShellSandbox = Bubblewrap | Docker


def find_sandbox(name: SandboxName, image: str = DEFAULT_IMAGE) -> ShellSandbox:
    """The sandbox called `name`, which has run a command on this machine. `image` is that of Docker.

    Raises:
        MissingExtraError: it does not run here; says why, and what to install.
        InvalidRequestError: there is no such sandbox.
    """
    candidates: dict[str, Sequence[ShellSandbox]] = {
        "auto": (Bubblewrap(), Docker(image)),
        "bubblewrap": (Bubblewrap(),),
        "docker": (Docker(image),),
    }
    if name not in candidates:
        raise InvalidRequestError(
            "is not a sandbox", field="sandbox", value=name, remedy=f"Choose {', '.join(get_args(SandboxName))}"
        )
    reasons = []
    for candidate in candidates[name]:
        try:
            _prove(candidate)
        except OSError as error:
            reasons.append(f"{candidate.name}: {error}")
        else:
            return candidate
    remedies = " (or ".join(candidate.remedy for candidate in candidates[name])
    raise MissingExtraError(
        f"no sandbox for shells runs here ({'; '.join(reasons)})",
        remedy=remedies + ")" * (len(candidates[name]) - 1),
    )


async def _remove_container(program: str, name: str) -> None:
    """Ends a container and removes it. Twice: the daemon may still be making it at the first time."""
    nothing = asyncio.subprocess.DEVNULL
    for delay_s in (0.0, REMOVE_AGAIN_S):
        await asyncio.sleep(delay_s)
        removing = await asyncio.create_subprocess_exec(program, "rm", "--force", name, stdout=nothing, stderr=nothing)
        await removing.wait()


@cache
def _prove(sandbox: ShellSandbox) -> None:
    """Runs a command in the sandbox; only a success is remembered.

    Raises:
        OSError: it does not run here.
    """
    folder, owner = make_folders({"proof": "proof"})
    try:
        line = sandbox.start(
            "cat proof", folder, owner, ShellLimits(wall_s=PROBE_S), f"mint-proof-{secrets.token_hex(8)}"
        )
        try:
            done = subprocess.run(
                line.words,
                env=line.environment,
                pass_fds=tuple(line.descriptors),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PROBE_S,
                cwd="/",
                **line.identity,
            )
        except subprocess.TimeoutExpired as error:
            raise OSError(f"has not answered in {PROBE_S:.0f} s") from error
        finally:
            line.close()
            line.forbid_beginning()
        if done.stdout != b"proof":
            raise OSError(
                " ".join(done.stderr.decode(errors="replace").split())[:500] or f"exit code {done.returncode}"
            )
    finally:
        remove_folders(folder)


def make_folders(files: Mapping[str, str]) -> tuple[Path, int]:
    """A folder with those of `FOLDERS`, and its owner. `files` are texts by their paths in the working folder.

    If root calls this, the owner is a user of its own: a command has none of root's rights, and only its own processes
    count against its limit.
    """
    folder = Path(tempfile.mkdtemp(prefix="mint-shell-"))
    try:
        for name in FOLDERS:
            (folder / name).mkdir(mode=0o700)
        (folder / "passwd").write_text(PASSWD)
        for path, text in files.items():
            place = folder / "work" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        return folder, _give_away(folder) if os.geteuid() == 0 else os.geteuid()
    except BaseException:
        remove_folders(folder)
        raise


def remove_folders(folder: Path) -> None:
    """Removes a folder, however deep, and also what its owner may not write."""
    for words in (("chmod", "-R", "u+rwX"), ("rm", "-rf")):
        subprocess.run([*words, "--", str(folder)], stdin=subprocess.DEVNULL, capture_output=True, check=False)


def _give_away(folder: Path) -> int:
    """Gives all that is in `folder` to a user of its own, or to `nobody` if a container maps no such user."""
    paths = [folder, *folder.rglob("*")]
    for owner in (2_000_000_000 + secrets.randbelow(100_000_000), NOBODY):
        try:
            for path in paths:
                os.chown(path, owner, owner)
        except OSError:
            continue
        return owner
    raise OSError("cannot give the working folder to another user than root")


def _begin_if_alive(alive: int) -> str:
    """A script that runs its arguments, unless the pipe `alive` has been closed at its other end.

    bubblewrap's first process asks to die with its parent, and then gets its filter of system calls. It does not notice
    a parent that is gone already. So the script looks at the pipe after it has seen the filter: if the pipe is open
    then, the parent was there when the first process asked.
    """
    has_filter = """until read -rd '' status < /proc/1/status; [[ $status == *Seccomp:?2* ]]; do :; done"""
    return f'{has_filter}; read -t 0 -u {alive} && exit 1; exec "$@" {alive}<&-'


def _limited(command: str, limits: ShellLimits, *, of_user: bool) -> list[str]:
    """The words of a shell that limits itself and becomes the shell of `command`; what it starts inherits the limits.

    `of_user` limits the processes of the user, too. Output and errors go into one pipe, which keeps their order.
    """
    kib = {"-d": limits.memory_bytes >> 10, "-f": limits.folder_bytes >> 10}
    values = {"-c": 0, "-n": OPEN_FILES, **kib, **({"-u": limits.processes} if of_user else {})}
    settings = " ".join(f"{option} {value}" for option, value in values.items())
    # It ends by itself where this process does not live to end it.
    ending = ["timeout", "--signal", "KILL", str(limits.wall_s + ENDS_ITSELF_S)]
    return [*ending, "bash", "-c", f'ulimit {settings} && exec bash -c "$1" 2>&1', "bash", command]


def _top_folders() -> list[str]:
    """`/bin`, `/lib` and so on, as links or as folders, as this machine has them."""
    words = []
    for place in map(Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64")):
        if place.is_symlink():
            words += ["--symlink", str(place.readlink()), str(place)]
        elif place.is_dir():
            words += ["--ro-bind", str(place), str(place)]
    return words

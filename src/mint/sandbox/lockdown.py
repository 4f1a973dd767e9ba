"""Locks the calling process down for good: resource limits, its own user, Landlock, and the seccomp filter.

Linux only, through ctypes, without libseccomp or a Landlock library. A failing step raises OSError; a process that is
not fully locked down must then end itself.
Landlock: linux/landlock.h, ABI 1 (Linux 5.13) and later; seccomp restricts what an older ABI cannot.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
from pathlib import Path

from mint.sandbox.outcome import Limits
from mint.sandbox.syscalls import ALLOWED, seccomp_filter

_CREATE_RULESET = 444
_RESTRICT_SELF = 446
_RULESET_VERSION = 1
_SET_PDEATHSIG = 1
_SET_DUMPABLE = 4
_SET_SECCOMP = 22
_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Landlock ABI → number of file-system rights; 16 from ABI 5 on."""
_NET_RIGHTS = 0b11
_SCOPES = 0b11
NOBODY = 65534


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


class Lockdown:
    """Prepared before the fork; `apply` locks the child after it."""

    def __init__(self) -> None:
        """Raises OSError if this kernel or machine does not support it."""
        machine = platform.machine()
        if machine not in ALLOWED:
            raise OSError(f"no system call table for {machine}")
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.abi = self._checked("Landlock", self._libc.syscall(_CREATE_RULESET, None, 0, _RULESET_VERSION))
        program = seccomp_filter(machine)
        self._filter = _Program(len(program) // 8, program)
        self._baseline_bytes = address_space_bytes()

    def apply(self, limits: Limits) -> None:
        """Locks this process down; it must have one thread."""
        limit_resources(limits, self._baseline_bytes)
        if os.geteuid() == 0:
            _leave_root()
            resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        self._prctl(_SET_PDEATHSIG, signal.SIGKILL)
        self._prctl(_SET_DUMPABLE, 0)
        self.apply_landlock()
        self.apply_seccomp()

    def apply_landlock(self) -> None:
        """Restricts all rights and grants none: no file, no TCP port, no signal or abstract socket to the outside."""
        self._prctl(_SET_NO_NEW_PRIVS, 1)
        rules = _Ruleset((1 << _FS_RIGHTS.get(self.abi, 16)) - 1, _NET_RIGHTS, _SCOPES)
        size = 8 if self.abi < 4 else 16 if self.abi < 6 else 24
        ruleset = self._checked("Landlock", self._libc.syscall(_CREATE_RULESET, ctypes.byref(rules), size, 0))
        self._checked("Landlock", self._libc.syscall(_RESTRICT_SELF, ruleset, 0))
        os.close(ruleset)

    def apply_seccomp(self) -> None:
        """Allows the system calls of `seccomp_filter` alone."""
        self._prctl(_SET_NO_NEW_PRIVS, 1)
        self._prctl(_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(self._filter))

    def _prctl(self, option: int, first: int, second: int = 0) -> None:
        arguments = [ctypes.c_ulong(value) for value in (first, second, 0, 0)]
        self._checked(f"prctl {option}", self._libc.prctl(option, *arguments))

    @staticmethod
    def _checked(what: str, answer: int) -> int:
        if answer < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")
        return answer


def address_space_bytes() -> int:
    """The address space that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def limit_resources(limits: Limits, baseline_bytes: int) -> None:
    """Sets the kernel's resource limits. The interpreter already uses `baseline_bytes` of address space."""
    memory = baseline_bytes + limits.memory_bytes
    for what, soft, hard in (
        # A program can ignore the soft limit of CPU time; the hard one kills it.
        (resource.RLIMIT_CPU, limits.cpu_s, limits.cpu_s + 1),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, limits.file_bytes, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files, limits.open_files),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(what, (soft, hard))


def _leave_root() -> None:
    """Becomes a user of its own, or `nobody` if a container maps no such user."""
    os.setgroups([])
    for user in (2_000_000_000 + os.getpid(), NOBODY):
        try:
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        except OSError:
            continue
        return
    raise OSError("cannot leave the root user")

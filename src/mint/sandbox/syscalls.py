"""The seccomp filter of the sandbox: the system calls that a locked child may make, as a classic BPF program.

An allow-list: any other call fails with EPERM, which Python raises as `OSError`. No allowed call opens, stats or lists
a file, creates a socket, a process or a thread, or touches another process. Instruction encoding and
`seccomp_data` layout: linux/filter.h, linux/seccomp.h.
"""

from __future__ import annotations

import struct
from errno import ENOSYS, EPERM

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

ALLOWED = {
    "x86_64": {
        "read": 0, "write": 1, "close": 3, "fstat": 5, "lseek": 8, "munmap": 11, "brk": 12, "rt_sigaction": 13,
        "rt_sigprocmask": 14, "rt_sigreturn": 15, "writev": 20, "sched_yield": 24, "mremap": 25, "madvise": 28,
        "getpid": 39, "exit": 60, "gettimeofday": 96, "sigaltstack": 131, "gettid": 186, "time": 201, "futex": 202,
        "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229, "exit_group": 231, "getrandom": 318,
        "membarrier": 324, "rseq": 334,
    },
    "aarch64": {
        "close": 57, "lseek": 62, "read": 63, "write": 64, "writev": 66, "fstat": 80, "exit": 93, "exit_group": 94,
        "futex": 98, "clock_gettime": 113, "clock_getres": 114, "sched_yield": 124, "restart_syscall": 128,
        "sigaltstack": 132, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigreturn": 139, "gettimeofday": 169,
        "getpid": 172, "gettid": 178, "brk": 214, "munmap": 215, "mremap": 216, "madvise": 233, "getrandom": 278,
        "membarrier": 283, "rseq": 293,
    },
}  # fmt: skip
ALLOWED_UNLESS_EXECUTABLE = {"x86_64": {"mmap": 9, "mprotect": 10}, "aarch64": {"mmap": 222, "mprotect": 226}}
"""Allowed unless the memory becomes executable."""

SLEEPS = {"x86_64": {"nanosleep": 35, "clock_nanosleep": 230}, "aarch64": {"nanosleep": 101, "clock_nanosleep": 115}}
"""Succeed at once: sleeping takes no time, as in Monty."""

CLONE3 = 435
"""Fails with ENOSYS, so that glibc falls back to `clone`, which fails with EPERM."""

_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_KILL_PROCESS = 0x80000000
_NUMBER = 0
_ARCH = 4
_THIRD_ARGUMENT = 16 + 8 * 2
_PROT_EXEC = 4


def seccomp_filter(machine: str) -> bytes:
    """The program for `machine` (a key of `ALLOWED`), 8 bytes per instruction."""
    program = [
        _instruction(_LOAD, _ARCH),
        _instruction(_JUMP_EQUAL, AUDIT_ARCH[machine], 1, 0),
        _instruction(_RETURN, _KILL_PROCESS),  # a call of another architecture
        _instruction(_LOAD, _NUMBER),
    ]
    for number in ALLOWED[machine].values():
        program += _when_equal(number, [_instruction(_RETURN, _ALLOW)])
    for number in SLEEPS[machine].values():
        program += _when_equal(number, [_instruction(_RETURN, _ERRNO)])
    program += _when_equal(CLONE3, [_instruction(_RETURN, _ERRNO | ENOSYS)])
    for number in ALLOWED_UNLESS_EXECUTABLE[machine].values():
        refuse_executable = [
            _instruction(_LOAD, _THIRD_ARGUMENT),
            _instruction(_JUMP_ANY_BIT, _PROT_EXEC, 0, 1),
            _instruction(_RETURN, _ERRNO | EPERM),
            _instruction(_RETURN, _ALLOW),
        ]
        program += _when_equal(number, refuse_executable)
    return b"".join([*program, _instruction(_RETURN, _ERRNO | EPERM)])


def _when_equal(value: int, body: list[bytes]) -> list[bytes]:
    """Runs `body`, which must return, if the loaded word is `value`; skips it otherwise."""
    return [_instruction(_JUMP_EQUAL, value, 0, len(body)), *body]


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)

"""The seccomp filters of the sandboxes, as classic BPF programs.

`seccomp_filter` is for the zygote's child, an allow-list: any other call fails with EPERM, which Python raises as
`OSError`. No allowed call opens, stats or lists a file, creates a socket, a process or a thread, or touches another
process. `shell_filter` is for the shells of agents, whose programs may be any: a list of refused calls.
Instruction encoding and `seccomp_data` layout: linux/filter.h, linux/seccomp.h.
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

REFUSED_IN_SHELLS = {
    "x86_64": {
        "shmget": 29, "semget": 64, "msgget": 68, "ptrace": 101, "syslog": 103, "pivot_root": 155, "mount": 165,
        "umount2": 166, "init_module": 175, "mq_open": 240, "kexec_load": 246, "add_key": 248, "request_key": 249,
        "keyctl": 250, "unshare": 272, "perf_event_open": 298, "open_by_handle_at": 304, "setns": 308,
        "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "memfd_create": 319,
        "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "umount2": 39, "mount": 40, "pivot_root": 41, "unshare": 97, "kexec_load": 104, "init_module": 105,
        "syslog": 116, "ptrace": 117, "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "add_key": 217,
        "request_key": 218, "keyctl": 219, "perf_event_open": 241, "open_by_handle_at": 265, "setns": 268,
        "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "memfd_create": 279,
        "bpf": 280, "userfaultfd": 282,
    },
}  # fmt: skip
"""Memory that no limit counts (`memfd_create`, System V and POSIX queues), and calls that exploits of kernels need more
often than programs do."""

REFUSED_ON_BOTH = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442,
    "memfd_secret": 447,
}  # fmt: skip
"""The same for calls that have one number on all architectures."""

CLONE = {"x86_64": 56, "aarch64": 220}
NEW_NAMESPACE = 0x7E020000
"""The flags of `clone` for namespaces of one's own (linux/sched.h); a new user namespace would give capabilities."""

CLONE3 = 435
"""Fails with ENOSYS, so that glibc falls back to `clone`, whose flags a filter can read."""

_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_ANY_BIT = 0x45
_X32_BIT = 0x40000000
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_KILL_PROCESS = 0x80000000
_NUMBER = 0
_ARCH = 4
_FIRST_ARGUMENT = 16
_THIRD_ARGUMENT = 16 + 8 * 2
_PROT_EXEC = 4


def seccomp_filter(machine: str) -> bytes:
    """The program for `machine` (a key of `ALLOWED`), 8 bytes per instruction."""
    program = _beginning(machine)
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


def shell_filter(machine: str) -> bytes:
    """The program for shells on `machine` (a key of `REFUSED_IN_SHELLS`): what it names fails with EPERM."""
    program = [
        *_beginning(machine),
        _instruction(_JUMP_ANY_BIT, _X32_BIT, 0, 1),  # the same calls by other numbers
        _instruction(_RETURN, _ERRNO | EPERM),
    ]
    for number in (REFUSED_IN_SHELLS[machine] | REFUSED_ON_BOTH).values():
        program += _when_equal(number, [_instruction(_RETURN, _ERRNO | EPERM)])
    program += _when_equal(CLONE3, [_instruction(_RETURN, _ERRNO | ENOSYS)])
    refuse_namespaces = [
        _instruction(_LOAD, _FIRST_ARGUMENT),
        _instruction(_JUMP_ANY_BIT, NEW_NAMESPACE, 0, 1),
        _instruction(_RETURN, _ERRNO | EPERM),
        _instruction(_RETURN, _ALLOW),
    ]
    program += _when_equal(CLONE[machine], refuse_namespaces)
    return b"".join([*program, _instruction(_RETURN, _ALLOW)])


def _beginning(machine: str) -> list[bytes]:
    """Ends a process that makes a call of another architecture; loads the number of the call."""
    return [
        _instruction(_LOAD, _ARCH),
        _instruction(_JUMP_EQUAL, AUDIT_ARCH[machine], 1, 0),
        _instruction(_RETURN, _KILL_PROCESS),
        _instruction(_LOAD, _NUMBER),
    ]


def _when_equal(value: int, body: list[bytes]) -> list[bytes]:
    """Runs `body`, which must return, if the loaded word is `value`; skips it otherwise."""
    return [_instruction(_JUMP_EQUAL, value, 0, len(body)), *body]


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)

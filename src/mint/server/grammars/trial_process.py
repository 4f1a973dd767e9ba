"""The process beside the server that tries out grammars: `python -m mint.server.grammars.trial_process FD`.

A caller's grammar is a program for llguidance's compiler, which bounds neither its time nor its memory nor the depth of
its recursion. So each one is compiled in a fork of this process first, and the fork is what a limit ends. It ends with
the server, or after `IDLE_S` without a grammar. Knows no service.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mint.server.child_process import READY
from mint.server.grammars.compiler import first_state, grammar_text, vocabulary

IDLE_S = 300.0
CPU_S = 0.5
MEMORY_BYTES = 32 << 20
STACK_BYTES = 2 << 20
"""The threads of the server that compile afterwards have at least twice this stack."""

_ADDRESS_SPACE = 4
"""How many times `MEMORY_BYTES` the address space may grow: allocators take more than they use."""

PROBLEM_CHARACTERS = 500

_REASONS = {
    signal.SIGPROF: f"more than {CPU_S:g} s of a processor",
    signal.SIGABRT: f"more than {MEMORY_BYTES >> 20} MiB",
}


def answer(task: dict[str, Any]) -> dict[str, Any]:
    """`{"bytes"}` that a grammar takes, else `{"problem"}`, or `{"excess"}` for one that takes too much, in words."""
    tokens = vocabulary(Path(task["folder"]))  # before the fork: all grammars of a model share it
    reading, writing = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        try:
            os.write(writing, json.dumps(_compiled_within_limits(task["field"], task["value"], tokens)).encode())
        finally:  # also after an error: the fork must never go on with the work of this process
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read()
    _, status = os.waitpid(process_id, 0)
    if os.WIFSIGNALED(status):
        return {"excess": _REASONS.get(signal.Signals(os.WTERMSIG(status)), "too deep a recursion")}
    taken: dict[str, Any] = json.loads(found or b'{"problem": "the compiler failed"}')
    if taken.get("bytes", 0) > MEMORY_BYTES:
        return {"excess": _REASONS[signal.SIGABRT]}
    return taken


def _compiled_within_limits(field: str, value: Any, tokens: Any) -> dict[str, Any]:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the words of an abort are many lines of the server's log
    # An owner's next request starts a new fork: without a limit on the dumps of those that crash, they fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    space, before = _memory_bytes()
    if space:
        limit = space + _ADDRESS_SPACE * MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # of the processor, not of the clock: a busy machine is no excess
    try:
        _, problem = first_state(tokens, grammar_text(field, value))
    except MemoryError:
        return {"excess": _REASONS[signal.SIGABRT]}
    except (ValueError, RecursionError) as error:
        return {"problem": _shortened(str(error))}
    return {"problem": _shortened(problem)} if problem else {"bytes": max(0, _memory_bytes()[1] - before)}


def _shortened(problem: str) -> str:
    """A short problem as it is; of a long one, which quotes the grammar several times, the beginning and the end."""
    half = PROBLEM_CHARACTERS // 2
    return problem if len(problem) <= PROBLEM_CHARACTERS else f"{problem[:half]} … {problem[-half:]}"


def _memory_bytes() -> tuple[int, int]:
    """The address space and the memory of this process; zeros where they cannot be read (not Linux)."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0, 0
    space, resident = statm.read_text().split()[:2]
    return int(space) * resource.getpagesize(), int(resident) * resource.getpagesize()


def main(handle: int) -> None:
    """Works until the server ends, or has no grammar for a while."""
    with Connection(handle) as connection:
        connection.send_bytes(READY)
        while connection.poll(IDLE_S):
            try:
                connection.send_bytes(json.dumps(answer(json.loads(connection.recv_bytes()))).encode())
            except (EOFError, ConnectionError):
                return


if __name__ == "__main__":
    main(int(sys.argv[1]))

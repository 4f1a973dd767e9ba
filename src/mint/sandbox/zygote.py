"""The zygote: a loaded interpreter that forks one locked-down child per run and passes on the child's output.

`zygote_pool` starts it with one end of a socket as its standard input. It never runs the code itself and does not read
the child's output; it enforces the wall-clock and output limits by killing the child. Neither zygote nor child knows an
expected answer.

Protocol, one JSON line each way: `{"code", "function", "inputs", "nonce", "limits"}` →
`{"ended", "exit", "results", "stdout"}`, followed by that many bytes of results and of printed text. The results are
lines `NONCE KIND TEXT`. The first is `R` (ready: written before the code runs, so the code cannot replace it) or `X`
(the lock-down failed). Then `L` loaded, `F` failed to load, or `S` a syntax error; then, for each input, `V` an encoded
value or `E` an exception.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import random
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from mint.sandbox.lockdown import Lockdown, address_space_bytes, limit_resources
from mint.sandbox.outcome import Limits
from mint.sandbox.value_encoding import decode_input, encode

OFFERED = """
_strptime abc argparse array ast base64 binascii bisect builtins calendar cmath collections collections.abc colorsys
contextlib copy csv dataclasses datetime decimal difflib dis encodings.ascii encodings.cp1252 encodings.idna
encodings.latin_1 encodings.utf_16 encodings.utf_32 encodings.utf_8_sig enum errno fractions functools gc graphlib
hashlib heapq hmac html html.parser inspect io ipaddress itertools json keyword linecache locale marshal math
numbers opcode operator os os.path pickle platform posixpath pprint queue random re reprlib sched secrets select
shlex signal stat statistics string struct sys tempfile textwrap threading time timeit token tokenize tomllib
traceback types typing unicodedata urllib.parse uuid warnings weakref zlib
"""
"""Modules that the code may import; loaded before the fork, because the child cannot read files."""

HIDDEN = (
    "_ctypes",
    "_posixsubprocess",
    "_socket",
    "ctypes",
    "mint",
    "socket",
    "subprocess",
)
RESULT_FD = 3


def serve(connection: socket.socket, lockdown: Lockdown | None) -> None:
    """Answers requests until the other end closes; `lockdown` None forks children without isolation."""
    requests = connection.makefile("rb")
    for line in requests:
        request = json.loads(line)
        limits = Limits(**request.pop("limits"))
        header, results, stdout = _run(request, limits, lockdown)
        header |= {"results": len(results), "stdout": len(stdout)}
        connection.sendall(json.dumps(header).encode() + b"\n" + results + stdout)


def _run(request: dict[str, Any], limits: Limits, lockdown: Lockdown | None) -> tuple[dict[str, Any], bytes, bytes]:
    results_out, results_in = os.pipe()
    stdout_out, stdout_in = os.pipe()
    child = os.fork()
    if child == 0:
        _run_child(request, limits, lockdown, results_in, stdout_in)
    os.close(results_in)
    os.close(stdout_in)
    deadline_s = time.monotonic() + limits.wall_s
    collected = {results_out: bytearray(), stdout_out: bytearray()}
    ended = _collect(collected, limits.output_bytes, deadline_s)
    status = None if ended else _wait(child, deadline_s)
    if status is None:
        ended = ended or "wall"
        _kill(child)
        status = os.waitpid(child, 0)[1]
    for descriptor in collected:
        os.close(descriptor)
    header = {"ended": ended or "exit", "exit": os.waitstatus_to_exitcode(status)}
    return header, bytes(collected[results_out]), bytes(collected[stdout_out])


def _collect(collected: dict[int, bytearray], limit_bytes: int, deadline_s: float) -> str:
    """Reads until both pipes close (`""`), one carries too much (`"output"`) or time is up (`"wall"`)."""
    waiting = select.poll()
    for descriptor in collected:
        waiting.register(descriptor, select.POLLIN)
    is_open = len(collected)
    while is_open:
        left_s = deadline_s - time.monotonic()  # asked each time, because a flood keeps the pipes ready
        ready = waiting.poll(left_s * 1000) if left_s > 0 else []
        if not ready:
            return "wall"
        for descriptor, _ in ready:
            received = os.read(descriptor, 65536)
            room = limit_bytes - len(collected[descriptor])
            collected[descriptor] += received[:room]
            if len(received) > room:
                return "output"
            if not received:
                waiting.unregister(descriptor)
                is_open -= 1
    return ""


def _wait(child: int, deadline_s: float) -> int | None:
    """The exit status of a child that has closed its pipes; None if it is alive at the deadline."""
    handle = os.pidfd_open(child)
    try:
        ended, _, _ = select.select([handle], [], [], max(0.0, deadline_s - time.monotonic()))
    finally:
        os.close(handle)
    return os.waitpid(child, 0)[1] if ended else None


def _kill(child: int) -> None:
    """Kills the child, and the processes that a child without isolation has started in its process group."""
    os.kill(child, signal.SIGKILL)
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # the child had not made its group yet, or the group ended with it


def _run_child(
    request: dict[str, Any], limits: Limits, lockdown: Lockdown | None, results: int, stdout: int
) -> NoReturn:
    nonce = request["nonce"].encode()
    try:
        os.setpgid(0, 0)
        results, stdout = os.dup(results), os.dup(stdout)  # to numbers above the ones that they are moved to
        os.dup2(stdout, 1)
        os.dup2(results, RESULT_FD)
        os.closerange(RESULT_FD + 1, 64)
        if lockdown is None:
            limit_resources(limits, address_space_bytes())
        else:
            lockdown.apply(limits)
    except (OSError, ValueError) as error:
        os.write(RESULT_FD, b"%s X %s\n" % (nonce, str(error).encode()))
        os._exit(1)
    try:
        _answer(request, limits, nonce)
    finally:
        os._exit(0)  # without exit handlers or threads to wait for


def _answer(request: dict[str, Any], limits: Limits, nonce: bytes) -> None:
    write = os.write
    dumps = json.dumps
    max_depth = limits.value_depth
    max_items = limits.result_items

    def line(kind: bytes, text: str) -> bytes:
        return b"%s %s %s\n" % (nonce, kind, text.encode())

    def say(kind: bytes, text: str) -> None:
        write_all(line(kind, text))

    def write_all(data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[write(RESULT_FD, rest) :]

    say(b"R", "")
    inputs = [decode_input(encoded) for encoded in request["inputs"]]
    code = request["code"]
    name = request["function"]
    random.seed(0)
    sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), errors="replace", write_through=True)
    for module in [module for module in sys.modules if module.partition(".")[0] in HIDDEN]:
        del sys.modules[module]
    del request
    try:
        compiled = compile(code, "solution.py", "exec")
    except MemoryError:
        return say(b"F", dumps("MemoryError: "))
    except (SyntaxError, ValueError, RecursionError, OverflowError) as error:
        return say(b"S", dumps(_as_text(error)))
    names: dict[str, Any] = {"__name__": "solution", "__builtins__": __builtins__}
    try:
        exec(compiled, names)  # noqa: S102 - this is the sandbox
        function = names[name]
    except BaseException as error:  # noqa: BLE001 - the boundary to the code: its exceptions are data
        return say(b"F", dumps(_as_text(error)))
    say(b"L", "")
    for arguments in inputs:
        try:
            answer = line(b"V", encode(function(*arguments), max_depth, max_items))
        except BaseException as error:  # noqa: BLE001 - the same boundary
            answer = line(b"E", dumps(_as_text(error)))
        write_all(answer)
    return None


def _as_text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except BaseException:  # noqa: BLE001 - an exception of the code may fail to print itself
        return type(error).__name__


def main() -> None:
    """Loads the modules, prepares the lock-down, reports whether that worked, and serves."""
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    locked = sys.argv[1] == "locked"
    try:
        for module in OFFERED.split():
            importlib.import_module(module)
        time.localtime()  # reads the time zone while files are readable
        gc.collect()
        gc.freeze()  # the children share these pages
        lockdown = Lockdown() if locked else None
    except OSError as error:
        connection.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
        return
    connection.sendall(json.dumps({"landlock_abi": lockdown.abi if lockdown else 0}).encode() + b"\n")
    serve(connection, lockdown)

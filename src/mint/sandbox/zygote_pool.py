"""The pool of zygotes on the host's side: starts them, assigns one to each run, reads the results, replaces lost ones.

Does not judge a solution. A child's output is untrusted: a line without the nonce of this run makes the run void. A
zygote whose answer breaks the protocol is ended and replaced.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mint.errors import RequestFailedError
from mint.sandbox.outcome import Engine, InputResult, Limits, Outcome, Status, all_failed, decoded_result, status_of
from mint.sandbox.safe_text import error_text
from mint.sandbox.value_encoding import encode_input

PACKAGE = Path(__file__).resolve().parents[1]
BOOT = """
import importlib.util, sys
folder = sys.argv.pop(1)
found = importlib.util.spec_from_file_location("mint", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["mint"] = importlib.util.module_from_spec(found)
found.loader.exec_module(sys.modules["mint"])
from mint.sandbox.zygote import main
main()
"""
"""Loads the package of this process by its path: another copy may be installed, and no folder is put on the module
path, so no file next to the package can replace a standard module."""

START_S = 20.0
"""How long a zygote may take to start."""

GRACE_S = 5.0
"""How long it may take to answer after the wall-clock limit."""

HEADER_BYTES = 4096
"""The most that the line of a zygote may have: an answer's header, or why it did not start."""

STATUS_OF_KIND: dict[str, Status] = {"S": "syntax_error", "F": "error"}


class ZygoteError(RequestFailedError):
    """A zygote could not be started or was lost."""


class ZygotePool:
    """Up to `count` zygotes, started when needed. `run` is thread-safe."""

    def __init__(self, limits: Limits, *, count: int, locked: bool) -> None:
        """Starts the first one. Raises ZygoteError if this machine cannot run it."""
        self._limits = limits
        self._locked = locked
        self.engine: Engine = "zygote" if locked else "unsafe"
        self._free: queue.LifoQueue[_Zygote | None] = queue.LifoQueue()
        for _ in range(count - 1):
            self._free.put(None)
        self._count = count
        first = _Zygote(locked=locked)
        self.landlock_abi: int = first.landlock_abi
        self._free.put(first)
        proof = self.run("def proof(): return True", "proof", [()])
        if proof.status != "ok":
            self.close()
            raise ZygoteError(f"the first run of the zygote failed: {proof.detail}")

    def run(self, code: str, function: str, inputs: Sequence[tuple[Any, ...]]) -> Outcome:
        """Calls the function with each input, in order, in one child."""
        began = time.perf_counter()
        nonce = secrets.token_hex(16)
        inputs_text = [encode_input(tuple(item), self._limits.value_depth) for item in inputs]
        request = {"code": code, "function": function, "inputs": inputs_text}
        zygote = self._free.get()
        try:
            zygote = zygote or _Zygote(locked=self._locked)
            header, results, stdout = zygote.ask({**request, "nonce": nonce, "limits": asdict(self._limits)})
        except BaseException as error:  # also an interrupt: the next run must not read the answer of this one
            if zygote is not None:
                zygote.close()
            zygote = None
            if not isinstance(error, (OSError, ValueError)):
                raise
            detail = f"the zygote was lost: {type(error).__name__}: {error}"
            return all_failed("crashed", detail, len(inputs), self.engine, milliseconds=_since(began))
        finally:
            self._free.put(zygote)
        return read_outcome(header, results, stdout, nonce, len(inputs), self._limits, self.engine, _since(began))

    def close(self) -> None:
        """Ends all zygotes, after the runs in progress."""
        for zygote in [self._free.get() for _ in range(self._count)]:
            if zygote is not None:
                zygote.close()


class _Zygote:
    """One zygote process and the socket to it."""

    def __init__(self, *, locked: bool) -> None:
        if not hasattr(os, "pidfd_open"):
            raise ZygoteError(f"needs Linux, this is {sys.platform}")
        self._socket, theirs = socket.socketpair()
        with theirs:
            # The unsafe mode leaves out -S, so that installed packages can be imported.
            flags = ["-S", "-P", "-s", "-B"] if locked else ["-P", "-s", "-B"]
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", BOOT, str(PACKAGE), "locked" if locked else "unsafe"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
                start_new_session=True,
            )
        self._received = bytearray()
        try:
            hello = json.loads(self._line(time.monotonic() + START_S))
        except (OSError, ValueError) as error:
            self.close()
            raise ZygoteError(f"the zygote did not start: {type(error).__name__}") from error
        if "error" in hello:
            self.close()
            raise ZygoteError(hello["error"])
        self.landlock_abi = int(hello["landlock_abi"])

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes, bytes]:
        """Sends one request and reads the answer. Raises OSError or ValueError if the zygote is lost."""
        limits = request["limits"]
        deadline_s = time.monotonic() + limits["wall_s"] + GRACE_S
        self._socket.settimeout(limits["wall_s"] + GRACE_S)
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        header = read_header(self._line(deadline_s), limits["output_bytes"])
        results = self._bytes(header["results"], deadline_s)
        stdout = self._bytes(header["stdout"], deadline_s)
        if self._received:
            raise ValueError("it has answered more than it was asked")
        return header, results, stdout

    def _line(self, deadline_s: float) -> bytes:
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > HEADER_BYTES:
                raise ValueError(f"a line of more than {HEADER_BYTES} bytes")
            self._receive(deadline_s)
        return self._taken(end + 1)

    def _bytes(self, count: int, deadline_s: float) -> bytes:
        while len(self._received) < count:
            self._receive(deadline_s)
        return self._taken(count)

    def _receive(self, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:  # one deadline for the whole answer, however slowly it drips
            raise TimeoutError("no answer in time")
        self._socket.settimeout(left_s)
        received = self._socket.recv(65536)
        if not received:
            raise ConnectionError("it has ended")
        self._received += received

    def _taken(self, count: int) -> bytes:
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken

    def close(self) -> None:
        """Ends the process and its running child."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def read_header(line: bytes, limit_bytes: int) -> dict[str, Any]:
    """The header of an answer. Raises ValueError if it is malformed, or announces more than the limit."""
    try:
        header = json.loads(line)
    except RecursionError:
        raise ValueError("a header that is nested") from None
    if type(header) is not dict or header.keys() != {"ended", "exit", "results", "stdout"}:
        raise ValueError("a header with other fields")
    counts = [header[name] for name in ("exit", "results", "stdout")]
    if header["ended"] not in ("exit", "wall", "output") or any(type(count) is not int for count in counts):
        raise ValueError("a header with other values")
    if not all(0 <= count <= limit_bytes for count in counts[1:]):
        raise ValueError(f"a header that announces more than {limit_bytes} bytes")
    return header


def read_outcome(
    header: dict[str, Any],
    results: bytes,
    stdout: bytes,
    nonce: str,
    count: int,
    limits: Limits,
    engine: Engine,
    milliseconds: float,
) -> Outcome:
    """The outcome of a run from the lines that its child wrote. Pure; a line without the nonce makes the run void."""
    facts: dict[str, Any] = {"milliseconds": milliseconds, "stdout": stdout.decode(errors="replace")}
    lines = results.decode(errors="replace").split("\n", count + 4)  # one more than a run can have
    complete = [line.split(" ", 2) for line in lines[:-1]]
    if any(len(parts) != 3 or parts[0] != nonce for parts in complete) or len(complete) > count + 2:
        return all_failed("crashed", "something else wrote to the result pipe", count, engine, **facts)
    ending, detail = _ending(header)
    if complete and complete[0][1] == "X":
        return all_failed("unsupported", complete[0][2], count, engine, **facts)
    if complete and complete[0][1] != "R":
        return all_failed("crashed", "the child was not ready when it answered", count, engine, **facts)
    if len(complete) < 2:
        return all_failed(ending, detail, count, engine, **facts)
    (_, kind, text), *answers = complete[1:]
    try:
        if kind != "L":
            reason = _error(text)
            status = "memory" if reason.startswith("MemoryError") else STATUS_OF_KIND.get(kind, "crashed")
            return all_failed(status, reason, count, engine, **facts)
        answered = tuple(_result(kind, text, limits) for _, kind, text in answers)
    except ValueError:
        return all_failed("crashed", "an answer is not an encoded value", count, engine, **facts)
    if len(answered) == count:
        # A limit that one input met is reported as the status of the run.
        return Outcome(status_of(answered), answered, engine, **facts)
    missing = (InputResult(error=detail),) * (count - len(answered))
    return Outcome(ending, answered + missing, engine, detail=detail, **facts)


def _result(kind: str, text: str, limits: Limits) -> InputResult:
    if kind == "V":
        return decoded_result(text, limits)
    if kind == "E":
        return InputResult(error=_error(text))
    raise ValueError(kind)


def _error(text: str) -> str:
    """An exception's text from its JSON string. Raises ValueError for any other JSON, however nested."""
    decoded = json.loads(text) if text.startswith('"') else None
    if type(decoded) is not str:
        raise ValueError("not an encoded text")
    return error_text(decoded)


def _ending(header: dict[str, Any]) -> tuple[Status, str]:
    """Why the child ended before it had answered all inputs."""
    if header["ended"] == "wall":
        return "timeout", "the limit of wall-clock time ended the run"
    if header["ended"] == "output":
        return "output", "the output exceeds the output limit"
    if header["exit"] in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timeout", "the limit of CPU time ended the run"
    if header["exit"] < 0:
        return "crashed", f"ended by {_signal_name(-header['exit'])}"
    return "crashed", f"exited with status {header['exit']} before it had answered"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


def _since(began: float) -> float:
    return (time.perf_counter() - began) * 1000

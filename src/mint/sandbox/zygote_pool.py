"""The pool of zygotes on the host's side: starts them, assigns one to each run, reads the results, replaces lost ones.

Does not judge a solution. A child's output is untrusted: a line without the nonce of this run makes the run void.
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
from mint.sandbox.outcome import Engine, InputResult, Limits, Outcome, Status, all_failed
from mint.sandbox.value_encoding import decode, encode

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
BOOT = "import sys; sys.path.append(sys.argv.pop(1)); from mint.sandbox.zygote import main; main()"
"""The package comes last on the path, so that no file next to it can replace a standard module."""

START_S = 20.0
"""How long a zygote may take to start."""

GRACE_S = 5.0
"""How long it may take to answer after the wall-clock limit."""

STATUS_OF_KIND: dict[str, Status] = {"S": "syntax_error", "F": "error", "X": "unsupported"}


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
        request = {"code": code, "function": function, "inputs": [encode(tuple(item)) for item in inputs]}
        zygote = self._free.get()
        try:
            zygote = zygote or _Zygote(locked=self._locked)
            header, results, stdout = zygote.ask({**request, "nonce": nonce, "limits": asdict(self._limits)})
        except (OSError, ValueError) as error:
            if zygote is not None:
                zygote.close()
            zygote = None
            detail = f"the zygote was lost: {type(error).__name__}: {error}"
            return all_failed("crashed", detail, len(inputs), self.engine, milliseconds=_since(began))
        finally:
            self._free.put(zygote)
        return read_outcome(header, results, stdout, nonce, len(inputs), self.engine, _since(began))

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
                [sys.executable, *flags, "-c", BOOT, str(PACKAGE_ROOT), "locked" if locked else "unsafe"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
                start_new_session=True,
            )
        self._reader = self._socket.makefile("rb")
        self._socket.settimeout(START_S)
        try:
            hello = json.loads(self._reader.readline())
        except (OSError, ValueError) as error:
            self.close()
            raise ZygoteError(f"the zygote did not start: {type(error).__name__}") from error
        if "error" in hello:
            self.close()
            raise ZygoteError(hello["error"])
        self.landlock_abi = int(hello["landlock_abi"])

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes, bytes]:
        """Sends one request and reads the answer. Raises OSError or ValueError if the zygote is lost."""
        self._socket.settimeout(request["limits"]["wall_s"] + GRACE_S)
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        header = json.loads(self._reader.readline())
        return header, self._reader.read(header["results"]), self._reader.read(header["stdout"])

    def close(self) -> None:
        """Ends the process and its running child."""
        self._reader.close()
        self._socket.close()
        self._process.kill()
        self._process.wait()


def read_outcome(
    header: dict[str, Any], results: bytes, stdout: bytes, nonce: str, count: int, engine: Engine, milliseconds: float
) -> Outcome:
    """The outcome of a run from the lines that its child wrote. Pure; a line without the nonce makes the run void."""
    facts: dict[str, Any] = {"milliseconds": milliseconds, "stdout": stdout.decode(errors="replace")}
    lines = results.decode(errors="replace").split("\n")
    complete = [line.split(" ", 2) for line in lines[:-1]]
    if any(len(parts) != 3 or parts[0] != nonce for parts in complete) or len(complete) > count + 1:
        return all_failed("crashed", "something else wrote to the result pipe", count, engine, **facts)
    ending, detail = _ending(header)
    if not complete:
        return all_failed(ending, detail, count, engine, **facts)
    (_, kind, text), *answers = complete
    try:
        if kind != "L":
            reason = text if kind == "X" else str(json.loads(text))
            status = "memory" if reason.startswith("MemoryError") else STATUS_OF_KIND.get(kind, "crashed")
            return all_failed(status, reason, count, engine, **facts)
        answered = tuple(_result(kind, text) for _, kind, text in answers)
    except ValueError:
        return all_failed("crashed", "an answer is not an encoded value", count, engine, **facts)
    if len(answered) == count:
        # A memory error of one input is reported as the status of the run.
        out_of_memory = any((result.error or "").startswith("MemoryError") for result in answered)
        return Outcome("memory" if out_of_memory else "ok", answered, engine, **facts)
    missing = (InputResult(error=detail),) * (count - len(answered))
    return Outcome(ending, answered + missing, engine, detail=detail, **facts)


def _result(kind: str, text: str) -> InputResult:
    if kind == "V":
        return InputResult(value=decode(text))
    if kind == "E":
        return InputResult(error=str(json.loads(text)))
    raise ValueError(kind)


def _ending(header: dict[str, Any]) -> tuple[Status, str]:
    """Why the child ended before it had answered all inputs."""
    if header["ended"] == "wall":
        return "timeout", "the limit of wall-clock time ended the run"
    if header["ended"] == "output":
        return "output", "the output exceeds the output limit"
    if header["exit"] in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timeout", "the limit of CPU time ended the run"
    if header["exit"] < 0:
        return "crashed", f"ended by {signal.Signals(-header['exit']).name}"
    return "crashed", f"exited with status {header['exit']} before it had answered"


def _since(began: float) -> float:
    return (time.perf_counter() - began) * 1000

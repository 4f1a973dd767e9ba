"""The nouns of the sandbox: its limits, and what a run of some code came to. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mint.errors import InvalidRequestError

Engine = Literal["monty", "zygote", "unsafe"]
"""`monty`: an interpreter of its own without any door to the machine. `zygote`: CPython in a locked process.
`unsafe`: CPython in a plain process."""

Status = Literal["ok", "error", "syntax_error", "timeout", "memory", "output", "crashed", "unsupported"]
"""`ok`: each input has a value or the exception that it raised. `error`: loading the code failed, or it has no such
function. `syntax_error`: it is not Python. `timeout`, `memory`, `output`: a limit ended it. `crashed`: the process
ended or was tampered with before it had answered. `unsupported`: no engine of this machine can run it."""


@dataclass(frozen=True)
class Limits:
    """What one run, all its inputs together, may use. The defaults suit functions of a few lines.

    A run is always one process with one thread, and can start no other.
    """

    cpu_s: int = 1
    """Seconds of computing; whole, as the kernel counts them."""
    wall_s: float = 2.0
    memory_bytes: int = 64 << 20
    """On top of what the interpreter itself takes."""
    open_files: int = 8
    """Descriptors, the three standard ones and the result pipe included. Nothing can be opened by name."""
    file_bytes: int = 0
    """Size of any file that it writes."""
    output_bytes: int = 64 << 10
    """Of printed text, and again of encoded results."""

    def __post_init__(self) -> None:
        for name, least in (("cpu_s", 1), ("wall_s", 0.01), ("memory_bytes", 1 << 20), ("open_files", 4),
                            ("file_bytes", 0), ("output_bytes", 1)):  # fmt: skip
            if not getattr(self, name) >= least:
                raise InvalidRequestError(
                    f"must be at least {least}",
                    field=f"Limits.{name}",
                    value=getattr(self, name),
                    remedy="Leave it out for the default",
                )


@dataclass(frozen=True)
class Result:
    """What one input gave: a plain value, or the error in words."""

    value: Any = None
    error: str | None = None

    @property
    def returned(self) -> bool:
        """Whether there is a value."""
        return self.error is None


@dataclass(frozen=True)
class Outcome:
    """A run: its status, one `Result` per input in order, and which engine gave it (None: none could).

    `detail` says in words what went wrong as a whole; `stdout` is what the code printed, at most
    `Limits.output_bytes` of it. Nothing here is a verdict: compare values with `same_value`.
    """

    status: Status
    results: tuple[Result, ...]
    engine: Engine | None
    milliseconds: float = 0.0
    stdout: str = ""
    detail: str = ""


def all_failed(status: Status, detail: str, count: int, engine: Engine | None, **fields: Any) -> Outcome:
    """An outcome in which none of `count` inputs has a value."""
    return Outcome(status, (Result(error=detail),) * count, engine, detail=detail, **fields)

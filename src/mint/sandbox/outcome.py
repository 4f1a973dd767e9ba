"""The limits of a sandbox, and the outcome of one run. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mint.errors import InvalidRequestError

Engine = Literal["monty", "zygote", "unsafe"]
"""`monty`: an interpreter without access to the machine. `zygote`: CPython in a locked-down process. `unsafe`: CPython
in a plain process."""

Status = Literal["ok", "error", "syntax_error", "timeout", "memory", "output", "crashed", "unsupported"]
"""`ok`: each input has a value or an exception. `error`: the code could not be loaded, or has no such function.
`syntax_error`: it is not Python. `timeout`, `memory`, `output`: a limit ended the run. `crashed`: the process ended or
was tampered with before it answered. `unsupported`: no engine of this machine can run the code."""


@dataclass(frozen=True)
class Limits:
    """The limits of one run, all inputs together. The defaults suit functions of a few lines.

    A run is one process with one thread, and cannot start another.
    """

    cpu_s: int = 1
    """CPU time; the kernel counts whole seconds."""
    wall_s: float = 2.0
    memory_bytes: int = 64 << 20
    """In addition to the interpreter's own memory."""
    open_files: int = 8
    """File descriptors, including the three standard ones and the result pipe. Nothing can be opened by name."""
    file_bytes: int = 0
    """Size of a file that it writes."""
    output_bytes: int = 64 << 10
    """The limit holds for printed text and, separately, for encoded results."""

    def __post_init__(self) -> None:
        minimums = {
            "cpu_s": 1,
            "wall_s": 0.01,
            "memory_bytes": 1 << 20,
            "open_files": 4,
            "file_bytes": 0,
            "output_bytes": 1,
        }
        for name, least in minimums.items():
            if not getattr(self, name) >= least:
                raise InvalidRequestError(
                    f"must be at least {least}",
                    field=f"Limits.{name}",
                    value=getattr(self, name),
                    remedy="Leave it out for the default",
                )


@dataclass(frozen=True)
class InputResult:
    """The result of one input: a plain value, or an error as text."""

    value: Any = None
    error: str | None = None

    @property
    def returned(self) -> bool:
        """Whether there is a value."""
        return self.error is None


@dataclass(frozen=True)
class Outcome:
    """One run: its status, one `InputResult` per input in order, and the engine that ran it (None: no engine could).

    `detail` says what went wrong with the run as a whole; `stdout` is what the code printed, up to
    `Limits.output_bytes`. An outcome is not a verdict: compare values with `same_value`.
    """

    status: Status
    results: tuple[InputResult, ...]
    engine: Engine | None
    milliseconds: float = 0.0
    stdout: str = ""
    detail: str = ""


def all_failed(status: Status, detail: str, count: int, engine: Engine | None, **fields: Any) -> Outcome:
    """An outcome in which none of `count` inputs has a value."""
    return Outcome(status, (InputResult(error=detail),) * count, engine, detail=detail, **fields)

"""The limits of a sandbox, and the outcome of one run. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mint.errors import InvalidRequestError
from mint.sandbox.safe_text import error_text, value_text
from mint.sandbox.value_encoding import ValueLimitError, decode

Engine = Literal["monty", "zygote", "unsafe"]
"""`monty`: an interpreter without access to the machine. `zygote`: CPython in a locked-down process. `unsafe`: CPython
in a plain process."""

Status = Literal["ok", "error", "syntax_error", "timeout", "memory", "output", "crashed", "unsupported"]
"""`ok`: each input has a value or an exception. `error`: the code could not be loaded, or has no such function.
`syntax_error`: it is not Python. `timeout`, `memory`, `output`: a limit ended the run, or the run of one input
(`output`: of bytes, or of the depth or the items of a value). `crashed`: the process ended or was tampered with before
it answered. `unsupported`: no engine of this machine can run the code."""

MAX_VALUE_DEPTH = 500
SHOWN_CHARACTERS = 1000
BYTES_PER_ITEM = 4
"""An encoded value takes at least as many, as `"", ` does."""


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
    value_depth: int = 200
    """How deeply containers are nested, in an input or a result."""
    value_items: int = 100_000
    """Values at all depths of one result together, containers and keys included."""

    def __post_init__(self) -> None:
        minimums = {
            "cpu_s": 1,
            "wall_s": 0.01,
            "memory_bytes": 1 << 20,
            "open_files": 4,
            "file_bytes": 0,
            "output_bytes": 1,
            "value_depth": 1,
            "value_items": 1,
        }
        for name, least in minimums.items():
            if not getattr(self, name) >= least:
                raise InvalidRequestError(
                    f"must be at least {least}",
                    field=f"Limits.{name}",
                    value=getattr(self, name),
                    remedy="Leave it out for the default",
                )
        if self.value_depth > MAX_VALUE_DEPTH:
            raise InvalidRequestError(
                f"must be at most {MAX_VALUE_DEPTH}: Python compares and shows nested values by recursion",
                field="Limits.value_depth",
                value=self.value_depth,
                remedy="Return a flatter value",
            )

    @property
    def result_items(self) -> int:
        """`value_items`, or fewer if a result of so many cannot fit into `output_bytes`."""
        return min(self.value_items, self.output_bytes // BYTES_PER_ITEM + 1)


@dataclass(frozen=True)
class InputResult:
    """The result of one input: a plain value, or an error as text."""

    value: Any = None
    error: str | None = None

    @property
    def returned(self) -> bool:
        """Whether there is a value."""
        return self.error is None

    def __repr__(self) -> str:
        """Cuts the value, which may be large, and shows any number: `repr` refuses one of more than 4,300 digits."""
        return f"InputResult(value={value_text(self.value, SHOWN_CHARACTERS)}, error={self.error!r})"


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


def status_of(results: Sequence[InputResult]) -> Status:
    """The status of a run that has answered all inputs: a limit that one of them met, or `ok`."""
    errors = [result.error for result in results if result.error is not None]
    if any(error.startswith("MemoryError") for error in errors):
        return "memory"
    return "output" if any(error.startswith(ValueLimitError.__name__) for error in errors) else "ok"


def decoded_result(text: str, limits: Limits) -> InputResult:
    """The result of one input from its encoded value; a value beyond a limit is an error.

    Raises:
        ValueError: the text is not an encoded value.
    """
    try:
        return InputResult(value=decode(text, limits.value_depth, limits.result_items))
    except ValueLimitError as error:
        return InputResult(error=f"{type(error).__name__}: {error}")


def all_failed(status: Status, detail: str, count: int, engine: Engine | None, **fields: Any) -> Outcome:
    """An outcome in which none of `count` inputs has a value. `detail` may be text of the code."""
    detail = error_text(detail)
    return Outcome(status, (InputResult(error=detail),) * count, engine, detail=detail, **fields)

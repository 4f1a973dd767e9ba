"""Runs code in Monty (`pydantic-monty`): a Python interpreter in worker processes, with no door to the machine.

Monty speaks a part of Python, so only values are its last word: an exception may be a gap in the language. Results
leave it as one string per input, never as objects: a small object can stand for a huge or endless one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, Literal

from mint.sandbox.outcome import Engine, Limits, Outcome, Result, Status, all_failed
from mint.sandbox.values import ENCODE_SOURCE, decode

POLICY: Any = {"sleep": "zero", "random_start": {"seed": 0}}
RECURSION_DEPTH = 1000
WORKER_GRACE_S = 2.0

LAZY_NAMES = re.compile(r"\b(map|filter|zip|reversed|enumerate|hash|id|__name__)\b")
"""What Monty answers unlike CPython: iterators are lists there, and hashes and addresses are its own."""

GAPS = re.compile(
    r"NotImplementedError|ModuleNotFoundError|ImportError|Internal error in monty|is not supported|"
    r"NameError: name '(__import__|bytearray|classmethod|compile|delattr|dir|globals|help|input|locals|memoryview|"
    r"property|staticmethod|super|vars|object|breakpoint)'|AttributeError"
)
"""Exceptions that Monty raises where CPython might not."""


class MontyEngine:
    """A pool of Monty workers. `run` may be called by many threads."""

    engine: Engine = "monty"

    def __init__(self, limits: Limits, *, count: int) -> None:
        """ImportError where pydantic-monty is not installed."""
        import pydantic_monty  # deferred: optional, and the zygote has no use for it

        self._monty = pydantic_monty
        self._limits = limits
        self._pool = pydantic_monty.Monty(
            min_processes=1, max_processes=count, request_timeout=limits.cpu_s + WORKER_GRACE_S
        )
        self._pool.__enter__()

    def close(self) -> None:
        """Ends the workers."""
        self._pool.__exit__(None, None, None)

    def run(self, code: str, function: str, inputs: Sequence[tuple[Any, ...]], *, stop_at_error: bool) -> Outcome:
        """The function on each input, in order, in one session.

        With `stop_at_error` an exception ends the run, since another engine will be asked; without, it is that input's
        result, and a gap in the language gives the status `unsupported`.
        """
        began = time.perf_counter()
        printed = _Printed(self._limits.output_bytes)
        results: list[Result] = []
        status: Status = "error"
        detail = ""
        try:
            with self._session() as session:
                # The blank line and the None keep the code from ending in an expression whose value would be converted.
                session.feed_run(f"{code}\n\n\nNone\n", print_callback=printed)
                session.feed_run(f"{ENCODE_SOURCE}\n{function}\nNone\n")
                status = "ok"
                for arguments in inputs:
                    result = self._call(session, function, arguments, printed, began)
                    results.append(result)
                    if result.error is not None and stop_at_error:
                        break
        except _LimitError as limit:
            status, detail = limit.status, str(limit)
        except self._monty.MontySyntaxError as error:
            status, detail = "syntax_error", f"SyntaxError: {error}"
        except self._monty.MontyCrashedError as error:
            status, detail = ("timeout" if error.timed_out else "crashed"), "the Monty worker was lost"
        except (self._monty.MontyError, UnicodeError) as error:
            status, detail = self._why(error, printed)
        milliseconds = (time.perf_counter() - began) * 1000
        facts = {"milliseconds": milliseconds, "stdout": printed.text}
        detail = detail or next((result.error for result in results if result.error is not None), "")
        gap = GAPS.search(detail)
        if gap and status in ("ok", "error"):
            return all_failed("unsupported", f"Monty does not speak this: {detail}", len(inputs), None, **facts)
        missing = (Result(error=detail),) * (len(inputs) - len(results))
        return Outcome(status, (*results, *missing), self.engine, detail=detail if status != "ok" else "", **facts)

    def _session(self) -> Any:
        limits: Any = {
            "max_feed_duration_secs": float(self._limits.cpu_s),
            "max_memory": self._limits.memory_bytes,
            "max_recursion_depth": RECURSION_DEPTH,
        }
        return self._pool.checkout(limits=limits, os_policy=POLICY, assert_message_annotations=False)

    def _call(self, session: Any, function: str, arguments: tuple[Any, ...], printed: _Printed, began: float) -> Result:
        if time.perf_counter() - began > self._limits.wall_s:
            raise _LimitError("timeout", "the wall limit ended it")
        try:
            # An f-string is a string whatever names the code has bound.
            text = session.feed_run(
                f'f"{{encode({function}(*mint_arguments))}}"',
                inputs={"mint_arguments": tuple(arguments)},
                print_callback=printed,
            )
        except self._monty.MontyRuntimeError as error:
            status, detail = self._why(error, printed)
            if status != "error":
                raise _LimitError(status, detail) from error
            return Result(error=detail)
        if len(text) > self._limits.output_bytes:
            raise _LimitError("output", "it returned more than the output limit")
        try:
            return Result(value=decode(text))
        except ValueError as error:
            return Result(error=str(error))

    def _why(self, error: Exception, printed: _Printed) -> tuple[Status, str]:
        text = str(error)[:500]
        if printed.is_full:
            return "output", "it wrote more than the output limit"
        if text.startswith("TimeoutError: feed time limit"):
            return "timeout", "the limit of computing time ended it"
        if text.startswith("MemoryError"):
            return "memory", text
        return "error", text


class _Printed:
    """Collects what is printed, up to a limit, past which it ends the run."""

    def __init__(self, limit_bytes: int) -> None:
        self._room = limit_bytes
        self._pieces: list[str] = []
        self.is_full = False

    def __call__(self, stream: Literal["stdout", "stderr"], text: str) -> None:
        """Called by Monty, in the thread that runs."""
        self._pieces.append(text[: self._room])
        self._room -= len(text)
        if self._room < 0:
            self.is_full = True
            raise ValueError("output limit")

    @property
    def text(self) -> str:
        return "".join(self._pieces)


class _LimitError(Exception):
    """A limit ended the run; the session is of no more use."""

    def __init__(self, status: Status, detail: str) -> None:
        super().__init__(detail)
        self.status: Status = status


def answers_like_python(code: str) -> bool:
    """Whether nothing in the text is known to be answered otherwise by Monty than by CPython.

    A scan of the text, quick and rough: a false alarm costs milliseconds, since the other engine then runs the code.
    """
    if LAZY_NAMES.search(code):
        return False
    brackets: list[str] = []
    for token in re.findall(r"[(\[{}\])]|\bfor\b", code):
        if token == "for":
            if brackets and brackets[-1] == "(":
                return False  # a generator expression, a list in Monty
        elif token in "([{":
            brackets.append(token)
        elif brackets:
            brackets.pop()
    return True

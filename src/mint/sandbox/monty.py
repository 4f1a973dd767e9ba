"""Runs code in Monty (`pydantic-monty`): a Python interpreter in worker processes without access to the machine.

Monty supports a part of Python, so an exception may be a gap in the language; only values are final. Each result is
returned as a string, never as an object, because a small object can expand to a huge or endless one. The string is cut
inside Monty; what else comes from there (an exception's text) is bounded by `Limits.memory_bytes`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, Literal

from mint.sandbox.outcome import Engine, InputResult, Limits, Outcome, Status, all_failed, decoded_result, status_of
from mint.sandbox.safe_text import MAX_ERROR_CHARACTERS, error_text
from mint.sandbox.value_encoding import ENCODE_SOURCE

POLICY: Any = {"sleep": "zero", "random_start": {"seed": 0}}
RECURSION_DEPTH = 1000
WORKER_GRACE_S = 2.0

DIFFERENT_NAMES = re.compile(r"\b(map|filter|zip|reversed|enumerate|hash|id|__name__)\b")
"""Names that give other results in Monty than in CPython: iterators are lists, and hashes and addresses differ."""

GAPS = re.compile(
    r"NotImplementedError|ModuleNotFoundError|ImportError|Internal error in monty|is not supported|"
    r"NameError: name '(__import__|bytearray|classmethod|compile|delattr|dir|globals|help|input|locals|memoryview|"
    r"property|staticmethod|super|vars|object|breakpoint)'|AttributeError"
)
"""Exceptions of Monty for code that CPython might run."""


class MontyEngine:
    """A pool of Monty workers. `run` is thread-safe."""

    engine: Engine = "monty"

    def __init__(self, limits: Limits, *, count: int) -> None:
        """Raises ImportError if pydantic-monty is not installed."""
        import pydantic_monty  # deferred: optional, and the zygote does not need it

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
        """Calls the function with each input, in order, in one session.

        With `stop_at_error` an exception ends the run, because the caller will ask another engine. Without, it is the
        result of that input, and a gap in the language gives the status `unsupported`.
        """
        began = time.perf_counter()
        printed = _Printed(self._limits.output_bytes)
        results: list[InputResult] = []
        status: Status = "error"
        detail = ""
        try:
            with self._session() as session:
                # The last line is None, because Monty would convert the value of a last expression.
                session.feed_run(f"{code}\n\n\nNone\n", print_callback=printed)
                session.feed_run(f"{ENCODE_SOURCE}\n{function}\nNone\n")
                status = "ok"
                for arguments in inputs:
                    result = self._call(session, function, arguments, printed, began)
                    results.append(result)
                    if result.error is not None and stop_at_error and status_of(results) == "ok":
                        break
                status = status_of(results)
        except _LimitError as limit:
            status = limit.status
            detail = str(limit)
        except self._monty.MontySyntaxError as error:
            status = "syntax_error"
            detail = error_text(f"SyntaxError: {error}")
        except self._monty.MontyCrashedError as error:
            status = "timeout" if error.timed_out else "crashed"
            detail = "the Monty worker ended"
        except (self._monty.MontyError, UnicodeError) as error:
            status, detail = self._why(error, printed)
        milliseconds = (time.perf_counter() - began) * 1000
        facts = {"milliseconds": milliseconds, "stdout": printed.text}
        detail = detail or next((result.error for result in results if result.error is not None), "")
        gap = GAPS.search(detail)
        if gap and status in ("ok", "error"):
            return all_failed("unsupported", f"Monty does not support this: {detail}", len(inputs), None, **facts)
        missing = (InputResult(error=detail),) * (len(inputs) - len(results))
        return Outcome(status, (*results, *missing), self.engine, detail=detail if status != "ok" else "", **facts)

    def _session(self) -> Any:
        limits: Any = {
            "max_feed_duration_secs": float(self._limits.cpu_s),
            "max_memory": self._limits.memory_bytes,
            "max_recursion_depth": RECURSION_DEPTH,
        }
        return self._pool.checkout(limits=limits, os_policy=POLICY, assert_message_annotations=False)

    def _call(
        self, session: Any, function: str, arguments: tuple[Any, ...], printed: _Printed, began: float
    ) -> InputResult:
        if time.perf_counter() - began > self._limits.wall_s:
            raise _LimitError("timeout", "the limit of wall-clock time ended the run")
        limits = self._limits
        encoded = f"encode({function}(*mint_arguments), {limits.value_depth}, {limits.result_items})"
        try:
            # An f-string gives a string, whatever names the code has rebound; one character more shows an excess.
            text = session.feed_run(
                f'f"{{{encoded}}}"[:{limits.output_bytes + 1}]',
                inputs={"mint_arguments": tuple(arguments)},
                print_callback=printed,
            )
        except self._monty.MontyRuntimeError as error:
            status, detail = self._why(error, printed)
            if status != "error":
                raise _LimitError(status, detail) from error
            return InputResult(error=detail)
        if len(text) > limits.output_bytes:
            raise _LimitError("output", "the results exceed the output limit")
        try:
            return decoded_result(text, limits)
        except ValueError as error:
            return InputResult(error=str(error))

    def _why(self, error: Exception, printed: _Printed) -> tuple[Status, str]:
        text = error_text(str(error)[:MAX_ERROR_CHARACTERS])
        if printed.is_full:
            return "output", "the printed text exceeds the output limit"
        if text.startswith("TimeoutError: feed time limit"):
            return "timeout", "the limit of CPU time ended the run"
        if text.startswith("MemoryError"):
            return "memory", text
        return "error", text


class _Printed:
    """Collects printed text; ends the run when it exceeds the limit."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._collected = bytearray()
        self.is_full = False

    def __call__(self, stream: Literal["stdout", "stderr"], text: str) -> None:
        """Called by Monty in the thread of the run, with at most a few kilobytes."""
        self._collected += text.encode(errors="replace")
        if len(self._collected) > self._limit_bytes:
            del self._collected[self._limit_bytes :]
            self.is_full = True
            raise ValueError("output limit")

    @property
    def text(self) -> str:
        return self._collected.decode(errors="replace")


class _LimitError(Exception):
    """A limit ended the run; the session cannot be used again."""

    def __init__(self, status: Status, detail: str) -> None:
        super().__init__(detail)
        self.status: Status = status


def agrees_with_python(code: str) -> bool:
    """Whether the text contains nothing for which Monty is known to give another result than CPython.

    A rough scan: a false alarm costs only milliseconds, because the other engine then runs the code.
    """
    if DIFFERENT_NAMES.search(code):
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

"""Runs functions that a model wrote in isolation; chooses the engine and reports which one it was.

First Monty; then CPython in a locked-down child process (the zygote), for code that Monty cannot run or that raised an
exception there. If the needed engine does not exist here, the outcome is `unsupported`. Nothing runs without isolation
unless `unsafe=True`. The sandbox does not know the expected answers: the caller compares values with `same_value`, so a
program can only win by returning the right ones.
"""

from __future__ import annotations

import keyword
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from mint.errors import InvalidRequestError
from mint.sandbox.monty import MontyEngine, agrees_with_python
from mint.sandbox.outcome import Engine, Limits, Outcome, all_failed
from mint.sandbox.safe_text import value_text
from mint.sandbox.value_encoding import ValueLimitError, encode_input
from mint.sandbox.zygote_pool import ZygoteError, ZygotePool

ALL_ENGINES: tuple[Engine, ...] = ("monty", "zygote")


@dataclass(frozen=True)
class SandboxLevel:
    """The engines of this machine, best first; `missing` gives the reason why an engine is not available."""

    engines: tuple[Engine, ...]
    landlock_abi: int
    missing: dict[str, str]


class Sandbox:
    """A context manager; `run` is thread-safe."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        unsafe: bool = False,
        engines: Sequence[Engine] = ALL_ENGINES,
        workers: int | None = None,
    ) -> None:
        """Starts the engines.

        Args:
            limits: The limits of each run; None is `Limits()`.
            unsafe: Run everything in a plain process with this user's rights, files and network.
            engines: The engines to use, of `monty` and `zygote`.
            workers: Processes per engine; None is one per core, up to 8.
        """
        self.limits = limits or Limits()
        count = workers or min(os.cpu_count() or 1, 8)
        missing: dict[str, str] = {}
        self._monty = None if unsafe else _start_monty(self.limits, count, engines, missing)
        self._python = _start_python(self.limits, count, engines, missing, unsafe=unsafe)
        open_engines = [engine for engine in (self._monty, self._python) if engine is not None]
        self.level = SandboxLevel(
            tuple(engine.engine for engine in open_engines),
            self._python.landlock_abi if self._python else 0,
            missing,
        )

    def run(self, code: str, function: str, inputs: Sequence[tuple[Any, ...]]) -> Outcome:
        """Runs `code` and calls its `function` with each tuple of arguments, in order, in one fresh namespace.

        Raises:
            InvalidRequestError: `function` is not a name, or an input is not made of plain values (None, bool, int,
                float, str, bytes, list, tuple, set, frozenset, dict) or is nested deeper than `Limits.value_depth`.
        """
        _check(function, inputs, self.limits)
        unsupported = all_failed("unsupported", f"no engine here: {self.level.missing}", len(inputs), None)
        if self._monty and (self._python is None or agrees_with_python(code)):
            outcome = self._monty.run(code, function, inputs, stop_at_error=self._python is not None)
            has_all_values = outcome.status == "ok" and all(result.returned for result in outcome.results)
            if self._python is None or has_all_values or outcome.status in ("timeout", "memory", "output"):
                return outcome
        return self._python.run(code, function, inputs) if self._python else unsupported

    def close(self) -> None:
        """Ends all processes; a second call does nothing."""
        for engine in (self._monty, self._python):
            if engine is not None:
                engine.close()
        self._monty = self._python = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def sandbox_level() -> SandboxLevel:
    """The engines that start on this machine."""
    with Sandbox(workers=1) as sandbox:
        return sandbox.level


def _start_monty(limits: Limits, count: int, engines: Sequence[Engine], missing: dict[str, str]) -> MontyEngine | None:
    if "monty" not in engines:
        return None
    try:
        return MontyEngine(limits, count=count)
    except ImportError:
        missing["monty"] = "pydantic-monty is not installed"
    except (OSError, RuntimeError) as error:
        missing["monty"] = f"does not start: {error}"
    return None


def _start_python(
    limits: Limits, count: int, engines: Sequence[Engine], missing: dict[str, str], *, unsafe: bool
) -> ZygotePool | None:
    if not unsafe and "zygote" not in engines:
        return None
    try:
        return ZygotePool(limits, count=count, locked=not unsafe)
    except ZygoteError as error:
        missing["unsafe" if unsafe else "zygote"] = str(error)
    return None


def _check(function: str, inputs: Sequence[tuple[Any, ...]], limits: Limits) -> None:
    if not function.isidentifier() or keyword.iskeyword(function):
        raise InvalidRequestError("is not a name", field="function", value=function, remedy="Give the bare name")
    for item in inputs:
        try:
            encode_input(tuple(item), limits.value_depth)
        except (TypeError, ValueLimitError) as error:
            raise InvalidRequestError(
                str(error),
                field="inputs",
                value=value_text(item, 100),
                remedy="Use None, bool, int, float, str, bytes and containers",
            ) from error

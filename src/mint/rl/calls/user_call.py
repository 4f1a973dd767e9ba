"""One call of a user's function: what it is, and what came of it. Data only."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CallResult:
    """What a call returned, or the exception that it raised; `timed_out` where it did neither in time.

    `seconds` is the time of the call itself, without its wait for a thread; `attempts` counts it and those before it.
    """

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False
    seconds: float = 0.0
    attempts: int = 1

    @property
    def failure(self) -> str | None:
        """The failure in words, None for a success."""
        if self.error is None:
            return None
        said = str(self.error)
        if self.timed_out:
            return said
        return f"{type(self.error).__name__}: {said}" if said else type(self.error).__name__


def timed_out(timeout_s: float) -> CallResult:
    """The result of a call that did not end in time."""
    return CallResult(error=TimeoutError(f"no answer within {timeout_s:g} s"), timed_out=True, seconds=timeout_s)


class UserCall:
    """A call that waits or runs. `began` is the clock's time when it started to run, None while it waits. `started`: an
    event loop has started it.

    `awaitable` is what the function returned where that must be awaited. `abandoned`: nobody waits for it any more.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments
        self.awaitable: Awaitable[Any] | None = None
        self.began: float | None = None
        self.started = False
        self.abandoned = False
        self.result: Future[CallResult] = Future()
        self._lock = threading.Lock()

    def resolve(self, result: CallResult) -> None:
        """Sets the result, unless there is one: a call may end while it is given up."""
        with self._lock:
            if not self.result.done():
                self.result.set_result(result)

"""Calls a function again after a failure, with growing pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mint.rl.calls.call_pool import CallPool
from mint.rl.calls.user_call import CallResult
from mint.rl.reward import UnsupportedError

LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class Retries:
    """At most `count` more attempts. The first pause has `first_pause_s` seconds, each further one twice as many."""

    count: int = 0
    first_pause_s: float = 1.0

    async def call(self, calls: CallPool, function: Callable[..., Any], *arguments: Any) -> CallResult:
        """The first success, or the last failure. A time-out counts as a failure; `UnsupportedError` is final."""
        result = await calls.call(function, *arguments)
        while result.error is not None and not isinstance(result.error, UnsupportedError):
            if result.attempts > self.count:
                break
            await asyncio.sleep(min(self.first_pause_s * 2 ** (result.attempts - 1), LONGEST_PAUSE_S))
            result = replace(await calls.call(function, *arguments), attempts=result.attempts + 1)
        return result

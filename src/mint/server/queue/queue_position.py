"""What somebody who waits is told: how many go before, about how long it takes, and what for. Pure.

Knows no HTTP; the names of the fields are the protocol's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from mint.server.ids import RequestName, request_id
from mint.server.queue.eta import SAMPLE, Pace
from mint.server.queue.scheduler import Pending

LONG_WAIT_S = 60.0
NAMED_GAPS = 3
RETRY_AFTER_S = 1
"""Waiting is done here, in the long poll: whoever asks again need not wait as well."""

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


@dataclass(frozen=True)
class QueueFacts:
    """`position` counts the requests that go before, a training request that runs included; samples that are under way
    hold nobody up. `wait_s` is until the result."""

    status: Literal["running", "queued", "held"]
    state: QueueState
    reason: str
    depth: int
    position: int
    wait_s: float | None
    progress: float | None = None

    def body(self, name: str) -> dict[str, Any]:
        """The answer to whoever asks too early."""
        known = {"estimated_wait_s": self.wait_s, "progress": self.progress}
        return {
            "type": "try_again",
            "request_id": name,
            "status": self.status,
            "queue_state": self.state,
            "queue_state_reason": self.reason,
            "queue_depth": self.depth,
            "queue_position": self.position,
            "retry_after_s": RETRY_AFTER_S,
            **{key: round(value, 3) for key, value in known.items() if value is not None},
        }

    def headers(self) -> dict[str, str]:
        """The same as headers."""
        known = {} if self.wait_s is None else {"X-Queue-ETA-S": f"{self.wait_s:.1f}"}
        return {
            "Retry-After": str(RETRY_AFTER_S),
            "X-Queue-Depth": str(self.depth),
            "X-Queue-Position": str(self.position),
            "X-Queue-Status": self.status,
            **known,
        }


class QueueView:
    """All that waits at one moment, so arranged that any number of waiters can be told about it."""

    def __init__(self, pending: Pending, pace: Pace) -> None:
        self._pace = pace
        self.depth = len(pending.training) + len(pending.samples)
        self._kinds = {(item.model_id, item.seq_id): item.kind for item in pending.training}
        numbers: defaultdict[str, list[int]] = defaultdict(list)
        for item in pending.training:
            numbers[item.model_id].append(item.seq_id)
        self._numbers = {model_id: sorted(found) for model_id, found in numbers.items()}
        self._missing = {
            model_id: _first_missing(pending.next_seq.get(model_id, found[0]), found)
            for model_id, found in self._numbers.items()
        }
        by_arrival = sorted(
            [(item.arrived_at, request_id(item.model_id, item.seq_id), item.kind) for item in pending.training]
            + [(item.arrived_at, item.request_id, SAMPLE) for item in pending.samples]
        )
        self._place = {name: place for place, (_, name, _) in enumerate(by_arrival)}
        each_s = {kind: pace.each_s(kind) for kind in {kind for _, _, kind in by_arrival}}
        self._before_s = list(accumulate((each_s[kind] for _, _, kind in by_arrival), initial=0.0))

    def facts(self, name: RequestName, now: float, *, at_bound: bool = False) -> QueueFacts:
        """What is known of a request that waits or runs. `at_bound`: its owner may not have more waiting requests."""
        text = request_id(name.owner, name.number)
        running = self._pace.running(text)
        if running is not None or text not in self._place:
            elapsed_s = 0.0 if running is None else now - running.since
            typical_s = 0.0 if running is None else self._pace.typical_s(running.kind)
            progress = min(0.99, elapsed_s / typical_s) if typical_s else None
            left_s = max(0.0, typical_s - elapsed_s)
            return QueueFacts("running", "active", "is being worked on", self.depth, 0, left_s, progress)
        place = self._place[text]
        missing = [number for number in self._missing.get(name.owner, ()) if number < name.number]
        if missing:
            numbers = ", ".join(map(str, missing))
            reason = f"waits for request {numbers} of {name.owner}, which has not arrived"
            earlier = bisect_left(self._numbers[name.owner], name.number)
            return QueueFacts("held", "active", reason, self.depth, earlier, None)
        own_s = self._pace.typical_s(self._kinds.get((name.owner, name.number), SAMPLE))
        before = self._pace.training()
        left_s = 0.0 if before is None else max(0.0, self._pace.typical_s(before.kind) - (now - before.since))
        wait_s = self._before_s[place] + own_s + left_s
        return self._queued(place + (before is not None), wait_s, at_bound=at_bound)

    def _queued(self, position: int, wait_s: float, *, at_bound: bool) -> QueueFacts:
        state: QueueState = "paused_capacity" if position and wait_s > LONG_WAIT_S else "active"
        if at_bound:
            state = "paused_rate_limit"
        told = f"{position} requests go before it" if position != 1 else "1 request goes before it"
        reason = f"{told}; its result is expected in about {math.ceil(wait_s)} s" if wait_s else told
        return QueueFacts("queued", state, reason, self.depth, position, wait_s)


def _first_missing(start: int, numbers: Sequence[int]) -> list[int]:
    """The first few numbers from `start` on that are not among these sorted ones, up to the last of them."""
    missing: list[int] = []
    expected = start
    for number in numbers:
        while expected < number and len(missing) < NAMED_GAPS:
            missing.append(expected)
            expected += 1
        expected = max(expected, number + 1)
        if len(missing) == NAMED_GAPS:
            break
    return missing

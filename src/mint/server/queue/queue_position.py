"""What a client that waits is told: how many requests go before its own, how long it will take about, and why.

Knows no HTTP; the names of the fields and headers are the protocol's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from mint.server.ids import RequestId, request_id
from mint.server.queue.eta import SAMPLE, Eta
from mint.server.queue.scheduler import Pending

LONG_WAIT_S = 60.0
MAX_NAMED_GAPS = 3
RETRY_AFTER_S = 1
"""The server holds a poll open while the request waits, so a client that asks again need not pause first."""

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


@dataclass(frozen=True)
class QueuePosition:
    """Where a request is.

    `position` counts the requests that go before it, with the training request that runs, but without running samples
    (they hold up nobody). `wait_s` is the time until the result; `depth` is how many requests wait in all.
    """

    status: Literal["running", "queued", "held"]
    state: QueueState
    reason: str
    depth: int
    position: int
    wait_s: float | None
    progress: float | None = None

    def body(self, name: str) -> dict[str, Any]:
        """The body of the "try again" response."""
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
        """The headers of the "try again" response."""
        known = {} if self.wait_s is None else {"X-Queue-ETA-S": f"{self.wait_s:.1f}"}
        return {
            "Retry-After": str(RETRY_AFTER_S),
            "X-Queue-Depth": str(self.depth),
            "X-Queue-Position": str(self.position),
            "X-Queue-Status": self.status,
            **known,
        }


class QueueIndex:
    """The queue at one moment, indexed so that any number of waiting clients can be told their positions."""

    def __init__(self, pending: Pending, eta: Eta, *, storage_problem: str = "") -> None:
        """`storage_problem` says why training waits, if it does."""
        self._eta = eta
        self._postponed = {item.request_id: item.waits_for for item in pending.samples if item.waits_for}
        if storage_problem:
            training = (request_id(item.model_id, item.seq_id) for item in pending.training)
            self._postponed.update(dict.fromkeys(training, storage_problem))
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
        delay_s = {kind: eta.delay_s(kind) for kind in {kind for _, _, kind in by_arrival}}
        self._before_s = list(accumulate((delay_s[kind] for _, _, kind in by_arrival), initial=0.0))

    def position(self, name: RequestId, now: float, *, at_limit: bool = False) -> QueuePosition:
        """Where a request that waits or runs is. `at_limit`: its owner may have no more waiting requests."""
        text = request_id(name.target_id, name.number)
        started = self._eta.started(text)
        if started is not None or text not in self._place:
            elapsed_s = 0.0 if started is None else now - started.started_at
            typical_s = 0.0 if started is None else self._eta.typical_s(started.kind)
            progress = min(0.99, elapsed_s / typical_s) if typical_s else None  # 1 would say that it is done
            left_s = max(0.0, typical_s - elapsed_s)
            return QueuePosition("running", "active", "is being worked on", self.depth, 0, left_s, progress)
        place = self._place[text]
        if text in self._postponed:
            return QueuePosition("held", "paused_capacity", self._postponed[text], self.depth, place, None)
        missing = [number for number in self._missing.get(name.target_id, ()) if number < name.number]
        if missing:
            numbers = ", ".join(map(str, missing))
            reason = f"waits for request {numbers} of {name.target_id}, which has not arrived"
            earlier = bisect_left(self._numbers[name.target_id], name.number)
            return QueuePosition("held", "active", reason, self.depth, earlier, None)
        own_s = self._eta.typical_s(self._kinds.get((name.target_id, name.number), SAMPLE))
        before = self._eta.started_training()
        left_s = 0.0 if before is None else max(0.0, self._eta.typical_s(before.kind) - (now - before.started_at))
        wait_s = self._before_s[place] + own_s + left_s
        return self._queued(place + (before is not None), wait_s, at_limit=at_limit)

    def _queued(self, position: int, wait_s: float, *, at_limit: bool) -> QueuePosition:
        state: QueueState = "paused_capacity" if position and wait_s > LONG_WAIT_S else "active"
        if at_limit:
            state = "paused_rate_limit"
        told = f"{position} requests go before it" if position != 1 else "1 request goes before it"
        reason = f"{told}; its result is expected in about {math.ceil(wait_s)} s" if wait_s else told
        return QueuePosition("queued", state, reason, self.depth, position, wait_s)


def _first_missing(start: int, numbers: Sequence[int]) -> list[int]:
    """The first few numbers from `start` on that are not among these sorted ones, up to the last of them."""
    missing: list[int] = []
    expected = start
    for number in numbers:
        while expected < number and len(missing) < MAX_NAMED_GAPS:
            missing.append(expected)
            expected += 1
        expected = max(expected, number + 1)
        if len(missing) == MAX_NAMED_GAPS:
            break
    return missing

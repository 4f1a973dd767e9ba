"""How far a rank has come, and how a group notices one that is frozen or stuck.

A frozen rank gives no sign of life. A stuck one does, from its own thread, while the others wait for it in a
collective. So each rank counts its steps (layers, micro-batches and collectives) and says whether it waits.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """A sign of life: the steps that the rank has taken since its start, and whether it waits in a collective."""

    steps: int
    waits: bool


class Progress:
    """The steps of one rank. One thread takes them, any thread may read."""

    def __init__(self) -> None:
        self._steps = 0
        self._waits = False

    @property
    def report(self) -> Report:
        """How far the rank is now."""
        return Report(self._steps, self._waits)

    def advance(self) -> None:
        """Counts a step."""
        self._steps += 1

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Around a collective, in which the rank waits for the others."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
            self._steps += 1


class Watch:
    """Notices, while the ranks of a group work, that one is frozen or stuck. It is told the time, in seconds.

    A rank is frozen that says nothing for `silence_s`. The group is stuck if a rank waits in a collective, and none has
    taken a step for `deadline_s`.
    """

    def __init__(self, world: int, *, silence_s: float, deadline_s: float, now: float) -> None:
        self._silence_s, self._deadline_s = silence_s, deadline_s
        self._heard = [now] * world
        self._reports: list[Report | None] = [None] * world
        self._moved = now

    def hear(self, rank: int, report: Report, now: float) -> None:
        """Takes a sign of life."""
        before = self._reports[rank]
        if before is None or before.steps != report.steps:
            self._moved = now
        self._heard[rank], self._reports[rank] = now, report

    def find_lost(self, working: Collection[int], now: float) -> str | None:
        """What is wrong with one of the ranks that still work; None: nothing."""
        for rank in working:
            if now - self._heard[rank] > self._silence_s:
                return f"rank {rank} is silent since {now - self._heard[rank]:.0f} s"
        waiting = [rank for rank in working if (own := self._reports[rank]) is not None and own.waits]
        if not waiting or now - self._moved <= self._deadline_s:
            return None
        stuck = [rank for rank in working if rank not in waiting]
        names = f"rank {', '.join(map(str, stuck))} is stuck" if stuck else "all ranks wait for each other"
        return f"{names}: none has taken a step for {now - self._moved:.0f} s, and {len(waiting)} wait"

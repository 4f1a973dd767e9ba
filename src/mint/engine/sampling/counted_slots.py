"""Slots of one allocation that are shared by reference counts: the pages of a KV cache, the states of delta nets."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np


class CountedSlots(ABC):
    """`count` slots with a number of holders each. Take slots through a `Lease`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.holders = np.zeros(count, np.int32)
        """The number of holders of each slot."""
        self._touched = 0  # slots from here on were never taken
        self._unclean: list[np.ndarray] = []  # free slots that are cleared before the next ones are taken

    @property
    def free(self) -> int:
        """Slots without a holder."""
        return self.count - int(np.count_nonzero(self.holders[: self._touched]))

    def take(self, count: int) -> np.ndarray | None:
        """Takes `count` free slots, consecutive ones if possible; None where too few are free."""
        if self._unclean:
            unclean, self._unclean = self._unclean, []
            self.clear(np.concatenate(unclean))
        free = np.flatnonzero(self.holders[: self._touched + count] == 0)
        if len(free) < count:
            return None
        runs = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1) if count else free[:0]
        start = int(runs[0]) if len(runs) else 0
        slots = free[start : start + count]
        self.holders[slots] = 1
        if count:
            self._touched = max(self._touched, int(slots[-1]) + 1)
        return slots

    def hold(self, slots: np.ndarray) -> None:
        """Adds one holder to each of `slots`; a slot may occur several times."""
        np.add.at(self.holders, slots, 1)

    def release(self, slots: np.ndarray) -> None:
        """Takes one holder from each of `slots`."""
        np.subtract.at(self.holders, slots, 1)

    def clear_later(self, slots: np.ndarray) -> None:
        """Clears free `slots` before any slot is taken again."""
        self._unclean.append(slots)

    @abstractmethod
    def clear(self, slots: np.ndarray) -> None:
        """Makes free `slots` harmless that may contain NaN."""


class Lease:
    """The slots that one sampler holds. They are released when the lease is garbage-collected, however the sampler
    ended."""

    def __init__(self, slots: CountedSlots) -> None:
        self._slots = slots
        self._held = np.zeros(slots.count, np.int32)

    def take(self, count: int) -> np.ndarray | None:
        """See `CountedSlots.take`."""
        taken = self._slots.take(count)
        if taken is not None:
            self._held[taken] += 1
        return taken

    def hold(self, slots: np.ndarray) -> None:
        """Adds one holder to each of `slots`; a slot may occur several times."""
        np.add.at(self._slots.holders, slots, 1)
        np.add.at(self._held, slots, 1)

    def release(self, slots: np.ndarray, *, is_finite: bool = True) -> None:
        """Takes one holder from each of `slots`. If not `is_finite`, they may contain NaN, and are cleared once they
        are free."""
        np.subtract.at(self._slots.holders, slots, 1)
        np.subtract.at(self._held, slots, 1)
        if not is_finite:
            self._slots.clear(slots[self._slots.holders[slots] == 0])

    def __del__(self) -> None:
        left = np.flatnonzero(self._held)
        if len(left):
            np.subtract.at(self._slots.holders, left, self._held[left])
            # Not now: torch may be compiling, and would take these operations for a part of what it compiles.
            self._slots.clear_later(left[self._slots.holders[left] == 0])

"""Slots that samplers share: who holds them, and when what a lost sampler left behind is cleared."""

from __future__ import annotations

import numpy as np

from mint.engine.sampling.counted_slots import CountedSlots, Lease


class _Values(CountedSlots):
    """One number for each slot; those that may be NaN are cleared to 0."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.values = np.zeros(count)

    def clear(self, slots: np.ndarray) -> None:
        self.values[slots] = 0


def test_what_a_lost_sampler_held_is_free_at_once_and_cleared_before_it_is_taken_again() -> None:
    slots = _Values(4)
    lost, other = Lease(slots), Lease(slots)
    own = lost.take(3)
    assert own is not None and slots.free == 1
    other.hold(own[:1])
    slots.values[own] = np.nan
    del lost
    assert slots.free == 3
    assert np.isnan(slots.values[own]).all()  # torch may be compiling in this thread
    taken = other.take(3)
    assert taken is not None and not np.isnan(slots.values[taken]).any()
    assert np.isnan(slots.values[own[0]])  # somebody holds it


def test_slots_that_are_released_with_what_is_not_finite_are_cleared_once_nobody_holds_them() -> None:
    slots = _Values(2)
    first, second = Lease(slots), Lease(slots)
    own = first.take(1)
    assert own is not None
    second.hold(own)
    slots.values[own] = np.nan
    first.release(own, is_finite=False)
    assert np.isnan(slots.values[own]).all()
    second.release(own, is_finite=False)
    assert not slots.values[own].any()

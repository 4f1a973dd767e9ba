"""Tells a watch of the tokens as they come, and asks it which jobs nobody wants any more.

Knows nothing of logits, caches or who watches. Letters: J jobs of one sampler · R sequences of one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mint.engine.protocol import SampleWatch


class Following:
    """A watch over one sampler's jobs, which may be some of a call's only."""

    def __init__(self, watch: SampleWatch, places: Sequence[int]) -> None:
        """`places[j]` is the place in the call of the sampler's job j."""
        self._watch = watch
        self._places = places
        followed, listeners = frozenset(watch.jobs), frozenset(watch.listeners)
        self._followed = [job for job, place in enumerate(places) if place in followed]
        self._listening = np.array([place in listeners for place in places], bool)
        self.has_listeners = bool(self._listening.any())
        self.cancelled = np.zeros(len(places), bool)
        """Bool [J]."""

    def ask(self, finished: Callable[[], np.ndarray]) -> bool:
        """Notes who is cancelled among the jobs that are not `finished`, bool [J]; whether there is a new one."""
        unwanted = [job for job in self._followed if self._watch.is_cancelled(self._places[job])]
        if not unwanted:
            return False
        done = self.cancelled | finished()
        found = [job for job in unwanted if not done[job]]
        self.cancelled[found] = True
        return bool(found)

    def tell(self, jobs: np.ndarray, samples: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """One token of each of some sequences, all [R]; those of jobs without a listener are passed over."""
        for row in np.flatnonzero(self._listening[jobs]).tolist():
            place = self._places[int(jobs[row])]
            self._watch.token(place, int(samples[row]), int(tokens[row]), float(logprobs[row]))

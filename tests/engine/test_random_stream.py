"""The random stream: uniform, and a function of its counters alone."""

from __future__ import annotations

import numpy as np

from mint.engine.drawing.random_stream import uniform

FROZEN = [0.13870941014555427, 0.609394524568175, 0.8272724219886994]


def test_values_depend_on_the_counters_only() -> None:
    seeds, samples, positions = (np.arange(50, dtype=np.uint64) * factor for factor in (7, 3, 1))
    together = uniform(seeds, samples, positions)
    alone = [uniform(seeds[i : i + 1], samples[i : i + 1], positions[i : i + 1])[0] for i in range(50)]
    assert together.tolist() == alone


def test_the_stream_never_changes_between_versions() -> None:
    zero, seven = np.zeros(1, np.uint64), np.full(1, 7, np.uint64)
    found = [
        float(uniform(*counters)[0]) for counters in ((zero, zero, zero), (seven, zero, zero), (zero, zero, seven))
    ]
    assert found == FROZEN


def test_values_are_uniform_along_every_counter() -> None:
    count = 100_000
    grid, zero = np.arange(count), np.zeros(count, np.int64)
    for counters in ((grid, zero, zero), (zero, grid, zero), (zero, zero, grid)):
        values = uniform(*(np.asarray(counter, np.uint64) for counter in counters))
        assert values.min() >= 0 and values.max() < 1
        counts = np.bincount((values * 100).astype(int), minlength=100)
        assert ((counts - 1000) ** 2 / 1000).sum() < 160  # chi-square, 99 degrees: p > 0.0001
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.015

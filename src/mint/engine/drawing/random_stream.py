"""Counter-based random numbers: a pure function of (seed, sample index, position), so no draw can disturb another.

SplitMix64's finaliser (https://prng.di.unimi.it/splitmix64.c), applied once per counter. Not for secrets.
"""

from __future__ import annotations

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: np.ndarray, samples: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Float64 in [0, 1), one per row; `seeds` uint64, `samples` and `positions` non-negative integers, all [R]."""
    return uniform_of(streams(seeds, samples), positions)


def streams(seeds: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """The part that all positions of a sample share, uint64 [R]: the first argument of `uniform_of`."""
    return _mix(_mix(seeds.astype(np.uint64)) ^ samples.astype(np.uint64))


def uniform_of(streams: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Same as `uniform`, from the stream numbers that `streams` returns."""
    bits = _mix(streams ^ positions.astype(np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # modulo 2^64, on purpose
        bits = bits + _STEP
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))

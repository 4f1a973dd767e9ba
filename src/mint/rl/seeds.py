"""Seeds that depend on whole numbers alone, so that a run repeats and resumes bit for bit."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def mix_seed(*parts: int) -> int:
    """One 63-bit seed from several whole numbers; a change in any part changes all bits (splitmix64 finaliser)."""
    state = 0
    for part in parts:
        state = (state ^ (part & _MASK)) * 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state = (state ^ (state >> 31)) + 0x9E3779B97F4A7C15 & _MASK
    return state >> 1

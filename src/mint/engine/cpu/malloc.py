"""How much freed memory glibc keeps for the next step instead of handing it back to the system.

A training step takes again the hundred megabytes that the last one freed; had they been handed back, each page would
cost a fault: a tenth of a small model's step. Knows nothing of tensors; does nothing where the C library is not glibc.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of mallopt(3)

KEPT = {_MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 256 << 20, _TOP_PAD: 64 << 20}
"""Blocks of 32 MB and more are still handed back at once; of free memory at the end of a heap, all but 64 MB as soon as
it is 256 MB."""


def keep_freed_memory() -> bool:
    """Sets glibc's thresholds for this process; whether it did."""
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  (absent elsewhere, where mallopt may mean something else)
        return all(library.mallopt(ctypes.c_int(name), ctypes.c_int(value)) for name, value in KEPT.items())
    except (OSError, AttributeError, TypeError):
        return False


def hand_back_freed_memory() -> None:
    """Hands back what is free now, between what is in use as well; elsewhere than with glibc it does nothing."""
    try:
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
    except (OSError, AttributeError, TypeError):
        return

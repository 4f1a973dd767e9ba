"""Sets how much freed memory glibc keeps for the next step instead of returning it to the system.

A training step allocates again the hundred megabytes that the last one freed. Returned to the system, each page would
cost a page fault: a tenth of a small model's step. Does nothing where the C library is not glibc.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of mallopt(3)

RETAINED_BYTES = {_MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 256 << 20, _TOP_PAD: 64 << 20}
"""Blocks of 32 MB and more are still returned at once. Free memory at the end of a heap is returned from 256 MB on, all
but 64 MB."""


def keep_freed_memory() -> bool:
    """Sets glibc's thresholds for this process; returns whether it could."""
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  (absent elsewhere, where mallopt may mean something else)
        return all(library.mallopt(ctypes.c_int(name), ctypes.c_int(value)) for name, value in RETAINED_BYTES.items())
    except (OSError, AttributeError, TypeError):
        return False


def hand_back_freed_memory() -> None:
    """Returns all free memory to the system, also from gaps between used blocks. Does nothing without glibc."""
    try:
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
    except (OSError, AttributeError, TypeError):
        return

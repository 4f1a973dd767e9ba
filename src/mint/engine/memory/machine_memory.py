"""The memory that this machine has, and what of it is free (the limits of containers count); how much freed memory
glibc keeps for the next step instead of returning it to the system; and memory on huge pages.

A training step allocates again the hundred megabytes that the last one freed. Returned to the system, each page would
cost a page fault: a tenth of a small model's step.

A product with one row reads every frozen matrix once, at the speed of the memory. On pages of 4 KB the processor looks
up hundreds of thousands of addresses meanwhile, and stops to fetch ahead at the end of each page.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of mallopt(3)

RETAINED_BYTES = {_MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 256 << 20, _TOP_PAD: 64 << 20}
"""Blocks of 32 MB and more are still returned at once. Free memory at the end of a heap is returned from 256 MB on, all
but 64 MB."""

HUGE_PAGE_BYTES = 2 << 20
BLOCK_BYTES = 16 << 20
"""Parts share blocks of at least this size, because most matrices are not a multiple of a page. A block is freed with
the last of its parts, so larger blocks could hold more memory back."""

MIN_PART_BYTES = 1 << 19
"""Smaller matrices stay in a cache, and some of them are made anew after each training step."""

PART_ALIGNMENT = 64

FREE_SHARE = 2
"""Where the system does not tell what is free, one part in so many of its memory is."""


class HugePages:
    """Hands out parts of blocks on pages of 2 MB, where the system has them."""

    def __init__(self) -> None:
        self._free = memoryview(b"")

    def take(self, size: int) -> memoryview | None:
        """`size` bytes of undefined content, which live as long as the view; None for a small part, or where no block
        can be had."""
        if size < MIN_PART_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
            return None
        if size > len(self._free):
            try:
                self._free = _map_block(max(size, BLOCK_BYTES))
            except OSError:
                return None
        own, self._free = self._free[:size], self._free[-(-size // PART_ALIGNMENT) * PART_ALIGNMENT :]
        return own


def huge_block(size: int, least: int = RETAINED_BYTES[_MMAP_THRESHOLD]) -> memoryview | None:
    """`size` bytes of undefined content on pages of 2 MB, which live as long as the view; None for less than `least`,
    by default what glibc returns to the system at once, or where no block can be had.

    For the logits of a chunk, say: on pages of 4 KB their first writes take as long as their product.
    """
    if size < least or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        return _map_block(size)[:size]
    except OSError:
        return None


def _map_block(size: int) -> memoryview:
    """Whole pages of fresh memory. The system takes small pages where it has no large ones left.

    Raises:
        OSError: the process may not take so much more memory.
    """
    size = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    block = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(block)) % HUGE_PAGE_BYTES
    with contextlib.suppress(OSError):  # a kernel without huge pages
        block.madvise(mmap.MADV_HUGEPAGE, start, size)
    return memoryview(block)[start : start + size]


def memory_bytes(root: Path = ROOT) -> int | None:
    """The memory that this process may use: the machine's, or its container's if that is less. None if unknown."""
    limits = [limit for limit, _ in _groups(root)]
    total = _meminfo(root).get("MemTotal")
    if total is None:
        try:
            total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return min(limits, default=None)
    return min([total, *limits])


def free_memory_bytes(root: Path = ROOT) -> int | None:
    """The memory that this process could still take without swapping; None if unknown.

    Counts files in the page cache as free, as the kernel does. A system that does not tell (macOS) is taken to have
    a half of its memory free.
    """
    found = [limit - used for limit, used in _groups(root)]
    available, total = _meminfo(root).get("MemAvailable"), memory_bytes(root)
    if available is None and total is not None:
        available = total // FREE_SHARE
    if available is not None:
        found.append(available)
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        found.append(address_space - _virtual_bytes(root))
    return max(0, min(found)) if found else None


def keep_freed_memory() -> bool:
    """Sets glibc's thresholds for this process; returns whether it could. Does nothing with another C library."""
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


def _meminfo(root: Path) -> dict[str, int]:
    """The numbers of `/proc/meminfo` in bytes, by name."""
    found: dict[str, int] = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found


def _virtual_bytes(root: Path) -> int:
    pages = _text(root / "proc/self/statm").split()
    return int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """The limit of each control group that this process is in, and what the group uses without its page cache."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            top = root / "sys/fs/cgroup"
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top if ".." in path else top / path.lstrip("/")
        # a container often sees its own group at the top, whatever its path is called outside
        for folder in dict.fromkeys((group, *group.parents)):
            if not folder.is_relative_to(top):
                break
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None:
                yield limit, used - _cached(folder / "memory.stat", names[2])


def _cached(file: Path, name: str) -> int:
    rows = dict(line.split(maxsplit=1) for line in _text(file).splitlines() if " " in line)
    return int(rows.get(name, 0))


def _number(file: Path) -> int | None:
    """The number in a file; None if there is none, as where a group has no limit ("max")."""
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""

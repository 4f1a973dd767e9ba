"""The memory of a machine is read from the kernel's files, with the limits of containers."""

from __future__ import annotations

import os
from pathlib import Path

from mint.engine.memory.machine_memory import free_memory_bytes, memory_bytes


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\n"


def test_without_a_container_it_is_the_machines(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/user\n"})
    assert memory_bytes(root) == 1000 * 1024 and free_memory_bytes(root) == 600 * 1024


def test_a_system_that_does_not_tell_what_is_free_is_taken_to_have_a_half(tmp_path: Path) -> None:
    """As macOS, which has no /proc: a laptop of 4 GB must not get a cache of 4 GB."""
    total = memory_bytes(tmp_path)
    assert total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert free_memory_bytes(tmp_path) == total // 2


def test_the_narrowest_group_counts_and_its_page_cache_is_free(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/pod/box\n",
        "sys/fs/cgroup/pod/memory.max": "400000\n",
        "sys/fs/cgroup/pod/memory.current": "350000\n",
        "sys/fs/cgroup/pod/memory.stat": "anon 1\ninactive_file 50000\n",
        "sys/fs/cgroup/pod/box/memory.max": "max\n",
        "sys/fs/cgroup/pod/box/memory.current": "350000\n",
    }
    root = write(tmp_path, files)
    assert memory_bytes(root) == 400000 and free_memory_bytes(root) == 100000


def test_a_container_of_version_1_sees_its_limit_at_the_top(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "4:cpu:/x\n3:memory:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "300000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "100000\n",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 20000\n",
    }
    root = write(tmp_path, files)
    assert memory_bytes(root) == 300000 and free_memory_bytes(root) == 220000

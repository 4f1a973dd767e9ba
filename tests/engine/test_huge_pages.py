"""Memory on huge pages: parts do not overlap, and a block lives as long as one of its parts."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import torch

from mint.engine.cpu.kernels import MIN_HUGE_LORA_BYTES, NativeKernels
from mint.engine.memory.machine_memory import BLOCK_BYTES, HUGE_PAGE_BYTES, MIN_PART_BYTES, HugePages


def test_matrices_of_all_sizes_keep_what_is_written_to_them(native_folder: Path) -> None:
    kernels = NativeKernels(native_folder)
    shapes = [(3,), (MIN_PART_BYTES // 4, 1), (1, MIN_PART_BYTES + 3), (HUGE_PAGE_BYTES, 3), (0, 5), (257, 16384)]
    dtypes = [torch.float32, torch.bfloat16, torch.int8]
    found = [kernels.empty_matrix(shape, dtype).fill_(place) for shape in shapes for place, dtype in enumerate(dtypes)]
    for place, matrix in enumerate(found):
        assert matrix.shape == shapes[place // 3] and matrix.dtype == dtypes[place % 3]
        assert matrix.is_contiguous() and matrix.data_ptr() % 64 == 0
        assert (matrix == place % 3).all()


def test_a_part_larger_than_a_block_begins_at_a_page() -> None:
    memory = HugePages()
    memory.take(MIN_PART_BYTES)
    large = memory.take(BLOCK_BYTES + 1)
    assert large is not None and len(large) == BLOCK_BYTES + 1
    assert _address(large) % HUGE_PAGE_BYTES == 0


def test_a_block_is_freed_with_the_last_of_its_parts_and_not_before() -> None:
    memory = HugePages()
    first, second = (memory.take(HUGE_PAGE_BYTES // 2) for _ in range(2))
    assert first is not None and second is not None
    address = _address(second)
    assert address - _address(first) == HUGE_PAGE_BYTES // 2
    tensor = torch.frombuffer(second, dtype=torch.int8).fill_(7)
    del memory, first, second
    gc.collect()
    assert (tensor == 7).all() and _is_mapped(address)
    del tensor
    gc.collect()
    assert not _is_mapped(address)


def test_small_parts_and_more_than_there_is_are_not_had() -> None:
    memory = HugePages()
    assert memory.take(MIN_PART_BYTES - 1) is None
    assert memory.take(1 << 50) is None
    assert memory.take(MIN_PART_BYTES) is not None


def test_a_published_lora_has_its_own_pages_which_are_freed_with_it(native_folder: Path) -> None:
    kernels = NativeKernels(native_folder)
    size = MIN_HUGE_LORA_BYTES // 2
    small, large = kernels.empty_lora(size - 1, torch.bfloat16), kernels.empty_lora(size, torch.bfloat16)
    assert (len(small), len(large)) == (size - 1, size)
    small.fill_(1), large.fill_(2)
    assert (small == 1).all() and (large == 2).all()
    address = large.data_ptr()
    assert address % HUGE_PAGE_BYTES == 0
    del large
    gc.collect()
    assert not _is_mapped(address)


def _address(part: memoryview) -> int:
    return int(np.frombuffer(part, np.uint8).ctypes.data)


def _is_mapped(address: int) -> bool:
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in maps]
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)

"""Captures work into a CUDA graph, and cleans up after a capture that fails.

Where a capture fails, `torch.cuda.graph` leaves its own stream as the present one of the thread, and the allocator in
the state of a capture (torch 2.11 to 2.13: `CUDAGraph.capture_end` raises before it ends either). All later work of the
thread would run on that stream, which waits for no other, and memory that ran out could not be freed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor


def capture(run: Callable[[], Tensor], *, pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of `run`, with its intermediate results in this memory pool, and the result, which a replay writes anew.

    A run on a side stream comes first, because what libraries set up at a first call must not be captured.

    Raises:
        RuntimeError: `run` waits for the device, or memory ran out. Work goes on as if nothing had been captured.
    """
    present = torch.cuda.current_stream()
    aside = _side_stream(present.device_index)
    aside.wait_stream(present)
    with torch.cuda.stream(aside):
        run()
    present.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        with _without_garbage_collection(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            found = run()
    except BaseException:
        torch.cuda.set_stream(present)
        with suppress(RuntimeError):  # it has ended
            torch._C._cuda_endAllocateToPool(present.device_index, pool)
        raise
    return graph, found


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One stream for all first runs on a device: what a run frees on a stream is kept for that stream."""
    return torch.cuda.Stream(device)


@contextmanager
def _without_garbage_collection() -> Generator[None]:
    """Objects that a collection frees, such as other graphs, may make calls that a capture forbids."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

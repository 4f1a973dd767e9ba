"""Fast paths with planted faults, and a sound one, for the self-check: none of them is mint's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mint.engine.cuda.self_check import FastPath

KEPT: list[Tensor] = []
"""What the leak keeps."""

CALLS = [0]
GUARD = 64


def _input(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


def _plain(size: int) -> list[Tensor]:
    """Results, and behind them memory that no run may change."""
    return [_input(size).exp(), torch.zeros(GUARD)]


def _sound(size: int) -> list[Tensor]:
    return [torch.exp(_input(size)), torch.zeros(GUARD)]


def _wrong_values(size: int) -> list[Tensor]:
    found = _sound(size)
    found[0][size // 2] *= 1.01
    return found


def _nan(size: int) -> list[Tensor]:
    found = _sound(size)
    found[0][0] = torch.nan
    return found


def _raises(_size: int) -> list[Tensor]:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _hangs(_size: int) -> list[Tensor]:
    while True:
        time.sleep(1)


def _leaks(size: int) -> list[Tensor]:
    KEPT.append(torch.ones(2 << 20))
    return _sound(size)


def _takes_too_much_memory(size: int) -> list[Tensor]:
    torch.ones(40 << 20)
    return _sound(size)


def _slow(size: int) -> list[Tensor]:
    time.sleep(0.1)
    return _sound(size)


def _wrong_dtype(size: int) -> list[Tensor]:
    found = _sound(size)
    return [found[0].bfloat16(), found[1]]


def _wrong_shape(size: int) -> list[Tensor]:
    found = _sound(size)
    return [found[0][None], found[1]]


def _nondeterministic(size: int) -> list[Tensor]:
    CALLS[0] += 1
    found = _sound(size)
    found[0] *= 1 + 1e-6 * (CALLS[0] % 2)
    return found


def _writes_out_of_bounds(size: int) -> list[Tensor]:
    memory = torch.zeros(size + GUARD)
    memory[:size] = _input(size).exp()
    memory[size] = 1.0
    return [memory[:size], memory[size:]]


def _wrong_at_the_tail(size: int) -> list[Tensor]:
    found = _sound(size)
    found[0][size // 128 * 128 :] = 0.0
    return found


def _ends_the_process(_size: int) -> list[Tensor]:
    import os

    os.abort()


PLANTS: dict[str, tuple[Callable[[int], Sequence[Tensor]], str]] = {
    "needs too much memory": (_takes_too_much_memory, "it needed"),
    "wrong values": (_wrong_values, "differs by"),
    "nan": (_nan, "not finite"),
    "raises": (_raises, "illegal memory access"),
    "hangs": (_hangs, "did not end within"),
    "leaks": (_leaks, "it kept 8 MiB after each run"),
    "slow": (_slow, "where plain operations take"),
    "wrong dtype": (_wrong_dtype, "torch.bfloat16 instead of torch.float32"),
    "wrong shape": (_wrong_shape, "(1, 256) instead of (256,)"),
    "nondeterministic": (_nondeterministic, "other bits when it was repeated"),
    "writes out of bounds": (_writes_out_of_bounds, "result 1 differs"),
    "wrong at the tail": (_wrong_at_the_tail, "300 rows: result 0 differs"),
    "ends the process": (_ends_the_process, "ended the process"),
}
"""The run of each, and words of the fault that must be found."""


def paths(names: list[str]) -> Iterator[FastPath]:
    """A sound path, the plants, and a sound one again: a fault is found in its own path alone."""
    for name in ("sound before", *names, "sound after"):
        fast = PLANTS[name][0] if name in PLANTS else _sound
        for size in (256, 300):
            yield FastPath(
                name, f"{size} rows", lambda fast=fast, size=size: fast(size), lambda size=size: _plain(size), 1e-5
            )


def paths_of_a_full_device(marker: str) -> Iterator[FastPath]:
    """Inputs find no memory in the first process, and plain operations of the first path never do."""
    if not Path(marker).exists():
        Path(marker).touch()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    yield FastPath("without plain memory", "256 rows", lambda: _sound(256), _without_memory, 1e-5)
    yield FastPath("sound", "256 rows", lambda: _sound(256), lambda: _plain(256), 1e-5)


def _without_memory() -> list[Tensor]:
    raise torch.OutOfMemoryError("CUDA out of memory")

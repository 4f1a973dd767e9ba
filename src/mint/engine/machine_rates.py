"""Measures this machine's best rates: matrix products with a model's own matrices, and reading memory.

Each rate is the best of several tries. `machine_limits` computes tokens per second from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mint.engine.cpu.onednn import has_onednn, onednn_product
from mint.engine.machine_limits import Device, Rates
from mint.models.random_base import DType, ModelShape

READ_BYTES = {"cpu": 2**29, "cuda": 2**32}
"""Far more than a device's caches hold."""

UNEMBEDDING_ROWS = 16_384
"""Larger vocabularies are cut to this: the rate is the same, and the time is not."""

TRIES = 5

SECONDS_PER_PRODUCT = 0.3
"""No further try is made once a product has taken this long in all."""


class MachineRates:
    """The matrices of one block and of the unembedding, with random values, and the rates of multiplying by them."""

    def __init__(self, model: ModelShape, *, rows: Sequence[int], dtype: DType, device: Device = "cpu") -> None:
        """`rows`: the numbers of rows for which products are measured. Uses the threads that torch has been given."""
        self.rows = rows
        self.dtype = getattr(torch, dtype)
        self.device = torch.device(device)
        self.block = [self._random(*size) for size in model.linears.values()]
        self.unembedding = [self._random(min(model.vocabulary, UNEMBEDDING_ROWS), model.hidden)]
        self.memory = torch.ones(READ_BYTES[device] // 4, device=self.device)

    @torch.no_grad()
    def measure(self) -> Rates:
        """All rates once."""
        return {
            "block": {str(count): self._rate(self.block, count) for count in self.rows},
            "unembedding": {str(count): self._rate(self.unembedding, count) for count in self.rows},
            "read": self.memory.nbytes / self._best_seconds(lambda: self.memory.sum()),
        }

    def _rate(self, matrices: list[Tensor], rows: int) -> float:
        """FLOP/s over all of these matrices, each by the faster of the two libraries that torch has."""
        seconds, flops = 0.0, 0
        for weight in matrices:
            inputs = self._random(rows, weight.shape[1])
            ways = [lambda x=inputs, w=weight: functional.linear(x, w)]
            if self.dtype == torch.float32 and self.device.type == "cpu" and has_onednn(weight):
                ways.append(lambda x=inputs, w=weight: onednn_product(x, w))
            seconds += min(self._best_seconds(way) for way in ways)
            flops += 2 * rows * weight.numel()
        return flops / seconds

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device).to(self.dtype)

    def _best_seconds(self, work: Callable[[], object]) -> float:
        return best_seconds(work, torch.cuda.synchronize if self.device.type == "cuda" else None)


def device_name(device: Device) -> str:
    """A GPU's name as its driver has it, or `cpu`."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def best_seconds(work: Callable[[], object], wait: Callable[[], object] | None = None) -> float:
    """The shortest of several runs; the first is not counted. Short work is repeated until the clock can resolve it.

    `wait` returns when the device has done what it was given.
    """
    _seconds(work, 1, wait)
    repeats = 1
    seconds = _seconds(work, 1, wait)
    while seconds * repeats < 1e-3:
        repeats *= 2
    best = float("inf")
    spent = 0.0
    for _ in range(TRIES):
        taken = _seconds(work, repeats, wait)
        best = min(best, taken / repeats)
        spent = spent + taken
        if spent > SECONDS_PER_PRODUCT:
            break
    return best


def _seconds(work: Callable[[], object], repeats: int, wait: Callable[[], object] | None) -> float:
    started_s = time.perf_counter()
    for _ in range(repeats):
        work()
    if wait is not None:
        wait()
    return time.perf_counter() - started_s

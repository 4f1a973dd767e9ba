"""Measures this machine's best rates: matrix products with a model's own matrices, and reading memory.

Each rate is that of the fastest product, by the fastest of torch's libraries (MKL, oneDNN) and mint's own kernels, in
the best of several tries. `machine_limits` computes tokens per second from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from mint.engine.cpu.kernels import NativeKernels
from mint.engine.cpu.onednn import has_onednn, onednn_product
from mint.engine.cpu.panels import NativeProducts, panel_matrix
from mint.engine.machine_limits import Device, Rates
from mint.errors import MissingExtraError
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

    def __init__(
        self,
        model: ModelShape,
        *,
        rows: Sequence[int],
        dtype: DType,
        device: Device = "cpu",
        kernels_dir: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`rows`: the numbers of rows for which products are measured. Uses the threads that torch has been given, and
        on a CPU mint's own kernels too, which are compiled into `kernels_dir`. `clock` in seconds: with one thread, one
        of CPU time leaves out the waits for a core."""
        self.rows = rows
        self.dtype = getattr(torch, dtype)
        self.device = torch.device(device)
        self.clock = clock
        self.products = _own_products(kernels_dir) if device == "cpu" else None
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
        """FLOP/s of the matrix whose product is the fastest."""
        return max(2 * rows * weight.numel() / self._product_seconds(weight, rows) for weight in matrices)

    def _product_seconds(self, weight: Tensor, rows: int) -> float:
        """The shortest time of a product with `weight` [O, I]."""
        inputs = self._random(rows, weight.shape[1])
        ways: list[Callable[[], object]] = [lambda: functional.linear(inputs, weight)]
        if self.device.type == "cpu" and has_onednn(weight):
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
            ways += [lambda: onednn_product(inputs, weight), lambda: onednn_product(inputs, packed)]
        own = None if self.products is None else panel_matrix(self.products, weight)
        if own is not None:
            floats = inputs.float()
            ways.append(lambda: own.product(floats))
        return min(self._best_seconds(way) for way in ways)

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device).to(self.dtype)

    def _best_seconds(self, work: Callable[[], object]) -> float:
        return best_seconds(work, torch.cuda.synchronize if self.device.type == "cuda" else None, self.clock)


def _own_products(kernels_dir: Path | None) -> NativeProducts | None:
    """mint's kernels; None without a folder or a compiler."""
    try:
        return None if kernels_dir is None else NativeProducts(NativeKernels(kernels_dir))
    except MissingExtraError:
        return None


def device_name(device: Device) -> str:
    """A GPU's name as its driver has it, or `cpu`."""
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def best_seconds(
    work: Callable[[], object],
    wait: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The shortest of several runs; the first is not counted. Short work is repeated until the clock can resolve it.

    `wait` returns when the device has done what it was given.
    """
    _seconds(work, 1, wait, clock)
    repeats = 1
    seconds = _seconds(work, 1, wait, clock)
    while seconds * repeats < 1e-3:
        repeats *= 2
    best = float("inf")
    spent = 0.0
    for _ in range(TRIES):
        taken = _seconds(work, repeats, wait, clock)
        best = min(best, taken / repeats)
        spent = spent + taken
        if spent > SECONDS_PER_PRODUCT:
            break
    return best


def _seconds(
    work: Callable[[], object], repeats: int, wait: Callable[[], object] | None, clock: Callable[[], float]
) -> float:
    started_s = clock()
    for _ in range(repeats):
        work()
    if wait is not None:
        wait()
    return clock() - started_s


def torch_description(threads: int) -> str:
    """The version of torch, its device and the engine's threads, in words."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{torch.__version__} on {device}, {threads} {'thread' if threads == 1 else 'threads'}"

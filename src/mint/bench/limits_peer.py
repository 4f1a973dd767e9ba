"""The worker that measures what this machine does at best: products with the shape's own matrices, and reading memory.

Run as `python -m mint.bench.limits_peer SPEC.json`, in turns with the contenders. Rates are the best of some tries, for
a limit is what can happen at most. What follows from them is in `limits`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mint.bench.answering import answer_turns, open_answers, read_spec

READ_BYTES = {"cpu": 2**29, "cuda": 2**32}
"""By kind of device: far more than its caches hold."""
UNEMBEDDING_ROWS = 16_384
"""Of the vocabulary at most: the rate is the same beyond, and the time is not."""
TRIES = 5
SECONDS_PER_PRODUCT = 0.3
"""After which no more tries are made."""


class Limits:
    """Matrices of one block and of the unembedding, and the rates of multiplying with them."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        self.spec, self.dtype = spec, getattr(torch, spec["dtype"])
        self.device = torch.device(spec.get("device", "cpu"))
        self.block = [self._random(*size) for size in spec["linears"]]
        self.unembedding = [self._random(min(spec["vocabulary"], UNEMBEDDING_ROWS), spec["hidden"])]
        self.memory = torch.ones(READ_BYTES[self.device.type] // 4, device=self.device)

    def ready(self) -> dict[str, Any]:
        """What it computes with."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return {"dtype": self.spec["dtype"], "threads": torch.get_num_threads(), "device": name}

    @torch.no_grad()
    def step(self, index: int) -> dict[str, Any]:
        """All rates once: FLOP/s of the products by their rows, bytes/s of reading."""
        rows = self.spec["rows"]
        return {
            "tokens": 0,
            "block": {str(count): self._rate(self.block, count) for count in rows},
            "unembedding": {str(count): self._rate(self.unembedding, count) for count in rows},
            "read": self.memory.nbytes / self._best_seconds(lambda: self.memory.sum()),
        }

    def finished(self) -> dict[str, Any]:
        """What it computed with."""
        return {"versions": {"torch": torch.__version__}}

    def _rate(self, matrices: list[Tensor], rows: int) -> float:
        """FLOP/s over all of these matrices, each by the faster of the two libraries that torch has."""
        seconds, flops = 0.0, 0
        for weight in matrices:
            inputs = self._random(rows, weight.shape[1])
            ways = [lambda x=inputs, w=weight: functional.linear(x, w)]
            if self.dtype == torch.float32 and self.device.type == "cpu" and torch.backends.mkldnn.is_available():
                ways.append(lambda x=inputs, w=weight: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""))
            seconds += min(self._best_seconds(way) for way in ways)
            flops += 2 * rows * weight.numel()
        return flops / seconds

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device).to(self.dtype)

    def _best_seconds(self, work: Callable[[], object]) -> float:
        return best_seconds(work, torch.cuda.synchronize if self.device.type == "cuda" else None)


def best_seconds(work: Callable[[], object], wait: Callable[[], object] | None = None) -> float:
    """The shortest of some runs; the first of all is not counted. Short work is repeated until a clock can see it.

    `wait` returns when the device has done what it was given.
    """
    _seconds(work, 1, wait)
    repeats, seconds = 1, _seconds(work, 1, wait)
    while seconds * repeats < 1e-3:
        repeats *= 2
    best, spent = float("inf"), 0.0
    for _ in range(TRIES):
        taken = _seconds(work, repeats, wait)
        best, spent = min(best, taken / repeats), spent + taken
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


if __name__ == "__main__":
    answers = open_answers()
    answer_turns(Limits(read_spec()), answers)

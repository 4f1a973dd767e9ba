"""The worker that measures what this machine does at best, in turns with the contenders.

Run as `python -m benchmarks.peers.limits SPEC.json`. `mint.engine.machine_limits` says what follows from the rates.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.peers.answering import answer_turns, open_answers, read_spec
from mint.config import read_settings
from mint.engine.machine_rates import MachineRates, device_name
from mint.models.random_base import ModelShape


class Limits:
    """Measures all rates once a turn."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        self.spec, self.device = spec, spec.get("device", "cpu")
        model = ModelShape(**spec["model"])
        clock = time.process_time if spec["threads"] == 1 and self.device == "cpu" else time.perf_counter
        self.rates = MachineRates(
            model,
            rows=spec["rows"],
            dtype=spec["dtype"],
            device=self.device,
            kernels_dir=read_settings().native_folder,
            clock=clock,
        )

    def ready(self) -> dict[str, Any]:
        return {
            "dtype": self.spec["dtype"],
            "threads": torch.get_num_threads(),
            "device": device_name(self.device),
        }

    def step(self, index: int) -> dict[str, Any]:
        """FLOP/s of the products by their rows, bytes/s of reading."""
        return {"tokens": 0, **self.rates.measure()}

    def finished(self) -> dict[str, Any]:
        return {"versions": {"torch": torch.__version__}}


if __name__ == "__main__":
    answers = open_answers()
    answer_turns(Limits(read_spec()), answers)

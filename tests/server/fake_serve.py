"""`mint serve` over the fake engine, for tests that need a process of its own: arguments are settings as JSON."""

from __future__ import annotations

import json
import sys
import time

from mint.compose.serving import Server
from mint.config import read_serve_settings
from mint.engine.fake_engine import FakeBatch, FakeEngine
from mint.engine.protocol import AdamSpec, SampleJob, SampleResult, TokenListener
from mint.server.ops.logs import configure_logs
from mint.server.worker import snapshot_policy, snapshots

FATAL_RATE = 0.25
FATAL_SEED = 666
DEVICE_SIDE_ASSERT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later"


class SlowEngine(FakeEngine):
    """Takes its time for every step, of training and of sampling."""

    def __init__(self, seconds: float, *, loses_device: bool) -> None:
        """With `loses_device`, `FATAL_RATE` in a step and `FATAL_SEED` in a sample are a device-side assert."""
        super().__init__()
        self._seconds = seconds
        self._loses_device = loses_device

    def optim_step(self, model_id: str, adam: AdamSpec) -> dict[str, float]:
        if self._seconds:
            print("a step begins", flush=True)
        time.sleep(self._seconds)
        if self._loses_device and adam.learning_rate == FATAL_RATE:
            raise RuntimeError(DEVICE_SIDE_ASSERT)
        return super().optim_step(model_id, adam)

    def open_batch(self) -> FakeBatch:
        return SlowBatch(self, self._seconds, loses_device=self._loses_device)


class SlowBatch(FakeBatch):
    """Takes as long for every step."""

    def __init__(self, engine: SlowEngine, seconds: float, *, loses_device: bool) -> None:
        super().__init__(engine)
        self._seconds = seconds
        self._loses_device = loses_device
        self._seeds: dict[str, int] = {}

    def add(self, key: str, job: SampleJob, listener: TokenListener | None = None) -> None:
        super().add(key, job, listener)
        self._seeds[key] = job.seed

    def step(self) -> dict[str, SampleResult]:
        time.sleep(self._seconds)
        if self._loses_device and any(self._seeds[key] == FATAL_SEED for key in self.keys):
            raise RuntimeError(DEVICE_SIDE_ASSERT)
        return super().step()


if __name__ == "__main__":
    flags = json.loads(sys.argv[1])
    snapshot_policy.MAX_SHARE = 1e9  # small states are saved after every step, however fast this machine is
    if flags.pop("large_states", False):  # only the first step is saved, and then one every 10 s
        snapshots.SMALL_STATE_BYTES = 0
    engine = SlowEngine(flags.pop("slow", 0.0), loses_device=flags.pop("loses_device", False))
    settings = read_serve_settings(flags)
    configure_logs(format=settings.log_format, level=settings.log_level)
    server = Server(settings, engine=engine)
    server.service.results.long_poll_s = 3600.0  # a waiting client is answered because the server ends, or never
    server.run(lambda line: print(line, flush=True))

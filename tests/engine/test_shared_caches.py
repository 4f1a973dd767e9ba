"""Processes that sample on one machine divide the memory for their KV caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_models import write_model

from mint.engine.devices import Device
from mint.engine.torch_engine import TorchEngine

FREE_BYTES = 256 << 20


@pytest.mark.parametrize("implementation", ["mint", "transformers"])
def test_the_kv_caches_of_several_processes_together_are_that_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, implementation: Any
) -> None:
    write_model(tmp_path, "tied")
    monkeypatch.setattr(Device, "free_bytes", property(lambda _device: FREE_BYTES))

    def mib(**options: Any) -> int:
        engine = TorchEngine(dtype="float32", threads=1, device="cpu", implementation=implementation, **options)
        return engine.load_base("base", str(tmp_path)).settings["kv_cache_mib"]

    whole = mib()
    assert whole > 0
    assert mib(cache_sharers=4) == whole // 4
    assert mib(cache_sharers=4, kv_cache_bytes=64 << 20) == 64

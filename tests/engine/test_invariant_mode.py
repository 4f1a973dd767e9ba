"""Which base models the batch-invariant mode of a GPU takes; its kernels are tested in `interpreted_kernels`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import write_model

from mint.engine import devices
from mint.engine.cuda.fast_paths import CAPTURE, INVARIANT
from mint.engine.devices import Device
from mint.engine.drawing.draw import TorchDraw
from mint.engine.model.config import DecoderConfig, read_decoder_config
from mint.engine.model.torch_operations import TorchOperations
from mint.errors import InvalidRequestError
from mint.models.folder import ModelFolder
from mint.server.store.rows import base_numbers

EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


def _config(folder: Path, **options: Any) -> DecoderConfig:
    write_model(folder, "tied", **options)
    return read_decoder_config(ModelFolder(folder).config)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A GPU with Triton, in this mode; nothing runs on it."""
    monkeypatch.setattr(devices, "_has_triton", lambda: True)
    return Device("cuda", None, gpu_kernels=True, batch_invariant=True)


def test_a_dense_model_is_taken(tmp_path: Path, gpu: Device) -> None:
    assert gpu.is_batch_invariant
    gpu.require_batch_invariance("base", _config(tmp_path), quantized=False)


def test_what_the_kernels_do_not_compute_is_refused_by_name(tmp_path: Path, gpu: Device) -> None:
    dense = _config(tmp_path / "dense")
    mixture = _config(tmp_path / "mixture", family="qwen3_moe", **EXPERTS)
    for config, quantized in ((mixture, False), (dense, True), (None, False)):
        with pytest.raises(InvalidRequestError, match=r"MINT_BATCH_INVARIANT.*is not for base"):
            gpu.require_batch_invariance("base", config, quantized=quantized)


def test_kernels_that_are_missing_or_failed_the_check_are_an_error(
    tmp_path: Path, gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(tmp_path)
    gpu.switched_off[CAPTURE] = "it hangs"  # the same kernels then run without graphs
    gpu.require_batch_invariance("base", config, quantized=False)
    gpu.switched_off[INVARIANT] = "it differs"
    with pytest.raises(InvalidRequestError, match=r"failed the self-check.*batch-invariant kernels"):
        gpu.require_batch_invariance("base", config, quantized=False)
    monkeypatch.setattr(devices, "_has_triton", lambda: False)
    with pytest.raises(InvalidRequestError, match="needs mint's Triton kernels"):
        gpu.require_batch_invariance("base", config, quantized=False)


def test_a_gpu_promises_nothing_without_the_mode_and_a_cpu_needs_none(tmp_path: Path) -> None:
    assert not Device("cuda", None, gpu_kernels=True).is_batch_invariant
    cpu = Device("cpu", None, gpu_kernels=True, batch_invariant=True)
    assert cpu.is_batch_invariant
    cpu.require_batch_invariance("base", None, quantized=True)
    drawn = cpu.draw(TorchOperations(torch.float32, torch.device("cpu")))
    assert isinstance(drawn, TorchDraw)


def test_a_run_goes_on_only_in_the_mode_that_it_was_trained_in() -> None:
    found = [base_numbers({"dtype": "bfloat16", "attention": name}) for name in ("flex", "batch-invariant", "native")]
    assert [own and own.get("MINT_BATCH_INVARIANT") for own in found] == ["0", "1", None]
    assert found[0] and found[1] and found[0]["MINT_NATIVE"] == found[1]["MINT_NATIVE"]


def test_a_run_goes_on_only_with_the_fast_paths_of_a_gpu_that_it_was_trained_with() -> None:
    settings = {"dtype": "bfloat16", "implementation": "mint", "attention": "torch", "gpu_off": "flex"}
    found = base_numbers(settings)
    assert found and found["MINT_GPU_OFF"] == "flex"
    assert found["MINT_NATIVE"] == "1 (mint's kernels)"  # others of them are in use
    on_a_cpu = base_numbers(settings | {"gpu_off": None})
    assert on_a_cpu and "MINT_GPU_OFF" not in on_a_cpu and on_a_cpu["MINT_NATIVE"] == "0 (torch's kernels)"

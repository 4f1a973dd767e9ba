"""What follows from the memory of a device: rows of a micro-batch, sequences and prompt tokens of a sampling step."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_data import CROSS_ENTROPY, LORA, flat, job, random_data, take_gradient, train
from small_models import write_model
from torch import Tensor
from transformers import PreTrainedModel

from mint.engine.bases.decoder_base import DecoderBase
from mint.engine.cpu.onednn import HalfPrecisionUnembedding
from mint.engine.cpu.operations import CpuOperations
from mint.engine.cuda.operations import CudaOperations
from mint.engine.devices import Device
from mint.engine.memory.base_bytes import base_bytes
from mint.engine.memory.micro_batches import (
    MIN_ROWS,
    UNKNOWN_ACTIVATION_BYTES,
    activation_budget,
    bytes_per_row,
    fit_recompute,
    fit_rows,
)
from mint.engine.memory.sampling_limits import SamplingLimits, fit_limits, prompt_token_bytes
from mint.engine.model.config import read_decoder_config
from mint.engine.protocol import MicroBatching, PassResult
from mint.engine.quantized.number_formats import quantize, quantized_bytes
from mint.engine.torch_engine import TorchEngine
from mint.models.folder import ModelFolder

QWEN3_06B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip
GIB = 1 << 30
CPU = CpuOperations(torch.float32)


def _held(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors that the parts of a base's weights hold."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _held(part, seen)
    elif (dataclasses.is_dataclass(value) or hasattr(value, "outputs")) and id(value) not in seen:
        seen.add(id(value))
        for part in vars(value).values():
            yield from _held(part, seen)


def _held_bytes(engine: TorchEngine) -> int:
    base = engine._bases["base"]
    assert isinstance(base, DecoderBase)
    weights = base._decoder.weights
    storages = [tensor.untyped_storage() for tensor in _held(weights, set())]
    total = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    if isinstance(weights.unembedding, HalfPrecisionUnembedding):  # its copy is no tensor
        total += 2 * weights.embedding.numel()
    return total


@pytest.mark.parametrize("is_native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", [None, "nf4", "int8", "fp8"])
@pytest.mark.parametrize(
    ("family", "shape"), [("qwen3", "tied"), ("qwen3", "untied"), ("qwen3_moe", "tied"), ("gpt_oss", "untied")]
)
def test_the_weights_take_what_the_files_say(
    tmp_path: Path, native_folder: Path, family: str, shape: str, dtype: str, quantize: Any, is_native: bool
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 4096, "head_dim": 32}
    if family == "gpt_oss":  # where NF4 does not fit the experts' down
        sizes["intermediate_size"] = 96
    write_model(tmp_path, shape, family=family, **sizes)
    engine = TorchEngine(
        dtype=dtype,  # ty: ignore[invalid-argument-type]
        threads=1,
        device="cpu",
        quantize=quantize,
        native=native_folder if is_native else None,
    )
    engine.load_base("base", str(tmp_path))
    folder = ModelFolder(tmp_path)
    base = engine._bases["base"]
    assert isinstance(base, DecoderBase)
    said = base_bytes(read_decoder_config(folder.config), folder.tensors(), base._decoder.operations, quantize)
    assert said == pytest.approx(_held_bytes(engine), rel=0.02)


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
@pytest.mark.parametrize("inputs", [64, 128, 96, 30])
def test_the_size_of_a_quantized_matrix_is_known_before_it_is_made(kind: Any, inputs: int) -> None:
    made = quantize(torch.randn(5, inputs), kind)
    assert quantized_bytes(5, inputs, kind) == (None if made is None else made.size_bytes)


@pytest.mark.parametrize(
    ("memory", "base", "operations", "expected"),
    [
        (16 * GIB, 0, CPU, 2 * GIB),  # an eighth of a CPU's memory
        (24 * GIB, 8 * GIB, CPU, 2 * GIB),
        (80 * GIB, 16 * GIB, CudaOperations, 16 * GIB),  # a quarter of a GPU's
        (8 * GIB, 9 * GIB, CPU, 0),
        (None, GIB, CPU, UNKNOWN_ACTIVATION_BYTES),
    ],
)
def test_activations_may_take_a_part_of_what_the_base_leaves(
    memory: int | None, base: int, operations: Any, expected: int
) -> None:
    assert activation_budget(operations, memory_bytes=memory, base_bytes=base) == expected


def test_rows_are_powers_of_two_that_fit_and_the_floor_computes_again() -> None:
    config = read_decoder_config(QWEN3_06B)
    row_bytes = bytes_per_row(config, torch.float32)
    previous = 0
    for mib in range(0, 40_000, 97):
        budget = mib << 20
        rows = fit_rows(row_bytes, budget, least=MIN_ROWS, most=4096)
        recompute = fit_recompute(rows, row_bytes, budget)
        assert rows in (256, 512, 1024, 2048, 4096) and rows >= previous
        assert recompute is True if rows * row_bytes > budget else recompute is None
        assert rows == 256 or rows * row_bytes <= budget
        assert rows == 4096 or (rows + 1) * row_bytes * 2 > budget  # twice as many would not fit
        previous = rows
    assert previous == 4096


def _limits(free: int | None, operations: Any = CPU) -> SamplingLimits:
    config = read_decoder_config(QWEN3_06B)
    token_bytes = prompt_token_bytes(config, torch.float32)
    return fit_limits(config.vocab_size, token_bytes, operations, free_bytes=free)


def test_a_laptop_samples_fewer_sequences_at_once_and_a_large_card_more() -> None:
    # 2 GiB free: an eighth is 256 MiB; 151,936 logits of 20 bytes are 2.9 MiB, and a quarter of the rows is spare.
    # A prompt token: 4,096 heads in float32 twice, 2,048 attended values, 5 × 1,024 numbers of rows: 60 KiB.
    assert _limits(2 * GIB) == SamplingLimits(64, 2048)
    assert _limits(3 * GIB // 2) == SamplingLimits(48, 1024)
    assert _limits(0) == SamplingLimits(16, 256)
    assert _limits(None) == _limits(100 * GIB) == SamplingLimits(512, 2048)
    assert _limits(100 * GIB, CudaOperations) == SamplingLimits(1024, 8192)
    assert _limits(100 * GIB).spare_rows == 128 and _limits(100 * GIB).prefill_tokens_beside == 512


def test_the_limits_fit_into_their_parts_of_what_is_free() -> None:
    token_bytes = prompt_token_bytes(read_decoder_config(QWEN3_06B), torch.float32)
    for free in range(GIB, 40 * GIB, GIB // 3):
        limits = _limits(free)
        assert 20 * 151936 * (limits.rows + limits.spare_rows) <= free / 8
        assert token_bytes * limits.prefill_tokens <= free / 16 or limits.prefill_tokens == 256


def _engine(folder: Path, monkeypatch: pytest.MonkeyPatch, memory: int, **settings: Any) -> TorchEngine:
    """An engine on a machine of so many bytes, with a trained model `m`."""
    monkeypatch.setattr(Device, "memory_bytes", property(lambda _: memory))
    engine = TorchEngine(dtype="float32", threads=1, device="cpu", **settings)
    engine.load_base("base", str(folder))
    engine.create_model("m", "base", LORA)
    train(engine, "m")
    return engine


def _pass(engine: TorchEngine, repeated: MicroBatching | None = None) -> tuple[PassResult, bytes]:
    """A pass of some 1,000 rows, and the bits of its gradient."""
    engine.clear_gradient("m")
    result = engine.forward_backward("m", random_data(3, count=40), CROSS_ENTROPY, micro_batching=repeated)
    return result, flat(take_gradient(engine, "m")).tobytes()


def test_another_machine_repeats_a_pass_with_the_rows_of_the_first(
    tied: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = _engine(tied[0], monkeypatch, 1 << 20)
    first, bits = _pass(small)
    assert first.micro_batching == MicroBatching(256, recompute=True)
    large = _engine(tied[0], monkeypatch, 64 * GIB)
    own, other_bits = _pass(large)
    assert own.micro_batching == MicroBatching(4096, recompute=None)
    assert other_bits != bits
    again, repeated = _pass(large, first.micro_batching)
    assert repeated == bits and again.micro_batching == first.micro_batching
    assert [row.tobytes() for row in again.logprobs] == [row.tobytes() for row in first.logprobs]


def test_the_setting_gives_one_machine_the_bits_of_another(
    tied: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, bits = _pass(_engine(tied[0], monkeypatch, 1 << 20))
    large = _engine(tied[0], monkeypatch, 64 * GIB, micro_batch_rows=256)
    result, set_bits = _pass(large)
    assert result.micro_batching == MicroBatching(256, recompute=None)
    assert set_bits == bits


def test_what_memory_decides_is_shown_and_logged(
    tied: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Device, "memory_bytes", property(lambda _: 16 * GIB))
    monkeypatch.setattr(Device, "free_bytes", property(lambda _: 1 << 20))
    engine = TorchEngine(dtype="float32", threads=1, device="cpu")
    with caplog.at_level(logging.INFO):
        shown = engine.load_base("base", str(tied[0])).settings
    assert (shown["micro_batch_rows"], shown["activation_mib"], shown["recompute"]) == (4096, 2047, "long sequences")
    assert (shown["sampling_rows"], shown["prefill_tokens"]) == (48, 256)
    assert "micro-batches of 4096 rows (MINT_MICRO_BATCH_ROWS), for activations of at most 2047 MiB" in caplog.text
    assert "decodes 48 sequences together and computes 256 prompt tokens at once, as 1 MiB are free" in caplog.text


def test_the_number_of_rows_and_prompt_tokens_changes_no_sample(
    tied: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [job([5 + n] * 300, num_samples=12, max_tokens=9, seed=n) for n in range(6)]
    found = []
    for free in (0, 64 * GIB):
        monkeypatch.setattr(Device, "free_bytes", property(lambda _, free=free: free))
        engine = TorchEngine(dtype="float32", threads=1, device="cpu", kv_cache_bytes=64 << 20)
        engine.load_base("base", str(tied[0]))
        results = engine.sample(jobs)
        found.append([(own.tokens.tobytes(), own.logprobs.tobytes()) for result in results for own in result.samples])
        assert engine.sampling_counters()["steps"] > (30 if not free else 0)
    assert found[0] == found[1]

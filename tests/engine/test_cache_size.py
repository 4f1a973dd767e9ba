"""The size of the KV cache: from the memory that is free, unless it is set, and never more than sequences can use."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from engine_data import job
from transformers import PreTrainedModel

from mint.engine.devices import Device
from mint.engine.model.config import DecoderConfig, read_decoder_config
from mint.engine.sampling.kv_cache import UNKNOWN_MEMORY_BYTES, KVCache, fitting_bytes, page_bytes
from mint.engine.torch_engine import TorchEngine
from mint.models.folder import ModelFolder

QWEN3_8B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def config(tied: tuple[Path, PreTrainedModel]) -> DecoderConfig:
    return read_decoder_config(ModelFolder(tied[0]).config)


def test_a_page_takes_what_its_keys_and_values_take(config: DecoderConfig) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cache = KVCache(config, dtype, torch.device("cpu"), 10 * page_bytes(config, dtype) + 1)
        keys, values = cache.planes(0)
        layers = len(config.attention_layers)
        assert cache.count == 10
        assert page_bytes(config, dtype) * 10 == layers * (keys.nbytes + values.nbytes)


def test_a_position_of_qwen3_8b_takes_144_kib_in_bfloat16() -> None:
    """36 layers, keys and values, 8 heads of 128 numbers, 2 bytes each."""
    assert page_bytes(read_decoder_config(QWEN3_8B), torch.bfloat16) == 64 * 147_456


@pytest.mark.parametrize(
    ("free", "expected"),
    [(64 << 30, 16 << 30), (1 << 30, 256 << 20), (None, UNKNOWN_MEMORY_BYTES), (0, 64 * 147_456), (1 << 50, None)],
)
def test_the_cache_takes_a_quarter_of_what_is_free_and_no_more_than_sequences_fill(
    free: int | None, expected: int | None
) -> None:
    config = read_decoder_config(QWEN3_8B)
    size = fitting_bytes(config, torch.bfloat16, sequences=512, free_bytes=free)
    assert size == (512 * 40960 * 147_456 if expected is None else expected)


def test_what_was_taken_is_logged_and_shown_and_changes_no_bit(
    tied: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for free in (4 << 20, 1 << 40):
        monkeypatch.setattr(Device, "free_bytes", property(lambda _, free=free: free))
        engine = TorchEngine(dtype="float32", threads=1, device="cpu")
        with caplog.at_level(logging.INFO):
            info = engine.load_base("base", str(tied[0]))
        (result,) = engine.sample([job([5] * 70, num_samples=24, max_tokens=70)])
        assert info.settings["kv_cache_mib"] == min(free >> 22, 128)
        assert f"KV cache of at most {info.settings['kv_cache_mib']} MiB, of {free >> 20} MiB" in caplog.text
        found.append([(sample.tokens.tobytes(), sample.logprobs.tobytes()) for sample in result.samples])
    assert found[0] == found[1]


def test_a_size_that_is_set_is_taken(tied: tuple[Path, PreTrainedModel]) -> None:
    engine = TorchEngine(dtype="float32", threads=1, device="cpu", kv_cache_bytes=3 << 20)
    assert engine.load_base("base", str(tied[0])).settings["kv_cache_mib"] == 3
    engine.sample([job([3])])
    assert engine.kv_pages()["total"] == (3 << 20) // (2 * 2 * 2 * 64 * 16 * 4)

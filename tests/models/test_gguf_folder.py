"""A GGUF file is a base model like any other: the same numbers, tokens and chat as transformers reads from it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import mint
from mint import types
from mint.errors import InvalidRequestError
from mint.models import registry

WORDS = ["<unk>", "<s>", "</s>", *(chr(33 + n) for n in range(92)), "ab"]
HIDDEN, INNER, HEADS, LAYERS = 64, 96, 4, 2


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MINT_NATIVE", "0")  # the compiled kernels are in that cache, too
    monkeypatch.setenv("MINT_HOME", str(tmp_path / "home"))


def _write_gguf(path: Path) -> None:
    """A random Llama with quantised matrices, as llama.cpp's converter would write it."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(WORDS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    shapes = {"token_embd": (len(WORDS), HIDDEN), "output_norm": (HIDDEN,), "output": (len(WORDS), HIDDEN)}
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{layer}.{name}"] = (HIDDEN, HIDDEN)
        for name in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{layer}.{name}"] = (HIDDEN,)
        shapes |= {f"blk.{layer}.ffn_{name}": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"blk.{layer}.ffn_down"] = (HIDDEN, INNER)
    for name, shape in shapes.items():
        values = rng.normal(1.0 if "norm" in name else 0.0, 0.15, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    _write_gguf(path)
    return path


def _logprobs(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        rows = model(torch.tensor([tokens])).logits[0].log_softmax(-1).numpy()
    return rows[np.arange(len(tokens) - 1), tokens[1:]]


def test_a_gguf_file_trains_and_samples_with_the_numbers_of_transformers(file: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    tokens = np.random.default_rng(1).integers(3, 96, 20).tolist()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 19},
    )
    with mint.ServiceClient() as service:
        client = service.create_lora_training_client(str(file), rank=4, seed=1)
        assert client.get_info().effective["implementation"] == "mint"
        sampler = service.create_sampling_client(base_model=str(file))
        found = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:]
        assert np.abs(np.array(found, np.float64) - _logprobs(reference, tokens)).max() <= 1e-4
        losses = []
        for _ in range(2):
            losses.append(client.forward_backward([datum], loss_fn="cross_entropy").result().metrics["loss:sum"])
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        assert losses[1] < losses[0]


def test_a_file_is_converted_once_and_again_when_it_changes(file: Path) -> None:
    first = registry.resolve(str(file), {})
    stamp = (first / "config.json").stat().st_mtime_ns
    assert registry.resolve("mine", {"mine": str(file)}) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    _write_gguf(file)
    assert registry.resolve(str(file), {}) != first
    assert not list(first.parent.glob(".*"))


def test_a_damaged_file_is_refused_and_leaves_nothing(file: Path, tmp_path: Path) -> None:
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(InvalidRequestError, match="cannot be read as a GGUF model"):
        registry.resolve(str(file), {})
    assert not list((tmp_path / "cache" / "mint" / "gguf").iterdir())

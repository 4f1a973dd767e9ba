"""Exports give the same logits in PEFT and in transformers as in mint, unembedding and tied embeddings included."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from engine_data import CROSS_ENTROPY, train
from small_models import write_model
from transformers import AutoModelForCausalLM

from mint.engine.protocol import LoraSpec, TrainDatum
from mint.engine.torch_engine import TorchEngine
from mint.errors import CheckpointError
from mint.models.hf_format import write_merged
from mint.models.peft_format import read_peft, write_peft
from mint.models.tensor_files import read_tensors, write_tensors

PARTS = [(True, True, True), (True, True, False), (False, False, True)]
TOKENS = np.random.default_rng(0).integers(0, 64, 30)


def _trained(folder: Path, shape: str, parts: tuple[bool, bool, bool]) -> tuple[TorchEngine, LoraSpec]:
    write_model(folder, shape)
    engine = TorchEngine(dtype="float32", threads=1, device="cpu")
    engine.load_base("base", str(folder))
    lora = LoraSpec(8, 0, *parts)
    engine.create_model("m", "base", lora)
    train(engine, "m", steps=3)
    return engine, lora


def _ours(engine: TorchEngine) -> np.ndarray:
    """Logprobs [N, V]: every token of the vocabulary as the target."""
    vocab = engine._bases["base"][1].vocab_size
    data = [TrainDatum(TOKENS, np.full(30, target), np.ones(30, np.float32)) for target in range(vocab)]
    return np.stack(engine.forward("m", data, CROSS_ENTROPY).logprobs, axis=1)


def _theirs(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model.float().eval()(torch.from_numpy(TOKENS)[None]).logits[0].log_softmax(-1).numpy()


@pytest.mark.parametrize("shape", ["tied", "untied"])
@pytest.mark.parametrize("parts", PARTS)
def test_peft_loads_the_adapter_with_the_same_logits(
    tmp_path: Path, shape: str, parts: tuple[bool, bool, bool]
) -> None:
    engine, lora = _trained(tmp_path / "base", shape, parts)
    weights = engine.read_state("m").weights
    write_peft(tmp_path / "adapter", weights, rank=lora.rank, alpha=32.0, base_model=str(tmp_path / "base"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    plain = _theirs(base)
    theirs = _theirs(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    assert np.abs(_ours(engine) - theirs).max() <= 1e-4
    assert np.abs(plain - theirs).max() > 0.1  # the lora does something


@pytest.mark.parametrize("shape", ["tied", "untied"])
@pytest.mark.parametrize("parts", PARTS)
def test_transformers_loads_the_merged_model_with_the_same_logits(
    tmp_path: Path, shape: str, parts: tuple[bool, bool, bool]
) -> None:
    engine, _ = _trained(tmp_path / "base", shape, parts)
    write_merged(tmp_path / "merged", tmp_path / "base", engine.read_state("m").weights, scale=32 / 8)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert np.abs(_ours(engine) - _theirs(merged)).max() <= 1e-4
    assert merged.config.tie_word_embeddings == (shape == "tied" and not parts[2])
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


def test_a_bfloat16_base_is_merged_in_float32(tmp_path: Path) -> None:
    engine, _ = _trained(tmp_path / "base", "tied", (True, True, True))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    weights = engine.read_state("m").weights
    write_merged(tmp_path / "merged", tmp_path / "half", weights, scale=4.0)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.float32
    adapted = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype=torch.float32)
    write_peft(tmp_path / "adapter", weights, rank=8, alpha=32.0, base_model="")
    expected = _theirs(peft.PeftModel.from_pretrained(adapted, tmp_path / "adapter"))
    assert np.abs(_theirs(merged) - expected).max() <= 1e-4


def test_an_adapter_comes_back_as_it_went(tmp_path: Path) -> None:
    engine, lora = _trained(tmp_path / "base", "tied", (True, True, True))
    weights = engine.read_state("m").weights
    write_peft(tmp_path / "adapter", weights, rank=lora.rank, alpha=32.0, base_model="mint/tiny")
    adapter = read_peft(tmp_path / "adapter")
    assert (adapter.rank, adapter.alpha, adapter.base_model) == (8, 32.0, "mint/tiny")
    engine.load_weights("back", "base", lora, adapter.weights)
    assert all(np.array_equal(adapter.weights[name], array) for name, array in weights.items())


def test_an_adapter_that_peft_saved_is_read(tmp_path: Path) -> None:
    model = write_model(tmp_path / "base", "untied")
    config = peft.LoraConfig(r=4, lora_alpha=8, use_rslora=True, target_modules=["q_proj", "lm_head"])
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    adapter = read_peft(tmp_path / "adapter")
    assert adapter.rank == 4 and adapter.alpha == 16.0  # 8 · √4
    assert "lm_head.lora_B.weight" in adapter.weights


@pytest.mark.parametrize(
    ("change", "word"),
    [({"use_dora": True}, "use_dora"), ({"bias": "all"}, "bias"), ({"r": 0}, "r = 0"), ({"peft_type": "IA3"}, "PEFT")],
)
def test_adapters_of_other_kinds_are_refused(tmp_path: Path, change: dict[str, object], word: str) -> None:
    write_peft(tmp_path, {"lm_head.lora_A.weight": np.ones((2, 3), np.float32)}, rank=2, alpha=32, base_model="")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError, match=word):
        read_peft(tmp_path)


def test_an_adapter_with_other_tensors_is_refused(tmp_path: Path) -> None:
    write_peft(tmp_path, {"lm_head.lora_A.weight": np.ones((2, 3), np.float32)}, rank=2, alpha=32, base_model="")
    arrays, _ = read_tensors(tmp_path / "adapter_model.safetensors")
    write_tensors(tmp_path / "adapter_model.safetensors", {**arrays, "odd": np.ones(1, np.float32)}, {})
    with pytest.raises(CheckpointError, match="odd"):
        read_peft(tmp_path)


def test_a_lora_of_another_model_cannot_be_merged(tmp_path: Path) -> None:
    engine, _ = _trained(tmp_path / "base", "tied", (True, True, True))
    write_model(tmp_path / "other", "one_kv_head")
    with pytest.raises(CheckpointError):
        write_merged(tmp_path / "merged", tmp_path / "other", engine.read_state("m").weights, scale=4.0)

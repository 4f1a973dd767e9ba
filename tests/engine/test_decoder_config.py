"""What mint does not compute is refused, and the message names it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from small_models import write_model

from mint.engine.decoder_config import read_decoder_config
from mint.engine.torch_engine import TorchEngine
from mint.errors import CheckpointError, InvalidRequestError
from mint.models.tensor_files import read_tensors, write_tensors

GOOD = {
    "model_type": "qwen3", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "llama"), ("hidden_act", "gelu"), ("attention_bias", True), ("use_sliding_window", True),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}), ("quantization_config", {"bits": 4}),
        ("layer_types", ["sliding_attention"]), ("num_key_value_heads", 3), ("head_dim", 10),
        ("hidden_size", 9), ("intermediate_size", 6), ("rope_theta", None),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e6}), ("vocab_size", "10"), ("hidden_size", 0),
        ("rope_parameters", {"partial_rotary_factor": 0.5, "rope_theta": 1e6}), ("num_hidden_layers", None),
    ],
)  # fmt: skip
def test_an_unsupported_option_is_refused_by_name(key: str, value: object) -> None:
    read_decoder_config(GOOD)
    with pytest.raises(InvalidRequestError, match=key):
        read_decoder_config({**GOOD, key: value})


def test_missing_extra_and_misshapen_tensors_are_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    path = tmp_path / "model.safetensors"
    whole, metadata = read_tensors(path)
    norm = "model.layers.1.self_attn.q_norm.weight"
    changes = {
        norm: {name: array for name, array in whole.items() if name != norm},
        "model.layers.0.self_attn.q_proj.bias": {
            **whole,
            "model.layers.0.self_attn.q_proj.bias": np.zeros(3, np.float32),
        },
        "model.norm.weight": {**whole, "model.norm.weight": np.zeros(3, np.float32)},
        "model.embed_tokens.weight": {
            **whole,
            "model.embed_tokens.weight": whole["model.embed_tokens.weight"].astype(np.int64),
        },
    }
    for name, arrays in changes.items():
        write_tensors(path, arrays, metadata)
        with pytest.raises(InvalidRequestError, match=name.replace(".", r"\.")):
            TorchEngine(device="cpu").load_base("base", str(tmp_path))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="cannot be read"):
        TorchEngine(device="cpu").load_base("base", str(tmp_path))


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert TorchEngine(device="cpu").load_base("a", str(tmp_path)).eos_token_ids == (3, 4)
    (tmp_path / "generation_config.json").unlink()
    assert TorchEngine(device="cpu").load_base("a", str(tmp_path)).eos_token_ids == (1,)


def test_a_sharded_folder_is_read_as_one(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    whole, metadata = read_tensors(tmp_path / "model.safetensors")
    names = sorted(whole)
    for index, part in enumerate((names[::2], names[1::2])):
        write_tensors(tmp_path / f"part-{index}.safetensors", {name: whole[name] for name in part}, metadata)
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert TorchEngine(device="cpu").load_base("a", str(tmp_path)).vocab_size == 97

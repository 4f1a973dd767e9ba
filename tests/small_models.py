"""Random Qwen3 folders, written by transformers: small, of odd shapes, tied and untied."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

SHAPES = {
    "tied": {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "tie_word_embeddings": True},
    "untied": {"hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4,
               "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 131, "tie_word_embeddings": False},
    "one_kv_head": {"hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 1, "num_attention_heads": 3,
                    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64, "tie_word_embeddings": True},
}  # fmt: skip


def write_model(folder: Path, shape: str, *, seed: int = 0, **changes: object) -> Qwen3ForCausalLM:
    """Writes a random model of `shape` to `folder` and returns it (float32, eval)."""
    torch.manual_seed(seed)
    config = Qwen3Config(**{**SHAPES[shape], "max_position_embeddings": 512, "eos_token_id": 1, **changes})
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # transformers starts norms at exactly 1, which would hide a forgotten one
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model

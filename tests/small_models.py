"""Random folders of every family, written by transformers: small, of odd shapes, tied and untied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SHAPES = {
    "tied": {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "tie_word_embeddings": True},
    "untied": {"hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4,
               "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 131, "tie_word_embeddings": False},
    "one_kv_head": {"hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 1, "num_attention_heads": 3,
                    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64, "tie_word_embeddings": True},
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    # transformers takes a Qwen2 head's width from the hidden size alone
    "qwen2": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None},
    # within 512 positions some frequencies are kept, some divided, some between
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
              "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
}  # fmt: skip
"""What each family adds to a shape."""


def write_model(
    folder: Path, shape: str, *, family: str = "qwen3", seed: int = 0, shards: str | None = None, **changes: object
) -> PreTrainedModel:
    """Writes a random model of `shape` to `folder` and returns it (float32, eval); `shards` is their largest size."""
    torch.manual_seed(seed)
    settings = {**SHAPES[shape], **FAMILIES[family], "max_position_embeddings": 512, "eos_token_id": 1, **changes}
    config = AutoConfig.for_model(family, **{key: value for key, value in settings.items() if value is not None})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # transformers starts norms at exactly 1, which would hide a forgotten one
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder, **({} if shards is None else {"max_shard_size": shards}))
    (folder / "tokenizer.json").write_text("{}")
    return model

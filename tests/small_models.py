"""Random folders of every family, written by transformers: small, of odd shapes, tied and untied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
)

SHAPES = {
    "tied": {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "tie_word_embeddings": True},
    "untied": {"hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4,
               "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 131, "tie_word_embeddings": False},
    "one_kv_head": {"hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 1, "num_attention_heads": 3,
                    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64, "tie_word_embeddings": True},
}  # fmt: skip

_MIXTURE = {"num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16}  # fmt: skip
_HYBRID = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
           "layer_types": ["linear_attention", "full_attention"],
           "linear_num_value_heads": 8, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
           "linear_value_head_dim": 32,
           "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    # transformers takes a Qwen2 head's width from the hidden size alone
    "qwen2": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None},
    # within 512 positions some frequencies are kept, some divided, some between
    "llama": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                                  "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
              "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "qwen3_next": {**_HYBRID, **_MIXTURE},
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": {**_HYBRID, **_MIXTURE},
    "mistral": {"sliding_window": 20, "num_attention_heads": 4, "num_key_value_heads": 2,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
                                    "original_max_position_embeddings": 128}},
    "smollm3": {"no_rope_layer_interval": 2, "no_rope_layers": None, "num_attention_heads": 4,
                "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1},
    "granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
                "logits_scaling": 3.0, "num_attention_heads": 4, "num_key_value_heads": 2},
    "phi3": {"sliding_window": 40, "pad_token_id": 0, "bos_token_id": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2,
             "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    "gemma3_text": {"sliding_window": 20, "layer_types": None, "sliding_window_pattern": 2, "num_attention_heads": 4,
                    "num_key_value_heads": 2, "query_pre_attn_scalar": 24, "pad_token_id": 0, "bos_token_id": 2,
                    "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                                        "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 20, "num_attention_heads": 4,
                "num_key_value_heads": 2, "pad_token_id": 0,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "truncate": False,
                                    "original_max_position_embeddings": 128}},
    "exaone4": {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 20, "num_hidden_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0},
    "olmo3": {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
              "sliding_window": 20, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
              "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                                  "full_attention": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
                                                     "original_max_position_embeddings": 128}}},
}  # fmt: skip
"""What each family adds to a shape."""

_DELTA_NET = {"num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
              "linear_value_head_dim": 8}  # fmt: skip
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
           "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
           "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": None}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2,
          "mamba_chunk_size": 8, "mamba_d_ssm": 96}  # fmt: skip

OTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "ministral3": {},
    "gemma2": {"sliding_window": 16},
    "gemma4_text": {"sliding_window": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97},
    "cohere2": {"sliding_window": 16},
    "glm4": {},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
                 "topk_group": 1, "first_k_dense_replace": 1},
    "glm_moe_dsa": _LATENT,
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "deepseek_v3": _LATENT,
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 64},
    "falcon_h1": _MAMBA,
    "granitemoehybrid": {**_MAMBA, "num_local_experts": 0, "layer_types": ["mamba", "attention"],
                         "shared_intermediate_size": 32},
    "nemotron_h": {"num_hidden_layers": 4, "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 24,
                   "n_groups": 1, "chunk_size": 8},
    "lfm2": {},
    "olmo_hybrid": _DELTA_NET,
}  # fmt: skip
"""Families that run on the modules of transformers, and what each adds to the shape of `write_other_model`."""

ODD_NAMES: dict[str, dict[str, Any]] = {
    # the last part of some names is a number
    "ctrl": {"n_embd": 48, "dff": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gemma3n_text": {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
                     "layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": None,
                     "laurel_rank": 8, "sliding_window": 16, "intermediate_size": [80, 80]},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
           "num_mem_blocks": 1, "num_key_value_heads": 4, "mamba_d_state": 8, "mamba_headdim": 24, "mamba_ngroups": 1,
           "n_mamba_heads": 4, "adapter_rank": 4, "chunk_size": 8, "use_shared_attention_adapter": True,
           "head_dim": None},
    # dense MLPs beside experts that are in one tensor
    "ernie4_5_moe": {"moe_num_shared_experts": 0, "moe_layer_start_index": 1, "moe_num_experts": 4, "moe_k": 2,
                     "moe_intermediate_size": 16},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 16},
    "longcat_flash": {"ffn_hidden_size": 64, "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "moe_topk": 2,
                      "zero_expert_num": 2, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "head_dim": 8,
                      "qk_nope_head_dim": 8, "v_head_dim": 8, "num_layers": 2, "num_key_value_heads": None},
}  # fmt: skip
"""Families on transformers in which the last name of a layer does not say which layer it is, as `OTHER_FAMILIES`."""

WITHOUT_MLP_IN_PEFT = {"qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "gpt_oss"}
"""Where loras on the MLP have no equal of the same names in PEFT: mixtures whose experts have one each."""

UNSUPPORTED_BY_PEFT = {"granitemoehybrid", "nemotron_h", "falcon_h1"}
"""PEFT refuses a lora on the out_proj of Mamba layers, because their fused kernels go around it."""


def other_config(family: str, **changes: object) -> PreTrainedConfig:
    """The configuration of a small model, such as of one of `OTHER_FAMILIES`; `changes` that are None leave a size
    out."""
    shape = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "max_position_embeddings": 256,
             "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}  # fmt: skip
    settings = {**shape, **OTHER_FAMILIES.get(family, {}), **changes}
    return AutoConfig.for_model(family, **{key: value for key, value in settings.items() if value is not None})


def write_other_model(folder: Path, family: str, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Writes a random model with `other_config` to `folder` and returns it (float32, eval)."""
    config = other_config(family, **changes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model


def write_model(
    folder: Path,
    shape: str,
    *,
    family: str = "qwen3",
    seed: int = 0,
    shards: str | None = None,
    experts_apart: bool = False,
    **changes: object,
) -> PreTrainedModel:
    """Writes a random model of `shape` to `folder` and returns it (float32, eval); `shards` is their largest size."""
    torch.manual_seed(seed)
    settings = {**SHAPES[shape], **FAMILIES[family], "max_position_embeddings": 512, "eos_token_id": 1, **changes}
    config = AutoConfig.for_model(family, **{key: value for key, value in settings.items() if value is not None})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # transformers starts norms at exactly 1 (or 0), which would hide a forgotten one
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
            else:
                parameter.normal_(0, 0.15)
    # published files of Qwen3.5-MoE have a layer's experts in one tensor; transformers writes them one by one
    as_saved = family != "qwen3_5_moe_text" or experts_apart
    model.save_pretrained(
        folder, save_original_format=as_saved, **({} if shards is None else {"max_shard_size": shards})
    )
    (folder / "tokenizer.json").write_text("{}")
    return model


QWENS_WITH_IMAGES = {"qwen3_5": Qwen3_5ForConditionalGeneration, "qwen3_5_moe": Qwen3_5MoeForConditionalGeneration}
"""By `model_type`; that of the text model alone ends with `_text`."""


def write_qwen_with_images(folder: Path, shape: str, *, family: str = "qwen3_5", seed: int = 0) -> None:
    """Writes a random Qwen3.5 as it is published: a text model of `shape`, and a model of images."""
    torch.manual_seed(seed)
    tied = SHAPES[shape]["tie_word_embeddings"]
    text = {**SHAPES[shape], **FAMILIES[f"{family}_text"], "max_position_embeddings": 512, "eos_token_id": 1}
    images = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
              "out_hidden_size": text["hidden_size"]}  # fmt: skip
    config = AutoConfig.for_model(family, text_config=text, vision_config=images, tie_word_embeddings=tied)
    model = QWENS_WITH_IMAGES[family](config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15)
    model.save_pretrained(folder, save_original_format=False)
    (folder / "tokenizer.json").write_text("{}")

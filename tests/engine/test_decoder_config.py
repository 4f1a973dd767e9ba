"""What mint does not compute is refused, and the message names it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from small_models import write_model, write_other_model
from transformers import AutoConfig, AutoModelForCausalLM, SmolLM3Config

from mint.engine.model.config import LinearScaling, Llama3Scaling, Rope, read_decoder_config
from mint.engine.torch_engine import TorchEngine
from mint.errors import CheckpointError, InvalidRequestError
from mint.models.tensor_files import read_tensors, write_tensors

GOOD = {
    "model_type": "qwen3", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
}  # fmt: skip


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
MOE: dict[str, Any] = {
    **GOOD,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gemma2"), ("model_type", None), ("hidden_act", "gelu"), ("attention_bias", True),
        ("mlp_bias", True), ("use_sliding_window", True), ("dual_chunk_attention_config", {"chunk_size": 8}),
        ("rope_scaling", {"type": "dynamic", "factor": 4.0}),
        ("layer_types", ["full_attention"] * 9), ("tie_word_embeddings", "false"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e6}),
        ("layer_types", ["sliding_attention"]), ("num_key_value_heads", 3), ("head_dim", 10),
        ("hidden_size", 9), ("intermediate_size", 6), ("rope_theta", None), ("rope_theta", True),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e6, "factor": -1.0}), ("vocab_size", "10"),
        ("hidden_size", 0),
        ("rope_parameters", {"partial_rotary_factor": 0.5, "rope_theta": 1e6}), ("num_hidden_layers", None),
        ("rope_scaling", {**LLAMA3, "rope_type": "llama3", "factor": 0}),
        ("rope_scaling", {**LLAMA3, "rope_type": "llama3", "low_freq_factor": 4.0}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
    ],
)  # fmt: skip
def test_an_unsupported_option_is_refused_by_name(key: str, value: object) -> None:
    read_decoder_config(GOOD)
    with pytest.raises(InvalidRequestError, match=key):
        read_decoder_config({**GOOD, key: value})


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", None), ("rms_norm_eps", "x"), ("rms_norm_eps", 0), ("rms_norm_eps", -1),
        ("rms_norm_eps", float("nan")), ("rms_norm_eps", [1e-6]), ("rope_scaling", [1]), ("rope_scaling", "yarn"),
        ("rope_parameters", [1]), ("rope_parameters", 3), ("rope_theta", float("nan")), ("rope_theta", float("inf")),
        ("rope_theta", 10**309), ("layer_types", 3), ("layer_types", [[1]]), ("layer_types", "full_attention"),
        ("num_hidden_layers", 10**7), ("max_position_embeddings", 10**15), ("max_position_embeddings", -1),
        ("num_hidden_layers", True), ("vocab_size", True), ("num_hidden_layers", 1.0),
        ("rope_parameters", {**YARN, "mscale": "x", "mscale_all_dim": 1.0}),
    ],
)  # fmt: skip
def test_a_malformed_value_is_refused_with_its_field_its_value_and_a_remedy(key: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        read_decoder_config({**GOOD, key: value})
    assert refusal.value.field is not None and refusal.value.field.startswith(f"config.json {key}")
    assert refusal.value.value is not None and refusal.value.remedy


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("qwen3_moe", "mlp_only_layers", 3), ("qwen3_moe", "mlp_only_layers", "0"),
        ("olmo3", "layer_types", 3), ("olmo3", "layer_types", [[1]]),
        ("olmo3", "rope_parameters", [1]), ("olmo3", "rope_parameters", {"full_attention": [1]}),
        ("olmo3", "rope_parameters", {"full_attention": {"rope_theta": 1e6}, "sliding_attention": [1]}),
    ],
)  # fmt: skip
def test_a_malformed_value_that_only_some_families_read_is_refused_by_name(
    model_type: str, key: str, value: object
) -> None:
    config = {**MOE, "model_type": model_type}
    read_decoder_config(config)
    with pytest.raises(InvalidRequestError, match=f"config.json {key}"):
        read_decoder_config({**config, key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_local_experts", None), ("num_experts_per_tok", 5), ("num_experts_per_tok", None),
        ("moe_intermediate_size", 6), ("moe_intermediate_size", None), ("decoder_sparse_step", 0),
    ],
)  # fmt: skip
def test_an_unsupported_mixture_is_refused_by_name(key: str, value: object) -> None:
    read_decoder_config(MOE)
    config = {name: size for name, size in MOE.items() if name != "num_experts" or key != "num_local_experts"}
    with pytest.raises(InvalidRequestError, match=key):
        read_decoder_config({**config, key: value})


QWEN3 = {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "head_dim": 128, "rope_scaling": None,
         "max_window_layers": 36, "sliding_window": None, "use_sliding_window": False, "rms_norm_eps": 1e-6,
         "rope_theta": 1000000, "max_position_embeddings": 40960, "vocab_size": 151936}  # fmt: skip
QWEN25 = {"model_type": "qwen2", "hidden_act": "silu", "max_window_layers": 21, "sliding_window": 32768,
          "use_sliding_window": False, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "vocab_size": 151936,
          "max_position_embeddings": 32768}  # fmt: skip
LLAMA31 = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
           "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 128256, "max_position_embeddings": 131072,
           "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
                            "original_max_position_embeddings": 8192}}  # fmt: skip

GRANITE = {"model_type": "granite", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
           "rms_norm_eps": 1e-5, "rope_theta": 10000000.0, "rope_scaling": None, "vocab_size": 49159,
           "max_position_embeddings": 131072, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
           "attention_multiplier": 0.015625, "logits_scaling": 8.0}  # fmt: skip

PHI4 = {"model_type": "phi3", "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-5,
        "rope_theta": 250000, "rope_scaling": None, "sliding_window": None, "vocab_size": 100352,
        "max_position_embeddings": 16384}  # fmt: skip

GEMMA3 = {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
          "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None,
          "sliding_window": 512, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "vocab_size": 262144,
          "attn_logit_softcapping": None, "final_logit_softcapping": None,
          "max_position_embeddings": 32768}  # fmt: skip

OLMO = {"model_type": "olmo2", "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-6,
        "rope_theta": 500000, "rope_scaling": None, "vocab_size": 100278, "max_position_embeddings": 4096}  # fmt: skip


def _sizes(hidden: int, inner: int, layers: int, heads: int, key_values: int, **more: object) -> dict[str, object]:
    return {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": key_values, **more}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "head_dim"),
    [
        ({**QWEN3, **_sizes(1024, 3072, 28, 16, 8, tie_word_embeddings=True)}, 128),  # Qwen3-0.6B
        ({**QWEN3, **_sizes(5120, 25600, 64, 64, 8, tie_word_embeddings=False)}, 128),  # Qwen3-32B
        ({**QWEN3, "model_type": "qwen3_moe", **_sizes(2048, 6144, 48, 32, 4, num_experts=128, num_experts_per_tok=8,
          moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
          tie_word_embeddings=False, router_aux_loss_coef=0.001)}, 128),  # Qwen3-30B-A3B
        ({**QWEN25, **_sizes(896, 4864, 24, 14, 2, tie_word_embeddings=True)}, 64),  # Qwen2.5-0.5B
        ({**QWEN25, **_sizes(3584, 18944, 28, 28, 4, tie_word_embeddings=False)}, 128),  # Qwen2.5-7B
        ({**LLAMA31, **_sizes(4096, 14336, 32, 32, 8, tie_word_embeddings=False)}, 128),  # Llama-3.1-8B
        ({**LLAMA31, **_sizes(2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True)}, 64),  # Llama-3.2-1B
        ({**GRANITE, **_sizes(2048, 8192, 40, 32, 8, tie_word_embeddings=True)}, 64),  # Granite-3.3-2B
        ({**PHI4, **_sizes(5120, 17920, 40, 40, 10, tie_word_embeddings=False)}, 128),  # Phi-4
        ({**PHI4, "sliding_window": 2047, "max_position_embeddings": 4096, "rope_theta": 10000.0,
          **_sizes(3072, 8192, 32, 32, 32, tie_word_embeddings=False)}, 96),  # Phi-3-mini-4k
        ({**GEMMA3, **_sizes(1152, 6912, 26, 4, 1, head_dim=256)}, 256),  # Gemma-3-1B
        ({**OLMO, **_sizes(4096, 11008, 32, 32, 32, tie_word_embeddings=False)}, 128),  # OLMo-2-7B
        ({**OLMO, "model_type": "olmo3", "sliding_window": 4096, "max_position_embeddings": 65536,
          **_sizes(4096, 11008, 32, 32, 32, tie_word_embeddings=False)}, 128),  # Olmo-3-7B
        ({**LLAMA31, "model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 30,
          **_sizes(2048, 4096, 30, 32, 8, head_dim=64, tie_word_embeddings=True)}, 64),  # EXAONE-4.0-1.2B
    ],
    ids=["Qwen3-0.6B", "Qwen3-32B", "Qwen3-30B-A3B", "Qwen2.5-0.5B", "Qwen2.5-7B", "Llama-3.1-8B", "Llama-3.2-1B",
         "Granite-3.3-2B", "Phi-4", "Phi-3-mini-4k", "Gemma-3-1B", "OLMo-2-7B", "Olmo-3-7B", "EXAONE-4.0-1.2B"],
)  # fmt: skip
def test_published_models_are_taken(config: dict[str, Any], head_dim: int) -> None:
    found = read_decoder_config(config)
    assert found.head_dim == head_dim and found.tie_word_embeddings == config.get("tie_word_embeddings", True)
    assert (found.experts is not None) == ("num_experts" in config)
    assert found.experts is None or len(found.experts.layers) == 48
    assert (found.ropes[0] is not None and found.ropes[0].scaling is not None) == (
        found.model_type in ("llama", "exaone4")
    )


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "gemma3", "text_config": {}}, "gemma3"),
        ({"model_type": "qwen2_moe", **_sizes(2048, 5632, 24, 16, 16)}, "qwen2_moe"),
        ({"model_type": "qwen3_next", **_sizes(2048, 5120, 48, 16, 2)}, "qwen3_next"),
        ({"model_type": "llama4"}, "llama4"), ({"model_type": "gemma2"}, "gemma2"),
        ({"model_type": "deepseek_v3"}, "deepseek_v3"),
        ({**QWEN3, **_sizes(1024, 3072, 28, 16, 8), "rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({**PHI4, **_sizes(3072, 8192, 32, 24, 8), "rope_scaling": {"type": "longrope"}}, "longrope"),
        # which transformers takes for longrope
        ({**PHI4, **_sizes(3072, 8192, 32, 24, 8), "rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({**QWEN25, **_sizes(3584, 18944, 28, 28, 4), "dual_chunk_attention_config": {"chunk_size": 262144}},
         "dual_chunk_attention_config"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_other_published_models_are_refused_with_the_families_that_there_are(
    config: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidRequestError, match=named) as refusal:
        read_decoder_config(config)
    assert all(family in str(refusal.value) for family in ("Qwen3 (qwen3)", "Qwen3-MoE", "Qwen2.5", "Llama (llama)"))


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_llama_3s_rope_scaling_is_read_in_every_spelling(place: str, kind: str) -> None:
    config = {**GOOD, "model_type": "llama", place: {**LLAMA3, kind: "llama3"}}
    scaled, plain = Rope(1e6, Llama3Scaling(8.0, 1.0, 4.0, 16.0)), Rope(1e6, None)
    assert read_decoder_config(config).ropes == (scaled,)
    assert read_decoder_config({**config, place: {kind: "default"}}).ropes == (plain,)
    assert read_decoder_config({**config, place: None}).ropes == (plain,)


def test_a_llama_without_rope_theta_has_the_one_of_transformers() -> None:
    config = {name: value for name, value in GOOD.items() if name not in ("rope_theta", "rope_parameters")}
    assert read_decoder_config({**config, "model_type": "llama"}).ropes == (Rope(10000.0, None),)


def test_a_window_as_long_as_the_context_is_none() -> None:
    config = {**GOOD, "model_type": "mistral", "sliding_window": GOOD["max_position_embeddings"]}
    assert read_decoder_config(config).windows == {}
    assert read_decoder_config({**config, "sliding_window": 31}).windows == {0: 31}


def test_layers_with_windows_have_a_rotation_of_their_own() -> None:
    """In the spelling of old files and of new ones, which name each layer's kind."""
    old = {
        **GEMMA3,
        **_sizes(1152, 6912, 8, 4, 1, head_dim=256),
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    found = read_decoder_config(old)
    local, full = Rope(10000.0, None), Rope(1e6, LinearScaling(8.0))
    assert found.ropes == (*[local] * 5, full, *[local] * 2)
    assert found.windows == dict.fromkeys((0, 1, 2, 3, 4, 6, 7), 512)
    new = AutoConfig.for_model(**old).to_dict()
    assert "layer_types" in new and "full_attention" in new["rope_parameters"]
    assert read_decoder_config(new) == found


GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "vocab_size": 201088, **_sizes(2880, 2880, 24, 64, 8, head_dim=64),
    "max_position_embeddings": 131072, "attention_bias": True, "hidden_act": "silu", "num_local_experts": 32,
    "num_experts_per_tok": 4, "experts_per_token": 4, "rms_norm_eps": 1e-5, "sliding_window": 128, "rope_theta": 150000,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                     "original_max_position_embeddings": 4096},
}  # fmt: skip


def test_gpt_oss_is_read_as_published_as_transformers_writes_it_and_with_its_defaults() -> None:
    found = read_decoder_config(GPT_OSS)
    assert found.windows == dict.fromkeys(range(0, 24, 2), 128)
    assert found.experts is not None and found.experts.norm_topk_prob
    assert (found.experts.count, found.experts.per_token, found.experts.intermediate_size) == (32, 4, 2880)
    assert read_decoder_config(AutoConfig.for_model(**GPT_OSS).to_dict()) == found
    defaults = ("layer_types", "rope_theta", "rope_scaling", "sliding_window", "attention_bias", "rms_norm_eps")
    assert read_decoder_config({key: value for key, value in GPT_OSS.items() if key not in defaults}) == found


QWEN3_NEXT = {
    "model_type": "qwen3_next", **_sizes(2048, 5120, 48, 16, 2), "head_dim": 256, "vocab_size": 151936,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True,
    "num_experts": 512, "num_experts_per_tok": 10, "shared_expert_intermediate_size": 512, "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_scaling": None, "tie_word_embeddings": False,
    "attention_bias": False, "hidden_act": "silu",
}  # fmt: skip
"""Of Qwen3-Next-80B-A3B."""


def test_qwen3_next_is_read_as_published_and_as_transformers_writes_it() -> None:
    found = read_decoder_config(QWEN3_NEXT)
    assert found.attention_layers == list(range(3, 48, 4)) and found.rotary_dim == 64
    assert found.delta_net is not None and found.delta_net.inputs == {"qkvz": 12288, "ba": 64}
    assert found.experts is not None and found.experts.shared_intermediate_size == 512
    assert read_decoder_config(AutoConfig.for_model(**QWEN3_NEXT).to_dict()) == found


def test_a_mixture_without_dense_layers_need_not_say_how_wide_they_are() -> None:
    sizes = {key: value for key, value in QWEN3_NEXT.items() if key != "intermediate_size"}
    assert read_decoder_config({**sizes, "model_type": "qwen3_5_moe_text"}).intermediate_size == 512
    with pytest.raises(InvalidRequestError, match="intermediate_size"):
        read_decoder_config({**sizes, "mlp_only_layers": [0]})


@pytest.mark.parametrize(("key", "value"), [("swiglu_limit", 9.0), ("swiglu_alpha", 1.0), ("attention_bias", False)])
def test_another_gpt_oss_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=key):
        read_decoder_config({**GPT_OSS, key: value})


@pytest.mark.parametrize(
    "family",
    ["mistral", "gemma3_text", "olmo3", "exaone4", "phi3", "smollm3", "granite", "qwen3_5_text", "qwen3_next",
     "qwen3_5_moe_text"],
)  # fmt: skip
def test_what_a_file_leaves_out_is_what_transformers_takes(family: str) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
               "shared_expert_intermediate_size": 16}  # fmt: skip
    sizes = {"vocab_size": 10, "head_dim": 8, "max_position_embeddings": 8192, **_sizes(16, 16, 8, 2, 1), **experts}
    found = read_decoder_config({"model_type": family, **sizes})
    assert found == read_decoder_config(AutoConfig.for_model(family, pad_token_id=0, **sizes).to_dict())


@pytest.mark.parametrize(
    ("given", "layers"),
    [({}, {3, 7}), ({"no_rope_layer_interval": 3}, {2, 5}), ({"no_rope_layers": [1, 0, 1, 1, 1, 1, 0, 1]}, {1, 6})],
)
def test_the_layers_without_rotation_are_read_as_transformers_reads_them(
    given: dict[str, Any], layers: set[int]
) -> None:
    config = {**GOOD, "model_type": "smollm3", "num_hidden_layers": 8, **given}
    assert {layer for layer, rope in enumerate(read_decoder_config(config).ropes) if rope is None} == layers
    marks = SmolLM3Config(num_hidden_layers=8, **given).no_rope_layers
    assert {layer for layer, is_rotated in enumerate(marks) if not is_rotated} == layers


def test_which_layers_are_mixtures_is_read_as_transformers_reads_it() -> None:
    config = {**MOE, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    experts = read_decoder_config(config).experts
    assert experts is not None and experts.layers == {1, 5} and not experts.norm_topk_prob
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    sparse = {index for index, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")}
    assert experts.layers == sparse


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
    with pytest.raises(CheckpointError, match=r"cannot be read"):
        TorchEngine(device="cpu").load_base("base", str(tmp_path))


@pytest.mark.parametrize(("number", "name"), [(float("nan"), "model.norm.weight"), (float("inf"), "layers.1.mlp.up")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, number: float, name: str) -> None:
    write_model(tmp_path, "tied")
    path = tmp_path / "model.safetensors"
    whole, metadata = read_tensors(path)
    [own] = [own for own in whole if name in own]
    damaged = whole[own].copy()
    damaged.flat[-1] = number
    write_tensors(path, {**whole, own: damaged}, metadata)
    with pytest.raises(CheckpointError, match=rf"the tensor {re.escape(own)} has numbers that are not finite"):
        TorchEngine(device="cpu").load_base("base", str(tmp_path))


def test_an_unembedding_that_is_written_twice_is_the_embedding_or_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    path = tmp_path / "model.safetensors"
    whole, metadata = read_tensors(path)
    embedding = whole["model.embed_tokens.weight"]
    write_tensors(path, {**whole, "lm_head.weight": embedding}, metadata)
    TorchEngine(device="cpu").load_base("base", str(tmp_path))
    write_tensors(path, {**whole, "lm_head.weight": embedding + np.float32(1)}, metadata)
    with pytest.raises(InvalidRequestError, match=r"tie_word_embeddings = True: .*Set it to false"):
        TorchEngine(device="cpu").load_base("base", str(tmp_path))


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert TorchEngine(device="cpu").load_base("a", str(tmp_path)).eos_token_ids == (3, 4)
    (tmp_path / "generation_config.json").unlink()
    assert TorchEngine(device="cpu").load_base("a", str(tmp_path)).eos_token_ids == (1,)


@pytest.mark.parametrize("ends", ["x", [1, "2"], 1.5, 2**31, -1, [1, -2], 97, [97, 98]])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_end_tokens_that_are_no_ids_of_the_model_are_refused(ends: object, file: str, tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    (tmp_path / "generation_config.json").unlink()
    _change(tmp_path / file, eos_token_id=ends)
    with pytest.raises(InvalidRequestError, match=rf"{file}: has the eos_token_id"):
        TorchEngine(device="cpu").load_base("a", str(tmp_path))


def test_one_of_several_end_tokens_may_lie_beyond_the_vocabulary(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    _change(tmp_path / "generation_config.json", eos_token_id=[1, 97])
    assert TorchEngine(device="cpu").load_base("a", str(tmp_path)).eos_token_ids == (1, 97)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_position_embeddings": -1}, r"has the max_position_embeddings -1, which is no length"),
        ({"max_position_embeddings": 0}, r"has the max_position_embeddings 0, which is no length"),
        ({"max_position_embeddings": 1e9}, r"has the max_position_embeddings 1000000000\.0, which is no length"),
        ({"max_position_embeddings": "4k"}, r"has the max_position_embeddings '4k', which is no length"),
        ({"max_position_embeddings": 10**9}, r"contexts of at most 16777216 tokens\. Write the longest sequence"),
        ({"num_hidden_layers": 10**8}, r"has the num_hidden_layers 100000000; mint computes at most 4096 layers"),
        ({"dtype": "float99"}, r"has the dtype 'float99', which is no dtype of torch\. Write that of the weights"),
        ({"torch_dtype": 7}, r"has the torch_dtype 7, which is no dtype"),
    ],
)
def test_settings_that_are_impossible_are_refused_on_both_implementations(
    family: str, settings: dict[str, object], named: str, tmp_path: Path
) -> None:
    write_model(tmp_path, "tied") if family == "qwen3" else write_other_model(tmp_path, family)
    _change(tmp_path / "config.json", **settings)
    with pytest.raises(InvalidRequestError, match=rf"config\.json: .*{named}"):
        TorchEngine(device="cpu").load_base("a", str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"hidden_act": "weird"}, r"does not know hidden_act = 'weird'"),
        ({"rope_parameters": {"rope_type": "weird", "rope_theta": 1e4}}, r"know rope_parameters\.rope_type = 'weird'"),
    ],
)
def test_a_setting_that_neither_implementation_knows_is_named(
    settings: dict[str, object], named: str, tmp_path: Path
) -> None:
    write_model(tmp_path, "tied")
    _change(tmp_path / "config.json", **settings)
    with pytest.raises(InvalidRequestError, match=named):
        TorchEngine(device="cpu").load_base("a", str(tmp_path))


def _change(file: Path, **settings: object) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**content, **settings}))


def test_a_base_that_does_not_fit_or_is_damaged_is_named_with_a_remedy(tmp_path: Path) -> None:
    write_model(tmp_path, "tied")
    tensors = load_file(tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"cannot be read.*again"):
        TorchEngine(device="cpu").load_base("a", str(tmp_path))
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidRequestError, match=r"base_model = .*: tensor model\.norm\.weight is missing") as refusal:
        TorchEngine(device="cpu").load_base("a", str(tmp_path))
    assert refusal.value.value == str(tmp_path)

"""Every causal family of transformers: does an export give the logits that mint gives?

    python -m benchmarks.exactness.exported_families [FAMILY ...]

Writes a random small model of each family, trains LoRAs on attention, MLP and unembedding, and exports them: merged,
as `mint export --format hf` does, and as an adapter for PEFT. A figure is the largest difference between a logprob of
mint and the same one of transformers, over all tokens of the vocabulary at 30 places, in float32. `why not` is the
first line of the error where a model could not be made in these sizes, trained or exported.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from mint.compose.export import write_merged
from mint.engine.bases.lora_layers import output_layer
from mint.engine.protocol import LORA_ALPHA, AdamSpec, LoraSpec, LossSpec, TrainDatum
from mint.engine.torch_engine import TorchEngine
from mint.models.folder import ModelFolder
from mint.models.peft_format import write_peft
from tests.small_models import FAMILIES, ODD_NAMES, OTHER_FAMILIES, other_config, write_other_model

EQUAL_HEADS = {"head_dim": None, "num_key_value_heads": 4}
"""Families whose heads all have a width of hidden size / heads."""

LATENT = OTHER_FAMILIES["deepseek_v3"]

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

IMAGES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip

QWEN_IMAGES = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 48,
               "num_position_embeddings": 16}  # fmt: skip


def text_config(family: str, **changes: Any) -> dict[str, Any]:
    """The configuration of a small text model within one of texts and images."""
    settings = other_config(family, **changes).to_dict()
    return {key: value for key, value in settings.items() if value is not None}


QWEN4 = {**EXPERTS, "layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": 2,
         "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2,
         "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "shared_expert_intermediate_size": 16, "num_experts": 4}  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    **ODD_NAMES,
    "axk1": LATENT,
    "axk2": LATENT,
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 8,
              "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 8},
    "bitnet": EQUAL_HEADS,
    "blenderbot": {"decoder_attention_heads": 4, "encoder_attention_heads": 4, "decoder_layers": 2,
                   "encoder_layers": 1, "decoder_ffn_dim": 64, "encoder_ffn_dim": 64},
    "codegen": {"rotary_dim": 4, "n_ctx": 256},
    "cohere_compass_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
                            "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                                                "full_attention": {"rope_type": "default", "rope_theta": 500.0}}},
    "dbrx": {"d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "head_dim": None,
             "num_attention_heads": None, "num_key_value_heads": None,
             "attn_config": {"kv_n_heads": 2, "rope_theta": 500.0, "clip_qkv": 8.0},
             "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 48}},
    "deepseek_v2": {**LATENT, "head_dim": 8},
    "deepseek_v32": {**LATENT, "index_n_heads": 32, "index_head_dim": 16, "index_topk": 8},
    "dots1": {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_text": {**LATENT, "override_configs": {}},
    "falcon": {"head_dim": None},
    "gemma3": {"text_config": other_config("gemma3_text", sliding_window=16).to_dict(),
               "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                                 "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
               "mm_tokens_per_image": 4, "image_token_index": 96, "boi_token_index": 95, "eoi_token_index": 94},
    "gemma4": {"text_config": text_config("gemma4_text"),
               "vision_config": {**IMAGES, "num_key_value_heads": 2, "head_dim": 16}},
    "gemma4_unified": {"text_config": {**text_config("gemma4_text"), "model_type": "gemma4_unified_text"}},
    "glm4_moe_lite": LATENT,
    "got_ocr2": {"text_config": text_config("qwen2", head_dim=None),
                 "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 64,
                                   "image_size": 32, "patch_size": 16, "output_channels": 16,
                                   "global_attn_indexes": [0]}},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox_japanese": EQUAL_HEADS,
    "gptj": {"rotary_dim": 4},
    "helium": {"head_dim": 12},
    "inkling_text": {**EXPERTS, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
                     "sliding_window_size": 16, "d_rel": 4, "rel_extent": 16, "n_routed_experts": 4,
                     "n_shared_experts": 1, "layer_types": ["hybrid_sliding", "hybrid"],
                     "mlp_layer_types": ["dense", "sparse"]},
    "kimi_linear": {**LATENT, **EXPERTS, "num_experts": 4, "linear_head_dim": 8, "linear_num_heads": 2,
                    "num_experts_per_token": 2, "n_group": None, "num_expert_group": 1, "q_lora_rank": None,
                    "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_experts": 4, "num_dense_layers": 1},
    "llama4": {"text_config": text_config("llama4_text"),
               "vision_config": {**IMAGES, "vision_output_dim": 32, "projector_input_dim": 32,
                                 "projector_output_dim": 32}},
    "mamba2": {"num_heads": 12, "head_dim": 8, "expand": 2, "n_groups": 1, "state_size": 8},
    "minicpm3": {**LATENT, "head_dim": 16},
    "modernbert-decoder": EQUAL_HEADS,
    "olmoe": EQUAL_HEADS,
    "persimmon": EQUAL_HEADS,
    "phi4_multimodal": {"vision_config": {**IMAGES, "crop_size": 28},
                        "audio_config": {"hidden_size": 32, "intermediate_size": 64, "num_blocks": 1,
                                         "num_attention_heads": 2, "ext_pw_out_channel": 32,
                                         "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32}},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 1, "num_decoder_layers": 2,
                   "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "decoder_ffn_dim": 64,
                   "encoder_ffn_dim": 64},
    "qwen3_5": {"text_config": text_config("qwen3_5_text", **FAMILIES["qwen3_5_text"]), "vision_config": QWEN_IMAGES},
    "qwen3_5_moe": {"text_config": text_config("qwen3_5_moe_text", **FAMILIES["qwen3_5_moe_text"]),
                    "vision_config": QWEN_IMAGES},
    "qwen4_exp": {"text_config": text_config("qwen4_exp_text", **QWEN4)},
    "qwen4_exp_text": QWEN4,
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"], "attention_head_size": 16,
                 "feed_forward_size": 64, "local_attn_chunk_length": 16},
    "stablelm": {"head_dim": None, "num_attention_heads": 2},
    "xlnet": {"max_position_embeddings": None, "d_model": 48, "n_layer": 2, "n_head": 4, "d_inner": 64},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "youtu": LATENT,
    "zamba": {"attention_hidden_size": 96, "attention_head_dim": 24, "head_dim": None, "num_key_value_heads": 4,
              "n_mamba_heads": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "num_hidden_layers": 4,
              "layers_block_type": ["linear_attention", "hybrid"] * 2, "use_mamba_kernels": False},
}  # fmt: skip
"""What a family needs beside or instead of the sizes of `other_config`."""

MOST_PARAMETERS = 100_000_000
"""A family that has more in these sizes takes others from its defaults, and is left out."""

TOKENS = np.random.default_rng(0).integers(3, 97, 30)


def write_model(folder: Path, family: str) -> None:
    """A random model in float32 whose layers all matter.

    Raises:
        ValueError: it would be large.
    """
    changes = {"is_decoder": True, **CHANGES.get(family, {})}
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(other_config(family, **changes))
    size = sum(parameter.numel() for parameter in empty.parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters in these sizes")
    write_other_model(folder, family, **changes)


def train(folder: Path, lora: LoraSpec) -> TorchEngine:
    """An engine with a model `m` after three steps."""
    engine = TorchEngine(dtype="float32", threads=1, device="cpu")
    engine.load_base("base", str(folder))
    engine.create_model("m", "base", lora)
    rng = np.random.default_rng(1)
    for _ in range(3):
        rows = rng.integers(3, 97, (4, 25))
        data = [TrainDatum(row[:-1], row[1:], np.ones(24, np.float32)) for row in rows]
        engine.forward_backward("m", data, LossSpec("cross_entropy"))
        engine.optim_step("m", AdamSpec(0.02, 0.9, 0.95, 1e-8, 0.0, 0.0))
    return engine


def logprobs_of_mint(engine: TorchEngine) -> np.ndarray:
    """[30, V]: each token of the vocabulary as the target of each place."""
    data = [TrainDatum(TOKENS, np.full(30, token), np.ones(30, np.float32)) for token in range(97)]
    return np.stack(engine.forward("m", data, LossSpec("cross_entropy")).logprobs, axis=1)


def logprobs_of(model: torch.nn.Module) -> np.ndarray:
    """[30, V] by transformers."""
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(TOKENS)[None], use_cache=False).logits
    return logits[0].log_softmax(-1).numpy()[:, :97]


def measured(work: Callable[[], float]) -> str:
    """A figure, or why there is none."""
    try:
        return f"{work():.1e}"
    except Exception as error:  # noqa: BLE001 - the boundary to the code of a family, which may raise anything
        return why_not(error)


def why_not(error: Exception) -> str:
    """The first line of an error."""
    return f"why not: {str(error).strip().splitlines()[0][:110] if str(error) else type(error).__name__}"


def row_of(family: str, folder: Path) -> str:
    """A row of the table."""
    lora = LoraSpec(rank=8, seed=0, train_attn=True, train_mlp=True, train_unembed=True)
    base = folder / "base"
    write_model(base, family)
    engine = train(base, lora)
    weights = dict(engine.read_weights("m"))
    ours = logprobs_of_mint(engine)

    def merged() -> float:
        write_merged(folder / "merged", base, weights, scale=LORA_ALPHA / lora.rank)
        return float(np.abs(logprobs_of(AutoModelForCausalLM.from_pretrained(folder / "merged")) - ours).max())

    def adapted() -> float:
        write_peft(
            folder / "adapter",
            weights,
            rank=lora.rank,
            alpha=LORA_ALPHA,
            base_model=str(base),
            output_layer=output_layer(ModelFolder(base)),
        )
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder / "adapter"))
        return float(np.abs(logprobs_of(model) - ours).max())

    implementation = engine.load_base("base", "").settings["implementation"]
    return f"| {family} | {implementation} | {measured(merged)} | {measured(adapted)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="as in config.json's model_type; all if none is given")
    families = parser.parse_args().families or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    print("| family | runs on | merged | PEFT |\n|---|---|---|---|")
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(row_of(family, Path(folder)), flush=True)
            except Exception as error:  # noqa: BLE001 - as in `measured`
                print(f"| {family} | {why_not(error)} | | |", flush=True)


if __name__ == "__main__":
    main()

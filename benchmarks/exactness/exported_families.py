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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from mint.compose.export import write_merged
from mint.engine.protocol import LORA_ALPHA, AdamSpec, LoraSpec, LossSpec, TrainDatum
from mint.engine.torch_engine import TorchEngine
from mint.models.peft_format import write_peft

SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "max_position_embeddings": 256,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "is_decoder": True,
}  # fmt: skip

EQUAL_HEADS = {"head_dim": None, "num_key_value_heads": 4}
"""Families whose heads all have a width of hidden size / heads."""

LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
          "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
          "first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": None}  # fmt: skip

MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2,
         "mamba_chunk_size": 8, "mamba_d_ssm": 96}  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "bitnet": EQUAL_HEADS,
    "codegen": {"rotary_dim": 4, "n_ctx": 256},
    "ctrl": {"n_embd": 48, "dff": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "deepseek_v2": {**LATENT, "head_dim": 8},
    "deepseek_v3": LATENT,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "falcon": {"head_dim": None},
    "falcon_h1": MAMBA,
    "gemma3": {"text_config": {**SIZES, "sliding_window": 16},
               "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                                 "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
               "mm_tokens_per_image": 4, "image_token_index": 96, "boi_token_index": 95, "eoi_token_index": 94},
    "gemma3n_text": {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
                     "layer_types": ["sliding_attention", "full_attention"], "activation_sparsity_pattern": None,
                     "laurel_rank": 8, "sliding_window": 16, "intermediate_size": [80, 80]},
    "gemma4_text": {"sliding_window": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
                 "topk_group": 1, "first_k_dense_replace": 1},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox_japanese": EQUAL_HEADS,
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {**MAMBA, "num_local_experts": 0, "layer_types": ["mamba", "attention"],
                         "shared_intermediate_size": 32},
    "helium": {"head_dim": 12},
    "longcat_flash": {"ffn_hidden_size": 64, "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "moe_topk": 2,
                      "zero_expert_num": 2, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "head_dim": 8,
                      "qk_nope_head_dim": 8, "v_head_dim": 8, "num_layers": 2, "num_key_value_heads": None},
    "mamba2": {"num_heads": 12, "head_dim": 8, "expand": 2, "n_groups": 1, "state_size": 8},
    "minicpm3": {**LATENT, "head_dim": 16},
    "modernbert-decoder": EQUAL_HEADS,
    "nemotron_h": {"num_hidden_layers": 4, "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 24,
                   "n_groups": 1, "chunk_size": 8},
    "olmo_hybrid": {"num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
                    "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "olmoe": EQUAL_HEADS,
    "persimmon": EQUAL_HEADS,
    "stablelm": {"head_dim": None, "num_attention_heads": 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
               "num_mem_blocks": 1, "num_key_value_heads": 4, "mamba_d_state": 8, "mamba_headdim": 24,
               "mamba_ngroups": 1, "n_mamba_heads": 4, "adapter_rank": 4, "chunk_size": 8,
               "use_shared_attention_adapter": True, "head_dim": None},
}  # fmt: skip
"""What a family needs beside or instead of `SIZES`; None leaves a size out."""

MOST_PARAMETERS = 100_000_000
"""A family that has more in these sizes takes others from its defaults, and is left out."""

TOKENS = np.random.default_rng(0).integers(3, 97, 30)


def write_model(folder: Path, family: str) -> PreTrainedModel:
    """A random model in float32 whose layers all matter.

    Raises:
        ValueError: it would be large.
    """
    settings = {key: value for key, value in {**SIZES, **CHANGES.get(family, {})}.items() if value is not None}
    config = AutoConfig.for_model(family, **settings)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters in these sizes")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model


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
        write_peft(folder / "adapter", weights, rank=lora.rank, alpha=LORA_ALPHA, base_model=str(base))
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

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
from mint.engine.protocol import LORA_ALPHA, AdamSpec, LoraSpec, LossSpec, TrainDatum
from mint.engine.torch_engine import TorchEngine
from mint.models.peft_format import write_peft
from tests.small_models import ODD_NAMES, OTHER_FAMILIES, other_config, write_other_model

EQUAL_HEADS = {"head_dim": None, "num_key_value_heads": 4}
"""Families whose heads all have a width of hidden size / heads."""

LATENT = OTHER_FAMILIES["deepseek_v3"]

CHANGES: dict[str, dict[str, Any]] = {
    **ODD_NAMES,
    "bitnet": EQUAL_HEADS,
    "codegen": {"rotary_dim": 4, "n_ctx": 256},
    "deepseek_v2": {**LATENT, "head_dim": 8},
    "falcon": {"head_dim": None},
    "gemma3": {"text_config": other_config("gemma3_text", sliding_window=16).to_dict(),
               "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                                 "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
               "mm_tokens_per_image": 4, "image_token_index": 96, "boi_token_index": 95, "eoi_token_index": 94},
    "glm4_moe_lite": LATENT,
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox_japanese": EQUAL_HEADS,
    "gptj": {"rotary_dim": 4},
    "helium": {"head_dim": 12},
    "mamba2": {"num_heads": 12, "head_dim": 8, "expand": 2, "n_groups": 1, "state_size": 8},
    "minicpm3": {**LATENT, "head_dim": 16},
    "modernbert-decoder": EQUAL_HEADS,
    "olmoe": EQUAL_HEADS,
    "persimmon": EQUAL_HEADS,
    "stablelm": {"head_dim": None, "num_attention_heads": 2},
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

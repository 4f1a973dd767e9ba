"""A small mixture of experts that can do what `mint/tiny` can do, without a training run of its own.

Sparse upcycling (arXiv 2212.05055): each MLP of `mint/tiny` is copied into every expert of a layer, and the routers are
random. The experts then differ by noise, so that a token's logprob depends on the experts that it is sent to.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import mint.models

SOURCE = Path(mint.models.__file__).parent / "tiny"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
MATRICES = ("gate_proj", "up_proj", "down_proj")


def write_mixture(folder: Path, *, experts: int = 8, active: int = 2, noise: float = 1.0, seed: int = 0) -> Path:
    """Writes a Qwen3-MoE folder in float32, and returns it.

    `noise` is the deviation of what is added to the matrices of each expert, as a share of the deviation of the matrix.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        shutil.copy(SOURCE / name, folder / name)
    config = json.loads((SOURCE / "config.json").read_text())
    layers, width, mlp = config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"]
    changed = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": active,
        "moe_intermediate_size": mlp,
        "norm_topk_prob": True,  # the weights of a token's experts add up to 1, so that equal experts are the MLP
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config | changed, indent=1))
    drawn = torch.Generator().manual_seed(seed)
    tensors = {name: tensor.float() for name, tensor in load_file(SOURCE / "model.safetensors").items()}
    for layer in (f"model.layers.{place}.mlp" for place in range(layers)):
        tensors[f"{layer}.gate.weight"] = torch.randn(experts, width, generator=drawn) / width**0.5
        for matrix in MATRICES:
            dense = tensors.pop(f"{layer}.{matrix}.weight")
            for expert in range(experts):
                added = torch.randn(dense.shape, generator=drawn) * dense.std() * noise
                tensors[f"{layer}.experts.{expert}.{matrix}.weight"] = dense + added
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

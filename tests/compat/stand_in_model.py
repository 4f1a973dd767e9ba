"""A base model under the name that a recipe expects: the bundled one, with the control tokens of newer chat templates.

Recipes name models that no test can load. Their renderers ask the tokenizer for `<think>` and `</think>`, and their
prompts need more room than the bundled model has.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mint.models.registry import BUNDLED

CONTROL_TOKENS = ("<think>", "</think>")
CONTEXT = 262_144


def make_stand_in(work_dir: Path, name: str, *, noise: float = 0.0, tied: bool = True) -> Path:
    """The folder `work_dir/NAME`: seen from `work_dir`, what loads a tokenizer by that name finds it.

    `noise` is the spread of what is added to the weights, relative to theirs: with it, this is another model. Unless
    `tied`, the unembedding is a tensor of its own, equal to the embedding.
    """
    folder = work_dir / name
    shutil.copytree(BUNDLED["mint/tiny"], folder)
    config = json.loads((folder / "config.json").read_text())
    first = config["vocab_size"]
    config |= {"vocab_size": first + len(CONTROL_TOKENS), "max_position_embeddings": CONTEXT}
    config["tie_word_embeddings"] = tied
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][0]
    for number, token in enumerate(CONTROL_TOKENS):
        tokenizer["added_tokens"].append({**like, "id": first + number, "content": token, "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    [weights] = folder.glob("*.safetensors")
    tensors = load_file(weights)
    for key, tensor in tensors.items():
        if tensor.shape[0] == first:  # the embedding, and the head where it is not tied
            tensors[key] = torch.cat([tensor, tensor.new_zeros(len(CONTROL_TOKENS), *tensor.shape[1:])])
        if noise and tensor.is_floating_point():
            drawn = torch.randn(tensors[key].shape, generator=torch.Generator().manual_seed(0))
            tensors[key] = (tensors[key].float() + noise * tensors[key].float().std() * drawn).to(tensor.dtype)
    if not tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, weights)
    return folder

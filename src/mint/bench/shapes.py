"""What `mint bench grpo` computes: the step's shape, a random base model of that shape, and the prompts.

Both sides get the same folder and the same prompts, made here from a seed. Knows nothing of who runs the step.

Letters: H hidden · V vocabulary · F the MLP's inner width · Q, K query and key/value width (heads x head size).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mint.models.tensor_files import write_tensors


@dataclass(frozen=True)
class ModelShape:
    """A Qwen3 architecture with tied embeddings; the defaults make 0.85 M parameters."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    mlp: int = 384
    vocabulary: int = 512
    context: int = 512

    @property
    def lora_parameters_per_rank(self) -> int:
        """Trained parameters per unit of rank with a lora on all seven linear layers, and none on the unembedding."""
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        outputs_and_inputs = [
            *((query, self.hidden), (key, self.hidden), (key, self.hidden), (self.hidden, query)),
            *((self.mlp, self.hidden), (self.mlp, self.hidden), (self.hidden, self.mlp)),
        ]
        return self.layers * sum(rows + columns for rows, columns in outputs_and_inputs)


@dataclass(frozen=True)
class GrpoShape:
    """One GRPO step: `prompts` x `group` sequences of `prompt_tokens` + `max_tokens`."""

    model: ModelShape = ModelShape()
    prompts: int = 8
    group: int = 8
    prompt_tokens: int = 48
    max_tokens: int = 32
    rank: int = 16
    alpha: int = 32
    learning_rate: float = 1e-4

    @property
    def sequences(self) -> int:
        """Sequences sampled and trained per step."""
        return self.prompts * self.group

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled per step; no sequence stops early."""
        return self.sequences * self.max_tokens


def write_base_model(folder: Path, shape: ModelShape, *, seed: int) -> None:
    """A Hugging Face folder that transformers and mint load as it is: random float32 weights and a tokenizer.

    The end token's id lies just beyond the vocabulary, so that nothing can sample it and every sequence has full
    length on both sides, at the price of the usual check for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config(shape))
    _write_json(folder / "tokenizer.json", _tokenizer(shape.vocabulary))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<eos>",
            "pad_token": "w0",
            "model_max_length": shape.context,
        },
    )
    write_tensors(folder / "model.safetensors", _weights(shape, np.random.default_rng(seed)), {"format": "pt"})


def make_prompts(shape: GrpoShape, *, steps: int, seed: int) -> list[str]:
    """`steps` x `shape.prompts` different prompts, in the order in which both sides use them.

    Each word is one token.
    """
    ids = np.random.default_rng(seed).integers(
        1, shape.model.vocabulary, size=(steps * shape.prompts, shape.prompt_tokens)
    )
    return [" ".join(f"w{token}" for token in row) for row in ids.tolist()]


def _config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.mlp,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": None,
        "bos_token_id": None,
    }


def _tokenizer(vocabulary: int) -> dict[str, Any]:
    """Words `w0` … in the form of the `tokenizers` library: split at blanks, look up, join with blanks."""
    words = {f"w{token}": token for token in range(vocabulary)}
    end = {"id": vocabulary, "content": "<eos>", "special": True, "normalized": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | flags],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words | {"<eos>": vocabulary}, "unk_token": "w0"},
    }


def _weights(shape: ModelShape, rng: np.random.Generator) -> dict[str, np.ndarray]:
    query, key = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    matrices = {"model.embed_tokens": (shape.vocabulary, shape.hidden)}
    norms = {"model.norm": shape.hidden}
    for layer in (f"model.layers.{index}" for index in range(shape.layers)):
        matrices |= {
            f"{layer}.self_attn.q_proj": (query, shape.hidden),
            f"{layer}.self_attn.k_proj": (key, shape.hidden),
            f"{layer}.self_attn.v_proj": (key, shape.hidden),
            f"{layer}.self_attn.o_proj": (shape.hidden, query),
            f"{layer}.mlp.gate_proj": (shape.mlp, shape.hidden),
            f"{layer}.mlp.up_proj": (shape.mlp, shape.hidden),
            f"{layer}.mlp.down_proj": (shape.hidden, shape.mlp),
        }
        norms |= {f"{layer}.input_layernorm": shape.hidden, f"{layer}.post_attention_layernorm": shape.hidden}
        norms |= {f"{layer}.self_attn.q_norm": shape.head_size, f"{layer}.self_attn.k_norm": shape.head_size}
    drawn = {name: rng.normal(0.0, 0.02, size).astype(np.float32) for name, size in matrices.items()}
    ones = {name: np.ones(size, dtype=np.float32) for name, size in norms.items()}
    return {f"{name}.weight": array for name, array in (drawn | ones).items()}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))

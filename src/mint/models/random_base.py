"""Base models with random weights, of the shapes of real ones: for measuring speed without downloading a model.

Writes a Hugging Face folder of the Qwen3 architecture, with a tokenizer whose words `w0`, `w1`, … are one token each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mint.models.tensor_files import write_file

DType = Literal["float32", "bfloat16"]

ROWS_AT_ONCE = 8192
"""Rows of a matrix drawn and written at a time, so that a large vocabulary is never in memory as a whole."""

WEIGHT_DEVIATION = 0.02

MANY_PARAMETERS = 1 << 30
"""From this size on, bfloat16 weights are random bits, at 2 GB/s: drawing normal numbers would take minutes."""


@dataclass(frozen=True)
class ModelShape:
    """A Qwen3 architecture with tied embeddings; the defaults make 0.85 M parameters. `stored` is its file's dtype."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    mlp: int = 384
    vocabulary: int = 512
    context: int = 512
    stored: DType = "float32"

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The seven linear layers of one block: name -> (outputs, inputs)."""
        query = self.heads * self.head_size
        key = self.kv_heads * self.head_size
        return {
            "self_attn.q_proj": (query, self.hidden),
            "self_attn.k_proj": (key, self.hidden),
            "self_attn.v_proj": (key, self.hidden),
            "self_attn.o_proj": (self.hidden, query),
            "mlp.gate_proj": (self.mlp, self.hidden),
            "mlp.up_proj": (self.mlp, self.hidden),
            "mlp.down_proj": (self.hidden, self.mlp),
        }

    @property
    def block_parameters(self) -> int:
        """The number of weights in the linear layers of all blocks."""
        return self.layers * sum(outputs * inputs for outputs, inputs in self.linears.values())

    @property
    def unembedding_parameters(self) -> int:
        """The number of weights in the unembedding, which is also the embedding."""
        return self.vocabulary * self.hidden

    @property
    def lora_parameters_per_rank(self) -> int:
        """Trained parameters per unit of rank with a lora on all seven linear layers, and none on the unembedding."""
        return self.layers * sum(outputs + inputs for outputs, inputs in self.linears.values())


SHAPES = {
    "tiny": ModelShape(),
    "qwen3-0.6b": ModelShape(
        hidden=1024,
        layers=28,
        heads=16,
        kv_heads=8,
        head_size=128,
        mlp=3072,
        vocabulary=151_936,
        context=4096,
        stored="bfloat16",
    ),
    "qwen3-4b": ModelShape(
        hidden=2560,
        layers=36,
        heads=32,
        kv_heads=8,
        head_size=128,
        mlp=9728,
        vocabulary=151_936,
        context=4096,
        stored="bfloat16",
    ),
    "qwen3-8b": ModelShape(
        hidden=4096,
        layers=36,
        heads=32,
        kv_heads=8,
        head_size=128,
        mlp=12288,
        vocabulary=151_936,
        context=4096,
        stored="bfloat16",
    ),
}
"""Shapes by name. The embedding of Qwen3-8B is another matrix than its unembedding, but here the two are tied."""


def write_random_base(folder: Path, shape: ModelShape, *, seed: int) -> None:
    """Writes the folder; the same seed gives the same bytes.

    The end token's id is the size of the vocabulary. So no sequence can end early, but samplers still check for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "w0",
        "model_max_length": shape.context,
    }
    _write_json(folder / "config.json", _config(shape))
    _write_json(folder / "tokenizer.json", _tokenizer(shape.vocabulary))
    _write_json(folder / "tokenizer_config.json", tokenizer)
    rng = np.random.default_rng(seed)
    write_file(folder / "model.safetensors", _tensor_file(_sizes(shape), shape.stored, rng))


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
        "torch_dtype": shape.stored,
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


def _sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name -> size of every tensor; those with one axis are norms."""
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    for layer in (f"model.layers.{index}" for index in range(shape.layers)):
        sizes |= {f"{layer}.{name}.weight": size for name, size in shape.linears.items()}
        sizes |= {f"{layer}.{name}.weight": (shape.hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        sizes |= {f"{layer}.self_attn.{name}.weight": (shape.head_size,) for name in ("q_norm", "k_norm")}
    return sizes | {"model.norm.weight": (shape.hidden,)}


def _tensor_file(
    sizes: dict[str, tuple[int, ...]], dtype: DType, rng: np.random.Generator
) -> Iterator[bytes | memoryview]:
    """A safetensors file in parts, drawn while it is written: a header of names and offsets, then the values."""
    width = {"float32": 4, "bfloat16": 2}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in sizes.items():
        start, end = end, end + int(np.prod(size)) * width
        header[name] = {"dtype": {4: "F32", 2: "BF16"}[width], "shape": list(size), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    many = dtype == "bfloat16" and end >= width * MANY_PARAMETERS
    for size in sizes.values():
        if many and len(size) == 2:
            yield from _random_bits(size, rng)
            continue
        for values in _draw(size, rng):
            yield (values if dtype == "float32" else _bfloat16(values)).tobytes()


def _draw(size: tuple[int, ...], rng: np.random.Generator) -> Iterator[np.ndarray]:
    """The values of one tensor in float32, some rows at a time."""
    if len(size) == 1:
        yield np.ones(size, dtype=np.float32)
        return
    for first in range(0, size[0], ROWS_AT_ONCE):
        rows = min(ROWS_AT_ONCE, size[0] - first)
        yield rng.standard_normal((rows, size[1]), dtype=np.float32) * np.float32(WEIGHT_DEVIATION)


def _random_bits(size: tuple[int, ...], rng: np.random.Generator) -> Iterator[memoryview]:
    """A matrix of bfloat16 numbers of random sign and fraction from 2^-7 to 2^-5, whose deviation is 0.019 too."""
    for first in range(0, size[0], ROWS_AT_ONCE):
        count = min(ROWS_AT_ONCE, size[0] - first) * size[1]
        fours = rng.integers(0, 2**64 - 1, -(-count // 4), dtype=np.uint64, endpoint=True)
        fours &= np.uint64(0x80FF_80FF_80FF_80FF)  # sign, lowest bit of the exponent, fraction
        fours |= np.uint64(0x3C00_3C00_3C00_3C00)
        yield fours.data.cast("B")[: 2 * count]


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper halves of float32 values, rounded to the nearest, ties to even: bfloat16, which numpy has not."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))

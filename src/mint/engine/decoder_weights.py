"""Base weights of a decoder, read from a Hugging Face state dict into the matrices that the forward multiplies with.

Layers that share their inputs (query, key and value; gate and up) become one matrix. Every tensor is accounted for: a
missing, misshapen or unknown one is refused. Knows the families' tensor names; knows nothing of forwards or loras.

Letters: E hidden size · H all heads (query, key, value) · D head dimension · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mint.engine.decoder_config import DecoderConfig
from mint.engine.products import FrozenMatrix
from mint.errors import InvalidRequestError
from mint.models.tensor_files import StoredTensor

_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


@dataclass(frozen=True)
class LayerWeights:
    """One layer; the matrices in the base's dtype, the norms in float32."""

    input_norm: Tensor  # [E]
    qkv: FrozenMatrix  # [H·D, E]
    head_norms: Tensor  # [query + key heads, D]
    o: FrozenMatrix  # [E, query heads · D]
    post_norm: Tensor  # [E]
    gate_up: FrozenMatrix  # [2·intermediate, E]
    down: FrozenMatrix  # [E, intermediate]


@dataclass(frozen=True)
class BaseWeights:
    """All of a base model. `unembedding` is the embedding itself where the two are tied."""

    layers: list[LayerWeights]
    embedding: Tensor  # [V, E]
    final_norm: Tensor  # [E]
    unembedding: FrozenMatrix  # [V, E]


def read_base_weights(
    config: DecoderConfig, tensors: Mapping[str, StoredTensor], *, dtype: torch.dtype, device: torch.device
) -> BaseWeights:
    """Takes every tensor of a Hugging Face state dict.

    Raises:
        InvalidRequestError: a tensor is missing, has another shape than `config` says, or is not part of the family.
    """
    reader = _Reader(tensors, device)
    layers = [_read_layer(reader, config, layer, dtype) for layer in range(config.num_hidden_layers)]
    # Embedding, norms and unembedding stay in float32: logits are never rounded to bfloat16.
    embedding = reader.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    final_norm = reader.take("model.norm.weight", (config.hidden_size,))
    if config.tie_word_embeddings:
        reader.ignore("lm_head.weight")
        unembedding = embedding
    else:
        unembedding = reader.take("lm_head.weight", (config.vocab_size, config.hidden_size))
    reader.finish()
    return BaseWeights(layers, embedding, final_norm, FrozenMatrix(unembedding))


def _read_layer(reader: _Reader, config: DecoderConfig, index: int, dtype: torch.dtype) -> LayerWeights:
    prefix, hidden, inner = f"model.layers.{index}", config.hidden_size, config.intermediate_size
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    query, kv, head = config.query_size, config.key_value_size, config.head_dim

    def matrices(module: str, sizes: Mapping[str, int]) -> FrozenMatrix:
        parts = [reader.take(f"{module}.{name}_proj.weight", (size, hidden)) for name, size in sizes.items()]
        return FrozenMatrix(torch.cat([part.to(dtype) for part in parts]))

    query_norm = reader.take(f"{attention}.q_norm.weight", (head,))
    key_norm = reader.take(f"{attention}.k_norm.weight", (head,))
    norms = [query_norm] * config.num_attention_heads + [key_norm] * config.num_key_value_heads
    return LayerWeights(
        input_norm=reader.take(f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=matrices(attention, {"q": query, "k": kv, "v": kv}),
        head_norms=torch.stack(norms),
        o=FrozenMatrix(reader.take(f"{attention}.o_proj.weight", (hidden, query)).to(dtype)),
        post_norm=reader.take(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=matrices(mlp, {"gate": inner, "up": inner}),
        down=FrozenMatrix(reader.take(f"{mlp}.down_proj.weight", (hidden, inner)).to(dtype)),
    )


class _Reader:
    """Hands out the tensors of a state dict one by one in float32, and notices what is missing or left over."""

    def __init__(self, tensors: Mapping[str, StoredTensor], device: torch.device) -> None:
        self._left = dict(tensors)
        self._device = device

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        stored = self._left.pop(name, None)
        if stored is None:
            raise _unfit(name, "is missing")
        if stored.shape != shape or stored.dtype not in _FLOATS:
            raise _unfit(name, f"is {stored.dtype} {stored.shape}; config.json says a float of {shape}")
        tensor: Tensor = stored.read()
        return tensor.to(device=self._device, dtype=torch.float32)

    def ignore(self, name: str) -> None:
        self._left.pop(name, None)

    def finish(self) -> None:
        if self._left:
            raise _unfit(min(self._left), "is not part of a Qwen3 dense model")


def _unfit(name: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"tensor {name} {what}", field="base_model", remedy="Give an unmodified Qwen3 dense folder of Hugging Face"
    )

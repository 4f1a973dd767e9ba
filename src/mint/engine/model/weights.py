"""Base weights of a decoder, read from a Hugging Face state dict into the matrices that the forward multiplies with.

Layers that share their inputs (query, key and value; gate and up) become one matrix. Every tensor is accounted for: a
missing, misshapen or unknown one is refused. Knows the families' tensor names; knows nothing of forwards or loras.

Letters: E hidden size · H all heads (query, key, value) · D head dimension · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mint.engine.cpu.linear import NativeProducts
from mint.engine.cpu.malloc import hand_back_freed_memory
from mint.engine.model.config import DecoderConfig
from mint.engine.model.linear import FrozenMatrix, Unembedding
from mint.errors import InvalidRequestError
from mint.models.tensor_files import StoredTensor

_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


@dataclass(frozen=True)
class Experts:
    """A mixture of MLPs, and the matrix that chooses among them, in float32."""

    router: FrozenMatrix  # [experts, E]
    gate_up: list[FrozenMatrix]  # for each expert [2·intermediate, E]
    down: list[FrozenMatrix]  # for each expert [E, intermediate]


@dataclass(frozen=True)
class LayerWeights:
    """One layer; the matrices in the base's dtype, the bias and the norms in float32."""

    input_norm: Tensor  # [E]
    qkv: FrozenMatrix  # [H·D, E]
    o: FrozenMatrix  # [E, query heads · D]
    post_norm: Tensor  # [E]
    gate_up: FrozenMatrix | None = None  # [2·intermediate, E]; as `down`, where there are no experts
    down: FrozenMatrix | None = None  # [E, intermediate]
    experts: Experts | None = None
    qkv_bias: Tensor | None = None  # [H·D]
    head_norms: Tensor | None = None  # [query + key heads, D]


@dataclass(frozen=True)
class BaseWeights:
    """All of a base model. `unembedding` is the embedding itself where the two are tied."""

    layers: list[LayerWeights]
    embedding: Tensor  # [V, E], in the base's dtype
    final_norm: Tensor  # [E]
    unembedding: Unembedding  # [V, E]


def read_base_weights(
    config: DecoderConfig,
    tensors: Mapping[str, StoredTensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: NativeProducts | None = None,
) -> BaseWeights:
    """Takes every tensor of a Hugging Face state dict. `kernels` compute logits where they can.

    Raises:
        InvalidRequestError: a tensor is missing, has another shape than `config` says, or is not part of the family.
    """
    reader = _Reader(tensors, device, config.family.name)
    layers = [_read_layer(reader, config, layer, dtype, kernels) for layer in range(config.num_hidden_layers)]
    embedding = reader.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size), dtype)
    final_norm = reader.take("model.norm.weight", (config.hidden_size,))
    if config.tie_word_embeddings:
        reader.ignore("lm_head.weight")
        unembedding = embedding
    else:
        unembedding = reader.take("lm_head.weight", (config.vocab_size, config.hidden_size), dtype)
    reader.finish()
    return BaseWeights(layers, embedding, final_norm, Unembedding(unembedding, kernels))


def _read_layer(
    reader: _Reader, config: DecoderConfig, index: int, dtype: torch.dtype, kernels: NativeProducts | None
) -> LayerWeights:
    prefix, hidden, query, kv = f"model.layers.{index}", config.hidden_size, config.query_size, config.key_value_size
    attention, mlp, family = f"{prefix}.self_attn", f"{prefix}.mlp", config.family
    sizes, bias, norms = {"q": query, "k": kv, "v": kv}, None, None
    if family.qkv_bias:
        bias = torch.cat([reader.take(f"{attention}.{part}_proj.bias", (size,)) for part, size in sizes.items()])
    if family.head_norms:
        query_norm = reader.take(f"{attention}.q_norm.weight", (config.head_dim,))
        key_norm = reader.take(f"{attention}.k_norm.weight", (config.head_dim,))
        norms = torch.stack([query_norm] * config.num_attention_heads + [key_norm] * config.num_key_value_heads)
    layer = LayerWeights(
        input_norm=reader.take(f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=_read_fused(reader, attention, sizes, hidden, dtype, kernels),
        o=FrozenMatrix(reader.take(f"{attention}.o_proj.weight", (hidden, query), dtype), kernels),
        post_norm=reader.take(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        qkv_bias=bias,
        head_norms=norms,
    )
    reader.ignore(f"{attention}.rotary_emb.inv_freq")  # what old checkpoints of Llama hold besides
    mixture = config.experts_of(index)
    if mixture is None:
        gate_up, down = _read_mlp(reader, mlp, hidden, config.intermediate_size, dtype, kernels)
        return replace(layer, gate_up=gate_up, down=down)
    # The router is in float32: with its inputs rounded to bfloat16, another of two near experts would be chosen.
    router = FrozenMatrix(reader.take(f"{mlp}.gate.weight", (mixture.count, hidden)), kernels)
    own = [
        _read_mlp(reader, f"{mlp}.experts.{expert}", hidden, mixture.intermediate_size, dtype, kernels)
        for expert in range(mixture.count)
    ]
    hand_back_freed_memory()  # the gaps that so many pieces leave would come to a third of the model
    return replace(layer, experts=Experts(router, [gate_up for gate_up, _ in own], [down for _, down in own]))


def _read_mlp(
    reader: _Reader, prefix: str, hidden: int, inner: int, dtype: torch.dtype, kernels: NativeProducts | None
) -> tuple[FrozenMatrix, FrozenMatrix]:
    down = FrozenMatrix(reader.take(f"{prefix}.down_proj.weight", (hidden, inner), dtype), kernels)
    return _read_fused(reader, prefix, {"gate": inner, "up": inner}, hidden, dtype, kernels), down


def _read_fused(
    reader: _Reader,
    prefix: str,
    sizes: Mapping[str, int],
    inputs: int,
    dtype: torch.dtype,
    kernels: NativeProducts | None,
) -> FrozenMatrix:
    parts = [reader.take(f"{prefix}.{name}_proj.weight", (size, inputs), dtype) for name, size in sizes.items()]
    return FrozenMatrix(torch.cat(parts), kernels)


class _Reader:
    """Hands out the tensors of a state dict one by one, and notices what is missing or left over."""

    def __init__(self, tensors: Mapping[str, StoredTensor], device: torch.device, family: str) -> None:
        self._left = dict(tensors)
        self._device = device
        self._family = family

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        stored = self._left.pop(name, None)
        if stored is None:
            raise self._unfit(name, "is missing")
        if stored.shape != shape or stored.dtype not in _FLOATS:
            raise self._unfit(name, f"is {stored.dtype} {stored.shape}; config.json says a float of {shape}")
        tensor: Tensor = stored.read()
        # A copy: as long as a part of the file is used, all of it would stay in memory, and could still change.
        return tensor.to(device=self._device, dtype=dtype, copy=True)

    def ignore(self, name: str) -> None:
        self._left.pop(name, None)

    def finish(self) -> None:
        if self._left:
            raise self._unfit(min(self._left), f"is not part of a {self._family} model")

    def _unfit(self, name: str, what: str) -> InvalidRequestError:
        remedy = f"Give an unmodified {self._family} folder of Hugging Face"
        return InvalidRequestError(f"tensor {name} {what}", field="base_model", remedy=remedy)

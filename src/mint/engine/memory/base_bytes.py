"""The memory of a base model's weights, from the names and shapes in its files alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from mint.engine.model.config import DecoderConfig
from mint.engine.model.operations import Operations
from mint.engine.quantized.number_formats import Quantization, quantized_bytes
from mint.models.quantized_tensors import Mxfp4Tensor
from mint.models.tensor_files import StoredTensor

_UNEMBEDDING, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_STACKED = (".experts.gate_up_proj", ".experts.down_proj")


def base_bytes(
    config: DecoderConfig,
    tensors: Mapping[str, StoredTensor],
    operations: Operations,
    quantization: Quantization | None = None,
) -> int:
    """The bytes that mint's own decoder takes for `tensors` once they are loaded, with the copy of the unembedding that
    `operations` make."""
    total, experts = 0, config.family.experts
    for name, tensor in tensors.items():
        if name == _UNEMBEDDING and config.tie_word_embeddings:
            continue
        inputs_first = bool(experts and experts.inputs_first) and name.endswith(_STACKED)
        total += _tensor_bytes(name, tensor, operations.dtype, quantization, inputs_first=inputs_first)
    vocabulary, hidden = config.vocab_size, config.hidden_size
    if quantization == "int8":  # the codes of the unembedding stand for its tensor
        is_tied = config.tie_word_embeddings
        quantized = quantized_bytes(vocabulary, hidden, "int8") or 0
        return total + (quantized if is_tied else quantized - vocabulary * hidden * operations.dtype.itemsize)
    return total + operations.unembedding_copy_bytes(vocabulary, hidden)


def _tensor_bytes(
    name: str, tensor: StoredTensor, dtype: torch.dtype, quantization: Quantization | None, *, inputs_first: bool
) -> int:
    shape = tensor.shape
    entries = math.prod(shape)
    is_router = name.endswith((".router.weight", ".mlp.gate.weight"))
    if len(shape) < 2 or is_router or name.endswith((".conv1d.weight", ".sinks", "_bias")):
        return 4 * entries  # in float32, whatever the dtype of the matrices is
    if quantization == "mxfp4" and isinstance(tensor, Mxfp4Tensor):
        return tensor.kept_bytes
    quantized = None
    if quantization is not None and name not in (_UNEMBEDDING, _EMBEDDING):
        inputs = shape[-2 if inputs_first else -1]
        quantized = quantized_bytes(entries // inputs, inputs, quantization)
    return entries * dtype.itemsize if quantized is None else quantized

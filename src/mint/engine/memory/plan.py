"""Predicts what a base model, its loras and its sequences take of a device's memory. Reads the headers of files alone.

Counts tensors that are alive at the same time. On a CPU malloc keeps up to 256 MiB of freed memory beside them
(`memory/machine_memory.py`), and a process takes some 400 MiB for Python and torch before it loads anything.

Letters: T rows of a pass · C tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mint.engine.lora import UNEMBED, parameter_count
from mint.engine.memory.base_bytes import base_bytes
from mint.engine.memory.micro_batches import (
    MIN_ROWS,
    activation_budget,
    bytes_per_row,
    fit_rows,
    input_bytes,
    layer_row_bytes,
)
from mint.engine.memory.sampling_limits import SamplingLimits, fit_limits, prompt_token_bytes
from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.model.config import DecoderConfig
from mint.engine.model.operations import Operations
from mint.engine.model.weights import list_sites
from mint.engine.protocol import LoraSpec
from mint.engine.quantized.number_formats import Quantization
from mint.engine.sampling.kv_cache import fitting_bytes, page_bytes
from mint.engine.target_logprobs import row_slices
from mint.models.tensor_files import StoredTensor

HIDDEN_ROWS = 7
"""Rows of float32 hidden states beside what is kept, in the backward of an MLP: the last layer's, normed and not, their
gradient twice (of one logprob, and of the loss), and three of the layer."""

LOGIT_COPIES, GPU_LOGIT_COPIES = 1.5, 3
"""A chunk of logits in float32, and their gradient, which a CPU's kernels write over them; torch's operations keep the
exponentials, too."""

PUBLISHED_COPIES, MODEL_VECTORS, PASS_VECTORS = 1, 4, 3
"""Float32 vectors of a lora's size: copies to sample from; weights, gradient and two moments; and in a pass the
gradient before it, the sum of its micro-batches, and the gradient of one of them."""

EVERY_LAYER = LoraSpec(1, 0, train_attn=True, train_mlp=True, train_unembed=False)
"""Its sites are all matrices of the layers."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes, unless a name says otherwise.

    `free` is what the device has before anything is loaded. `base` is the base model with what it keeps once it is
    trained on; `model` is one lora in training, and a copy to sample from.
    A sequence takes `kv_token` for each token, and `state` for its delta nets.
    `kept`, `recomputed` and `offloaded` are what a pass over one sequence of `context` tokens takes of the device as it
    is, with activation recomputation, and where the inputs of the layers are offloaded, too, which then take `host` of
    the host's memory or of a file; all beside the base and the model. `prompt` is what computing a prompt of that
    length takes beside its keys and values.
    """

    context: int
    group: int
    free: int | None
    base: int
    model: int
    kv_token: int
    state: int
    kv_cache: int
    kept: int
    recomputed: int
    offloaded: int
    host: int
    prompt: int
    micro_batch_rows: int
    limits: SamplingLimits
    is_gpu: bool

    @property
    def sequences(self) -> int:
        """Sequences of the whole context that the KV cache holds at once; states take one half of it."""
        share = self.kv_cache // 2 if self.state else self.kv_cache
        fitting = share // (self.kv_token * _in_pages(self.context))
        return min(fitting, share // self.state) if self.state else fitting

    @property
    def fits_group(self) -> bool:
        """Whether the group is sampled at once. Otherwise its sequences take turns."""
        return min(self.sequences, self.limits.rows) >= self.group

    def fits(self, activations: int) -> bool | None:
        """Whether a pass that takes so much fits beside base, model and KV cache; None if what is free is unknown."""
        if self.free is None:
            return None
        return self.base + self.model + self.kv_cache + activations <= self.free


def plan_memory(
    config: DecoderConfig,
    tensors: Mapping[str, StoredTensor],
    operations: Operations,
    lora: LoraSpec,
    *,
    context: int,
    group: int,
    memory_bytes: int | None,
    free_bytes: int | None,
    quantization: Quantization | None = None,
    kv_cache_bytes: int | None = None,
    micro_batch_rows: int | None = None,
) -> MemoryPlan:
    """The plan for a device with `memory_bytes`, of which `free_bytes` are free before anything is loaded.
    `kv_cache_bytes` and `micro_batch_rows` as in `TorchEngine`."""
    loaded = base_bytes(config, tensors, operations, quantization)
    base = loaded + (0 if quantization is not None else _turned_bytes(config, operations))
    vector = 4 * parameter_count(list_sites(config, lora), lora.rank)
    free = None if free_bytes is None else max(0, free_bytes - loaded)
    limits = fit_limits(config.vocab_size, prompt_token_bytes(config, operations.dtype), operations, free_bytes=free)
    net = config.delta_net
    kv_cache = kv_cache_bytes
    if kv_cache is None:
        sequences = limits.rows if net is None else 2 * limits.rows  # states take one half
        kv_cache = fitting_bytes(config, operations.dtype, sequences=sequences, free_bytes=free)
    row_bytes = bytes_per_row(config, operations.dtype)
    budget = activation_budget(operations, memory_bytes=memory_bytes, base_bytes=loaded)
    down = _down_bytes(config, operations, lora, quantization)
    rows = micro_batch_rows or fit_rows(row_bytes, budget, least=MIN_ROWS, most=operations.max_rows)
    return MemoryPlan(
        context=context,
        group=group,
        free=free_bytes,
        base=base,
        model=(MODEL_VECTORS + PUBLISHED_COPIES) * vector + _merged_bytes(config, operations, lora, quantization),
        kv_token=page_bytes(config, operations.dtype) // PAGE_POSITIONS,
        state=0 if net is None else len(net.layers) * net.state_entries * 4,
        kv_cache=kv_cache,
        kept=PASS_VECTORS * vector + context * sum(down) + pass_bytes(config, operations, context, recompute=False),
        recomputed=PASS_VECTORS * vector
        + context * max(down)
        + pass_bytes(config, operations, context, recompute=True),
        offloaded=PASS_VECTORS * vector + pass_bytes(config, operations, context, recompute=True, offload=True),
        host=context * input_bytes(config),
        prompt=prompt_bytes(config, operations.dtype, context, limits.prefill_tokens),
        micro_batch_rows=rows,
        limits=limits,
        is_gpu=operations.device.type == "cuda",
    )


def pass_bytes(
    config: DecoderConfig, operations: Operations, rows: int, *, recompute: bool, offload: bool = False
) -> int:
    """The most of the device that a forward and backward of so many rows T of one sequence take at once, without loras.
    With `offload`, the inputs of layers that are there are that of one, and on a GPU that of the next one."""
    dtype, hidden = operations.dtype, 4 * config.hidden_size
    layers = [layer_row_bytes(config, layer, dtype) for layer in range(config.num_hidden_layers)]
    inputs = input_bytes(config)
    if offload:
        inputs = hidden * (1 if operations.device.type == "cpu" else 2)
    kept = inputs + max(layers) if recompute else sum(layers)
    at_logits = (0 if offload else inputs) if recompute else kept
    chunk = row_slices(rows, config.vocab_size, operations.logits_at_once)[0].stop * config.vocab_size
    copies = LOGIT_COPIES if operations.device.type == "cpu" else GPU_LOGIT_COPIES
    return max(
        rows * (at_logits + 3 * hidden) + int(4 * copies * chunk),
        rows * (kept + HIDDEN_ROWS * hidden) + _mlp_backward(config, operations, rows),
        rows * (kept + _attention_backward(config, operations)),
    )


def prompt_bytes(config: DecoderConfig, dtype: torch.dtype, tokens: int, at_once: int) -> int:
    """What computing a prompt of `tokens` C takes, `at_once` of them in a step, beside the cache: the keys, values and
    heads of one layer, or an MLP."""
    at_once = min(at_once, tokens)
    heads = config.query_size + 2 * config.key_value_size
    attention = tokens * dtype.itemsize * (heads + 2 * config.key_value_size) + at_once * 4 * heads
    return max(attention, at_once * prompt_token_bytes(config, dtype))


def _mlp_backward(config: DecoderConfig, operations: Operations, rows: int) -> int:
    """The rows of one part of an MLP: the inner values, the active gate, and the gradient for the wide product, all in
    float32; the wide product again, where it is kept in another dtype; and a turned matrix."""
    inner = config.intermediate_size
    part = -(-rows // operations.mlp_parts(rows, 2 * inner))
    numbers = 4 * inner + (0 if operations.dtype == torch.float32 else 2 * inner)
    return part * 4 * numbers + 2 * inner * config.hidden_size * operations.dtype.itemsize


def _attention_backward(config: DecoderConfig, operations: Operations) -> int:
    """Bytes of a row in the backward of attention beside what is kept: the gradient for the heads and for what was
    attended, and five hidden states. The kernels in C write the first in the dtype of the heads, and each thread has
    sums for the keys and values of one head. What the MLP of the layer had kept is free by then."""
    heads, itemsize = config.query_size + 2 * config.key_value_size, operations.dtype.itemsize
    gradient = 4 * heads
    if operations.instructions is not None:
        at_once = min(torch.get_num_threads(), config.num_key_value_heads)
        gradient = itemsize * heads + 4 * 2 * config.head_dim * at_once
    freed = 2 * itemsize * config.intermediate_size + 4 * config.hidden_size
    return max(0, gradient + 4 * config.query_size + 5 * 4 * config.hidden_size - freed)


def _merged_bytes(
    config: DecoderConfig, operations: Operations, lora: LoraSpec, quantization: Quantization | None
) -> int:
    """Copies of the matrices of a small base, into which the lora is merged: two for training, as they are and turned,
    and one to sample from."""
    if quantization is not None or not _merges(config, operations):
        return 0
    trained = [site for site in list_sites(config, lora) if site.name != UNEMBED and ".experts." not in site.name]
    return (2 + PUBLISHED_COPIES) * sum(4 * site.inputs * sum(site.outputs) for site in trained)


def _down_bytes(
    config: DecoderConfig, operations: Operations, lora: LoraSpec, quantization: Quantization | None
) -> list[int]:
    """For each layer what it keeps of one row beside `layer_row_bytes`: what the first matrices of loras beside their
    products give, where the kernels in C compute a whole part of a layer."""
    found = [0] * config.num_hidden_layers
    if quantization is not None or operations.instructions is None or _merges(config, operations):
        return found
    for site in list_sites(config, lora):
        layer, _, part = site.name.partition(".")
        if part in ("qkv", "gate_up", "down"):
            found[int(layer)] += 4 * lora.rank * len(site.outputs)
    return found


def _merges(config: DecoderConfig, operations: Operations) -> bool:
    """Whether loras are merged into copies of the matrices (see `Operations.merged_bytes`)."""
    size = sum(4 * site.inputs * sum(site.outputs) for site in list_sites(config, EVERY_LAYER))
    return operations.dtype == torch.float32 and size <= operations.merged_bytes


def _turned_bytes(config: DecoderConfig, operations: Operations) -> int:
    """Turned copies of the base's own small matrices, which the first backward makes. Where loras are merged, those of
    the merged matrices are kept instead."""
    if _merges(config, operations):
        return 0
    sites = [site for site in list_sites(config, EVERY_LAYER) if ".experts." not in site.name]
    return sum(operations.turned_copy_bytes(sum(site.outputs), site.inputs) for site in sites)


def _in_pages(tokens: int) -> int:
    return -(-tokens // PAGE_POSITIONS) * PAGE_POSITIONS

"""A decoder over packed rows: one forward for training, prefill and decoding alike.

Rows are tokens. A layer mixes them by attention or by a delta net. The caller passes in the `attention`, which decides
what each row attends to, and the `delta_rule`, which knows the state before each row. Base weights are frozen, in
float32 or bfloat16; hidden states are float32 throughout. The device's `operations` compute. Knows nothing of
sequences, losses or caches.

The bits of a row do not depend on the other rows: every product runs over at least the rows that its matrix needs for
that, and nothing here reduces over rows.

Letters: T rows · E hidden size · H all heads (query, key, value) · D head dimension · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mint.engine.lora import UNEMBED, LoraRows, LoraWeights, Site
from mint.engine.model.autograd import recomputed
from mint.engine.model.config import DecoderConfig, DeltaNetConfig, Rope
from mint.engine.model.delta_net import StatesOfLayers
from mint.engine.model.functions import first_rows, pad_rows, rope_tables
from mint.engine.model.layer_parts import (
    AddBias,
    AttentionInputs,
    ColumnOrder,
    ForwardContext,
    GatedHeads,
    GatedOrder,
    Mlp,
    Norm,
    NormedProduct,
    OutputGate,
    Reordered,
)
from mint.engine.model.linear import Linear, LoraLinears, Matrix
from mint.engine.model.lora_linear import LoraProduct, cover, rows_needed
from mint.engine.model.mixture_of_experts import SharedExpert
from mint.engine.model.operations import Attention, DeltaRule, FeedForward, Operations
from mint.engine.model.weight_loader import load_weights
from mint.engine.model.weights import (
    AttentionWeights,
    BaseWeights,
    DeltaNetWeights,
    DivisibleExperts,
    ExpertExchange,
    LayerRun,
    LayerSource,
    MixtureWeights,
    list_sites,
    shared_site,
)
from mint.engine.packing import AttentionBlock, MicroBatch, StateSpans, pack, state_spans
from mint.engine.protocol import LoraSpec, TrainDatum
from mint.engine.quantized.number_formats import Quantization
from mint.engine.transfers import upload
from mint.errors import InvalidRequestError
from mint.models.tensor_files import StoredTensor


@dataclass(frozen=True)
class ForwardBatch:
    """The arguments of one forward that every layer reads. The first `count` rows are tokens, the rest is padding.

    `least` rows are what products need. A layer that is computed twice must not ask `rows_needed` itself: autograd runs
    it first without and then with gradients, for which that differs.
    """

    count: int
    least: int
    attention: Attention
    delta_rule: DeltaRule | None
    loras: Sequence[LoraRows]
    contexts: dict[Rope | None, ForwardContext]


class Decoder:
    """A base model's weights and their forward."""

    runs_kernels_alone = True
    """Whether the device's operations compute all of a forward, so that it can be recorded."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Mapping[str, StoredTensor],
        operations: Operations,
        quantization: Quantization | None = None,
        offloaded: Callable[[torch.device], AbstractContextManager[None]] | None = None,
        layer_source: LayerSource | None = None,
    ) -> None:
        """Takes every tensor of a Hugging Face state dict; `quantization` as in `load_weights`. A forward that keeps
        the inputs of layers alone runs within `offloaded`, if given, which says where they are kept. The matrices
        of layers come from `layer_source`, if given.

        Raises:
            InvalidRequestError: a tensor is missing, has another shape than `config` says, or is not of its family.
        """
        self.config = config
        self.vocab_size = config.vocab_size
        self._offloaded = offloaded
        self.layer_source = layer_source
        self.operations = operations
        self.dtype = operations.dtype
        self.device = operations.device
        self.weights = self._load(tensors, quantization)
        self.rope_tables = {rope: rope_tables(config, rope, operations.device) for rope in set(config.ropes)}
        self._gated_order = _gated_order(self._layer_config, operations.device)
        self._delta_net_order = _delta_net_order(self._layer_config.delta_net, operations.device)
        self._matrices = self._layer_matrices()
        self.loras = self._open_loras()
        self.mixtures: dict[int, FeedForward] = {
            index: operations.mixture(layer.mlp, layer.mlp_norm, index, config, self.loras)
            for index, layer in enumerate(self.weights.layers)
            if isinstance(layer.mlp, MixtureWeights) and layer.mlp_norm is not None
        }
        for index, mixture in self.mixtures.items():
            exchange = None if layer_source is None else layer_source.experts_of(index)
            if exchange is not None:
                _divide(config, mixture, exchange)

    def _load(self, tensors: Mapping[str, StoredTensor], quantization: Quantization | None) -> BaseWeights:
        return load_weights(self.config, tensors, self.operations, quantization, self.layer_source)

    def _layer_matrices(self) -> list[Matrix]:
        """Those that every row goes through."""
        return list(self.weights.matrices.values())

    def _open_loras(self) -> LoraLinears:
        return self.operations.loras(self.weights.matrices)

    @property
    def _layer_config(self) -> DecoderConfig:
        """The heads that one product makes."""
        return self.config

    @property
    def delta_net(self) -> DeltaNetConfig | None:
        """The delta nets as `delta_rule` counts them, with the numbers by which it asks for their states."""
        return self.config.delta_net

    def sites(self, lora: LoraSpec) -> list[Site]:
        """The products that `lora` trains, in the order of storage."""
        return list_sites(self.config, lora)

    def pack(self, data: Sequence[TrainDatum], rows: int) -> list[MicroBatch]:
        """Micro-batches of about `rows` rows, in which examples share the rows of common prefixes."""
        return pack(data, rows)

    def forward_packed(
        self, batch: MicroBatch, lora: LoraWeights, *, recompute: bool, rows: np.ndarray | None = None
    ) -> Tensor:
        """Final hidden states (normed) [T, E] of the rows of `batch`, all with `lora`; `recompute` and `rows` as in
        `forward`."""
        tokens, positions = upload(self.device, batch.tokens, batch.positions)
        loras = [LoraRows(0, len(tokens), lora)]
        kept = None if rows is None else upload(self.device, rows)[0]
        attention = self.training_attention(batch.blocks)
        rule = None if self.config.delta_net is None else self.delta_rule(state_spans(batch.spans))
        return self.forward(tokens, positions, attention, loras, delta_rule=rule, recompute=recompute, rows=kept)

    def training_attention(self, blocks: Sequence[AttentionBlock]) -> Attention:
        """Causal attention of the packed rows of a pass, which may have a backward."""
        return self.packed_attention(blocks)

    def packed_attention(self, blocks: Sequence[AttentionBlock]) -> Attention:
        """Causal attention of packed rows."""
        config = self.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        return self.operations.packed_attention(blocks, heads, kv_heads, config.windows)

    def delta_rule(self, spans: StateSpans, states: StatesOfLayers | None = None) -> DeltaRule:
        """The delta nets over the rows of `spans`, whose slots are those of `states`; None: of one forward alone."""
        return self.operations.delta_rule(spans, self._layer_config, states)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        loras: Sequence[LoraRows],
        *,
        delta_rule: DeltaRule | None = None,
        recompute: bool = False,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states (normed) [T, E] of `tokens` [T] at `positions` [T]; `loras` cover all rows. If given, of
        `rows` [R] alone, with one lora: the last layer computes no more of the others than what those need. A model
        with delta nets needs a `delta_rule`.

        With `recompute`, a layer keeps nothing but its input for the backward, which then runs its forward again: the
        same bits in less memory and more time.
        """
        count = len(tokens)
        least = rows_needed(self._matrices)
        tokens, positions = pad_rows(tokens, least), pad_rows(positions, least)
        contexts = {rope: self._context(rope, positions) for rope in self.rope_tables}
        batch = ForwardBatch(count, least, attention, delta_rule, cover(loras, count, len(tokens)), contexts)
        x = self.operations.take_rows(self.weights.embedding, tokens, self.config.scales.embedding)
        last = self.config.num_hidden_layers - 1
        saving: AbstractContextManager[None] = nullcontext()
        if self._offloaded is not None and recompute and torch.is_grad_enabled():
            saving = self._offloaded(self.device)
        with saving:
            for index in range(last + 1):
                layer: LayerRun = partial(self._layer, index, batch=batch, rows=rows if index == last else None)
                if self.layer_source is not None:
                    layer = self.layer_source.around(index, layer)
                x = recomputed(layer, x) if recompute else layer(x)
        hidden = Norm.run(x, self.weights.final_norm, self.config.rms_norm_eps, self.operations)
        return first_rows(hidden, count if rows is None else len(rows))

    def _context(self, rope: Rope | None, positions: Tensor) -> ForwardContext:
        cos, sin = self.rope_tables[rope]
        config = self._layer_config
        return ForwardContext(
            operations=self.operations,
            eps=config.rms_norm_eps,
            rotated_heads=config.num_attention_heads + config.num_key_value_heads,
            joint_heads=config.num_attention_heads if config.family.joint_head_norms else 0,
            head_dim=config.head_dim,
            cos=self.operations.take_rows(cos, positions).unsqueeze(1),
            sin=self.operations.take_rows(sin, positions).unsqueeze(1),
            gated=self._gated_order,
        )

    def _layer(self, index: int, x: Tensor, *, batch: ForwardBatch, rows: Tensor | None) -> Tensor:
        """x [T, E] → [T, E]: x + mixer(norm(x)), and of that x + mlp(norm(x)); some families norm what is added. With
        `rows` [R], the result is of those rows alone."""
        layer = self.weights.layers[index]
        context = batch.contexts[self.config.ropes[index]]
        if isinstance(layer.mixer, AttentionWeights):
            mixed = self._attend(index, x, layer.attention_norm, layer.mixer, context, batch)
        else:
            mixed = self._run_delta_net(index, x, layer.attention_norm, layer.mixer, context, batch)
        if rows is not None:
            batch = self._taken(batch, len(rows))
            mixed, x = mixed.index_select(0, rows), pad_rows(x.index_select(0, rows), batch.loras[-1].stop)
        mixed = pad_rows(mixed, len(x))
        o = self.loras.linear(f"{index}.o", layer.mixer.o, batch.loras)
        added = x if layer.attention_output_norm is None else None
        if added is not None and layer.o_bias is not None:
            added = AddBias.run(added, layer.o_bias, self.operations)
        x = self._add_normed(LoraProduct.run(mixed, added, o, *o.parameters), layer.attention_output_norm, x)
        if isinstance(layer.mlp, MixtureWeights):
            # without the padding, whose rows would go to experts that no token needs
            routed = pad_rows(self.mixtures[index](first_rows(x, batch.count), batch.loras), len(x))
            return self._add_shared_expert(index, x, routed, batch)
        gate_up = self.loras.linear(f"{index}.gate_up", layer.mlp.gate_up, batch.loras)
        down = self.loras.linear(f"{index}.down", layer.mlp.down, batch.loras)
        out = Mlp.run(x, layer, gate_up, down, context, *gate_up.parameters, *down.parameters)
        return self._add_normed(out, layer.mlp_output_norm, x)

    def _taken(self, batch: ForwardBatch, count: int) -> ForwardBatch:
        """The same for `count` of the rows, which have one lora."""
        loras = [LoraRows(0, count, batch.loras[0].weights)]
        return replace(batch, count=count, loras=cover(loras, count, max(count, batch.least)))

    def _attend(
        self,
        index: int,
        x: Tensor,
        norm: Tensor | None,
        weights: AttentionWeights,
        context: ForwardContext,
        batch: ForwardBatch,
    ) -> Tensor:
        """Attended values of norm(x), without those of the padding."""
        qkv = self.loras.linear(f"{index}.qkv", weights.qkv, batch.loras)
        if not self.config.family.output_gates:
            heads = AttentionInputs.run(x, norm, weights, qkv, context, *qkv.parameters)
            return batch.attention(index, first_rows(heads, batch.count), weights.sinks)
        wide = NormedProduct.run(x, norm, qkv, context, *qkv.parameters)
        heads = GatedHeads.run(wide, weights, context)
        attended = batch.attention(index, first_rows(heads, batch.count), weights.sinks)
        return OutputGate.run(attended, first_rows(wide, batch.count), context)

    def _run_delta_net(
        self,
        index: int,
        x: Tensor,
        norm: Tensor | None,
        weights: DeltaNetWeights,
        context: ForwardContext,
        batch: ForwardBatch,
    ) -> Tensor:
        """What the heads of a delta net read of norm(x), without that of the padding."""
        if batch.delta_rule is None:
            raise ValueError(f"layer {index} is a delta net, and its states were not given")
        inputs = self.loras.linear(f"{index}.in", weights.inputs, batch.loras)
        rows = first_rows(self._delta_inputs(x, norm, inputs, context), batch.count)
        return batch.delta_rule(index, weights, rows)

    def _delta_inputs(self, x: Tensor, norm: Tensor | None, inputs: Linear, context: ForwardContext) -> Tensor:
        """The products of norm(x) that a delta net reads, in its order."""
        wide = NormedProduct.run(x, norm, inputs, context, *inputs.parameters)
        order = self._delta_net_order
        return wide if order is None else Reordered.run(wide, order, self.operations)

    def _add_shared_expert(self, index: int, x: Tensor, routed: Tensor, batch: ForwardBatch) -> Tensor:
        """`routed` plus what the expert that all rows share makes of x, both [T, E]; without one, `routed`."""
        layer = self.weights.layers[index]
        shared = layer.mlp.shared if isinstance(layer.mlp, MixtureWeights) else None
        if shared is None or layer.mlp_norm is None:
            return routed
        name, mlp, eps = shared_site(index), shared.mlp, self.config.rms_norm_eps
        gate_up = self.loras.linear(f"{name}.gate_up", mlp.gate_up, batch.loras)
        down = self.loras.linear(f"{name}.down", mlp.down, batch.loras)
        return SharedExpert.run(
            x,
            routed,
            layer.mlp_norm,
            shared.gate,
            gate_up,
            down,
            eps,
            self.operations,
            *gate_up.parameters,
            *down.parameters,
        )

    def _add_normed(self, out: Tensor, norm: Tensor | None, residual: Tensor) -> Tensor:
        """residual + norm(out), all [T, E]; without a norm `out`, in which the residual is already."""
        return out if norm is None else Norm.run(out, norm, self.config.rms_norm_eps, self.operations, residual)

    def logits(self, hidden: Tensor, loras: Sequence[LoraRows]) -> Tensor:
        """Float32 logits [T, V] of hidden states [T, E]; `loras` may cover more rows than there are."""
        return self.loras.multiply(hidden, self.weights.unembedding, UNEMBED, loras)

    def logits_gradient(self, grad: Tensor, hidden: Tensor, loras: Sequence[LoraRows]) -> Tensor:
        """From the gradient for `logits` [T, V] that for hidden [T, E]; a lora's is added to its `.grad`. One lora
        covers all rows."""
        linear = self.loras.linear(UNEMBED, self.weights.unembedding, loras)
        grad_hidden, grads = linear.gradient(grad, hidden)
        for parameter, own in zip(linear.parameters, grads, strict=True):
            if parameter.grad is not None:
                parameter.grad += own
        return torch.zeros_like(hidden) if grad_hidden is None else grad_hidden


def _divide(config: DecoderConfig, mixture: FeedForward, exchange: ExpertExchange) -> None:
    """Lets the rows of a layer's experts go through `exchange`.

    Raises:
        InvalidRequestError: the device, or the family, computes all experts at once.
    """
    stacked = config.family.experts is not None and config.family.experts.stacked
    if stacked or not isinstance(mixture, DivisibleExperts):
        raise InvalidRequestError(
            f"is not for the experts of {config.family.name} on this device",
            field="expert_parallel",
            value=True,
            remedy="Leave it out; --shard-base divides the memory of the base, too",
        )
    mixture.divide(exchange)


def _gated_order(config: DecoderConfig, device: torch.device) -> GatedOrder:
    """Each query head is followed by its gate; the key and value heads come after all of them."""
    query, rest = config.num_attention_heads, 2 * config.num_key_value_heads
    heads = torch.cat([torch.arange(query) * 2, torch.arange(rest) + 2 * query])
    return GatedOrder(heads.to(device), (torch.arange(query) * 2 + 1).to(device))


def _delta_net_order(net: DeltaNetConfig | None, device: torch.device) -> ColumnOrder | None:
    """From products that are sorted by key head to those that a delta net reads; None: they are in that order."""
    if net is None or not net.by_key_head:
        return None
    values = net.value_heads // net.key_heads
    first, second = torch.arange(sum(net.parts)).split(list(net.inputs.values()))
    widths = [net.key_dim, net.key_dim, values * net.value_dim, values * net.value_dim]
    heads = *first.view(net.key_heads, -1).split(widths, dim=1), *second.view(net.key_heads, -1).split(values, dim=1)
    columns = torch.cat([part.flatten() for part in heads])
    return ColumnOrder(columns.to(device), columns.argsort().to(device))

"""The decoder whose layers are cut into chunks, of which several processes may compute a part each.

A chunk is a part of a layer that reads whole rows and makes whole rows: some key heads with their query heads, or their
value heads in a delta net, and the part of the output matrix that reads them, or a part of the inner width of an MLP or
of a shared expert, or some experts. The layer is the sum of its chunks, in a fixed tree. A chunk is computed alone,
with the same shapes in every process: so the bits depend on the number of chunks, which follows from the model, and not
on the number of processes. Norms, routers, embedding and unembedding are whole in every process, and so are the loras.

Letters: T rows · E hidden size · H heads of a chunk (query, key, value) · D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.chunked.chunk_experts import run_chunk_experts
from mint.engine.chunked.chunk_loras import ChunkedLoras
from mint.engine.chunked.chunk_shapes import chunk_config, chunk_tensors, layer_tensors, router_name
from mint.engine.chunked.sum_of_chunks import ChunkedStep, RunChunks
from mint.engine.lora import LoraWeights
from mint.engine.model.config import DecoderConfig, DeltaNetConfig
from mint.engine.model.decoder import Decoder, ForwardBatch
from mint.engine.model.functions import first_rows, pad_rows
from mint.engine.model.layer_parts import (
    AttentionInputs,
    GatedHeads,
    Mlp,
    Norm,
    NormedProduct,
    OutputGate,
    with_bias,
)
from mint.engine.model.linear import LoraLinears, Matrix
from mint.engine.model.lora_linear import LoraProduct
from mint.engine.model.mixture_of_experts import SharedExpert, route
from mint.engine.model.operations import Attention, Operations
from mint.engine.model.weight_loader import load_ends, load_layers
from mint.engine.model.weights import (
    AttentionWeights,
    BaseWeights,
    DeltaNetWeights,
    LayerSource,
    LayerWeights,
    MixtureWeights,
    MlpWeights,
    shared_site,
    site_matrices,
)
from mint.engine.packing import AttentionBlock
from mint.engine.quantized.number_formats import Quantization
from mint.engine.reductions.chunk_sums import Chunks
from mint.models.tensor_files import StoredTensor


@dataclass(frozen=True)
class _Chunk:
    """The own part of all layers, whose norms are taken out, and how loras are applied to it."""

    number: int
    layers: list[LayerWeights]
    linears: LoraLinears


@dataclass(frozen=True)
class _Frame:
    """What of a layer is not cut. None: there is none."""

    attention_norm: Tensor | None  # [E]
    attention_output_norm: Tensor | None  # [E]
    o_bias: Tensor | None  # [E]
    mlp_norm: Tensor | None  # [E]
    mlp_output_norm: Tensor | None  # [E]
    router: Matrix | None  # [experts, E]
    router_bias: Tensor | None  # [experts]


@dataclass(frozen=True)
class _OfOneChunk:
    """Attention over the heads of one chunk."""

    attend: Attention

    def __call__(self, layer: int, heads: Tensor, sinks: Tensor | None) -> Tensor:
        return self.attend(layer, heads, sinks)


class ChunkedDecoder(Decoder):
    """A decoder that computes its own chunks, and adds up all."""

    runs_kernels_alone = False
    loras: ChunkedLoras

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Mapping[str, StoredTensor],
        operations: Operations,
        chunks: Chunks,
        offloaded: Callable[[torch.device], AbstractContextManager[None]] | None = None,
        layer_source: LayerSource | None = None,
    ) -> None:
        """As `Decoder`; `chunks` divides the layers."""
        self._chunks = chunks
        self._own_config = chunk_config(config, chunks.count)
        super().__init__(config, tensors, operations, None, offloaded, layer_source)

    @override
    def training_attention(self, blocks: Sequence[AttentionBlock]) -> Attention:
        """Attention of the heads of one chunk. The chunks call it one after the other, because the order in which a
        backward adds up the gradients of keys depends on the number of heads."""
        return _OfOneChunk(self._attention_of(blocks, 1))

    @override
    def packed_attention(self, blocks: Sequence[AttentionBlock]) -> Attention:
        """Causal attention of packed rows, of the heads of all own chunks at once. Without a gradient, the other heads
        do not change a head's bits."""
        return self._attention_of(blocks, len(self._chunks.own))

    def _attention_of(self, blocks: Sequence[AttentionBlock], chunks: int) -> Attention:
        config = self._own_config
        heads, kv_heads = chunks * config.num_attention_heads, chunks * config.num_key_value_heads
        return self.operations.packed_attention(blocks, heads, kv_heads, config.windows)

    @property
    @override
    def delta_net(self) -> DeltaNetConfig | None:
        net = self._own_config.delta_net
        own = len(self._chunks.own)
        if net is None:
            return None
        return replace(net, layers=frozenset(layer * own + place for layer in net.layers for place in range(own)))

    @override
    def _load(self, tensors: Mapping[str, StoredTensor], quantization: Quantization | None) -> BaseWeights:
        self._frames: list[_Frame] = []
        self._parts = [self._load_chunk(tensors, number) for number in self._chunks.own]
        self._sinks = [_join_sinks(self._parts, index) for index in range(self.config.num_hidden_layers)]
        of_layers = layer_tensors(tensors)
        return load_ends(
            self.config, {name: own for name, own in tensors.items() if name not in of_layers}, self.operations
        )

    def _load_chunk(self, tensors: Mapping[str, StoredTensor], number: int) -> _Chunk:
        cut = chunk_tensors(tensors, self.config, number, self._chunks.count)
        layers: list[LayerWeights] = []
        for index, layer in enumerate(load_layers(self._own_config, cut, self.operations)):
            if index == len(self._frames):
                self._frames.append(self._frame(index, layer, tensors))
            router = self._frames[index].router
            mlp = layer.mlp
            if isinstance(mlp, MixtureWeights) and router is not None:
                mlp = replace(mlp, router=router)
            # With a norm behind it, `Mlp` does not add the row itself to its result.
            layers.append(replace(layer, attention_norm=None, mlp_norm=None, mlp_output_norm=torch.empty(0), mlp=mlp))
        return _Chunk(number, layers, self.operations.loras(site_matrices(layers)))

    def _frame(self, index: int, layer: LayerWeights, tensors: Mapping[str, StoredTensor]) -> _Frame:
        router = bias = None
        if isinstance(layer.mlp, MixtureWeights):  # all scores of a row decide, so each process has the whole
            name = router_name(self.config, index)
            router = self.operations.matrix(self._read(tensors[f"{name}.weight"]))
            bias = None if layer.mlp.router_bias is None else self._read(tensors[f"{name}.bias"])
        norms = layer.attention_norm, layer.attention_output_norm, layer.o_bias, layer.mlp_norm, layer.mlp_output_norm
        return _Frame(*norms, router, bias)

    def _read(self, tensor: StoredTensor) -> Tensor:
        read: Tensor = tensor.read()
        return read.to(self.device, torch.float32, copy=True)

    @override
    def _layer_matrices(self) -> list[Matrix]:
        return [matrix for chunk in self._parts for matrix in site_matrices(chunk.layers).values()]

    @override
    def _open_loras(self) -> ChunkedLoras:
        whole = self.operations.loras({})
        return ChunkedLoras(self._chunks, whole, [chunk.linears for chunk in self._parts], self.config)

    @property
    @override
    def _layer_config(self) -> DecoderConfig:
        return self._own_config

    @override
    def _layer(self, index: int, x: Tensor, *, batch: ForwardBatch, rows: Tensor | None) -> Tensor:
        """See `Decoder`."""
        frame = self._frames[index]
        taken = batch if rows is None else self._taken(batch, len(rows))
        mixed = self._sum(
            index,
            ("qkv", "in", "o"),
            batch,
            partial(self._mix_chunks, index, batch, taken, rows),
            self._normed(x, frame.attention_norm),
        )
        if rows is not None:
            x = pad_rows(x.index_select(0, rows), len(mixed))
        x = self._added(x, with_bias(mixed, frame.o_bias, self.operations), frame.attention_output_norm)
        normed = self._normed(x, frame.mlp_norm)
        if frame.router is None:
            run = partial(self._run_mlps, index, taken)
            return self._added(x, self._sum(index, ("gate_up", "down"), taken, run, normed), frame.mlp_output_norm)
        # without the padding, whose rows would go to experts that no token needs
        tokens = normed[: taken.count]
        mixture = self.config.experts_of(index)
        assert mixture is not None
        scores = self.loras.multiply(tokens, frame.router, f"{index}.router", taken.loras)
        routing_weights, chosen = route(with_bias(scores, frame.router_bias, self.operations), mixture)
        run = partial(self._run_experts, index, taken, chosen)
        routed = pad_rows(self._sum(index, ("experts.",), taken, run, tokens, routing_weights), len(x))
        if mixture.shared_intermediate_size is not None:
            run = partial(self._run_shared_experts, index, taken)
            routed = routed + self._sum(index, ("shared.",), taken, run, normed)
        return self._added(x, routed, frame.mlp_output_norm)

    def _sum(self, index: int, sites: Sequence[str], batch: ForwardBatch, run: RunChunks, *inputs: Tensor) -> Tensor:
        """The sum over all chunks of what they make of `inputs`; `sites` are the prefixes of what loras train there."""

        def at_sites(call: Callable[[LoraWeights, str], None]) -> None:
            lora = batch.loras[0].weights
            assert lora is not None, "a gradient without a lora"
            for site in sites:
                call(lora, f"{index}.{site}")

        clear = partial(at_sites, self.loras.clear_gradient)
        return ChunkedStep(self._chunks, run, clear, partial(at_sites, self.loras.collect_gradient)).sum(*inputs)

    def _mix_chunks(
        self,
        index: int,
        batch: ForwardBatch,
        taken: ForwardBatch,
        rows: Tensor | None,
        inputs: Sequence[Sequence[Tensor]],
    ) -> list[Tensor]:
        """The part [T, E] of each own chunk in what a layer's attention or delta net makes of norm(x). With `rows`, the
        parts are of these rows alone."""
        mix = self._attend_chunks if self.config.delta_net_of(index) is None else self._run_delta_nets
        outs = []
        parts = mix(index, batch, inputs)
        for chunk, loras, part in zip(self._parts, self.loras.by_chunk(taken.loras), parts, strict=True):
            own = part if rows is None else part.index_select(0, rows)
            o = chunk.linears.linear(f"{index}.o", chunk.layers[index].mixer.o, loras)
            outs.append(LoraProduct.run(pad_rows(own, loras[-1].stop), None, o, *o.parameters))
        return outs

    def _attend_chunks(self, index: int, batch: ForwardBatch, inputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The attended values [T, query heads · D] of each own chunk, from norm(x)."""
        context = batch.contexts[self.config.ropes[index]]
        heads, gates = [], []
        for chunk, loras, (normed,) in zip(self._parts, self.loras.by_chunk(batch.loras), inputs, strict=True):
            mixer = _attention(chunk, index)
            qkv = chunk.linears.linear(f"{index}.qkv", mixer.qkv, loras)
            if self.config.family.output_gates:
                wide = NormedProduct.run(normed, None, qkv, context, *qkv.parameters)
                heads.append(first_rows(GatedHeads.run(wide, mixer, context), batch.count))
                gates.append(first_rows(wide, batch.count))
            else:
                own = AttentionInputs.run(normed, None, mixer, qkv, context, *qkv.parameters)
                heads.append(first_rows(own, batch.count))
        parts = self._attend_heads(index, heads, batch.attention)
        if gates:
            parts = [OutputGate.run(part, wide, context) for part, wide in zip(parts, gates, strict=True)]
        return parts

    def _attend_heads(self, index: int, heads: Sequence[Tensor], attention: Attention) -> list[Tensor]:
        """The attended values of the heads of each own chunk."""
        if isinstance(attention, _OfOneChunk):
            sinks = [_attention(chunk, index).sinks for chunk in self._parts]
            return [attention(index, own, each) for own, each in zip(heads, sinks, strict=True)]
        attended = attention(index, _join(heads, self._own_config), self._sinks[index])
        return [part.contiguous() for part in attended.split(self._own_config.query_size, dim=1)]

    def _run_delta_nets(self, index: int, batch: ForwardBatch, inputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The values [T, value heads · D] that the delta net of each own chunk reads, from norm(x). The chunks have
        states of their own."""
        assert batch.delta_rule is not None, f"layer {index} is a delta net, and its states were not given"
        context = batch.contexts[self.config.ropes[index]]
        parts = []
        by_chunk = self.loras.by_chunk(batch.loras)
        for place, (chunk, loras, (normed,)) in enumerate(zip(self._parts, by_chunk, inputs, strict=True)):
            mixer = chunk.layers[index].mixer
            assert isinstance(mixer, DeltaNetWeights)
            linear = chunk.linears.linear(f"{index}.in", mixer.inputs, loras)
            wide = first_rows(self._delta_inputs(normed, None, linear, context), batch.count)
            parts.append(batch.delta_rule(index * len(self._parts) + place, mixer, wide))
        return parts

    def _run_mlps(self, index: int, batch: ForwardBatch, inputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        context = batch.contexts[self.config.ropes[index]]
        outs = []
        for chunk, loras, (normed,) in zip(self._parts, self.loras.by_chunk(batch.loras), inputs, strict=True):
            layer = chunk.layers[index]
            assert isinstance(layer.mlp, MlpWeights)
            gate_up = chunk.linears.linear(f"{index}.gate_up", layer.mlp.gate_up, loras)
            down = chunk.linears.linear(f"{index}.down", layer.mlp.down, loras)
            outs.append(Mlp.run(normed, layer, gate_up, down, context, *gate_up.parameters, *down.parameters))
        return outs

    def _run_experts(
        self, index: int, batch: ForwardBatch, chosen: Tensor, inputs: Sequence[Sequence[Tensor]]
    ) -> list[Tensor]:
        outs = []
        by_chunk = self.loras.by_chunk(batch.loras)
        for chunk, loras, (normed, weights) in zip(self._parts, by_chunk, inputs, strict=True):
            mlp = chunk.layers[index].mlp
            assert isinstance(mlp, MixtureWeights)
            outs.append(
                run_chunk_experts(
                    normed,
                    weights,
                    chosen,
                    mlp.experts,
                    chunk.number * len(mlp.experts),
                    layer=index,
                    operations=self.operations,
                    linears=chunk.linears,
                    loras=loras,
                )
            )
        return outs

    def _run_shared_experts(self, index: int, batch: ForwardBatch, inputs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        outs = []
        name, eps = shared_site(index), self.config.rms_norm_eps
        for chunk, loras, (normed,) in zip(self._parts, self.loras.by_chunk(batch.loras), inputs, strict=True):
            mixture = chunk.layers[index].mlp
            assert isinstance(mixture, MixtureWeights) and mixture.shared is not None
            shared = mixture.shared
            gate_up = chunk.linears.linear(f"{name}.gate_up", shared.mlp.gate_up, loras)
            down = chunk.linears.linear(f"{name}.down", shared.mlp.down, loras)
            outs.append(
                SharedExpert.run(
                    normed,
                    None,
                    None,
                    shared.gate,
                    gate_up,
                    down,
                    eps,
                    self.operations,
                    *gate_up.parameters,
                    *down.parameters,
                )
            )
        return outs

    def _normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else Norm.run(x, norm, self.config.rms_norm_eps, self.operations)

    def _added(self, x: Tensor, out: Tensor, norm: Tensor | None) -> Tensor:
        """x + norm(out), without a norm x + out; all [T, E]."""
        return x + out if norm is None else Norm.run(out, norm, self.config.rms_norm_eps, self.operations, x)


def _attention(chunk: _Chunk, index: int) -> AttentionWeights:
    mixer = chunk.layers[index].mixer
    assert isinstance(mixer, AttentionWeights)
    return mixer


def _join(heads: Sequence[Tensor], config: DecoderConfig) -> Tensor:
    """The heads of several chunks as one model has them: all queries, then all keys, then all values."""
    if len(heads) == 1:
        return heads[0]
    sizes = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
    parts = zip(*(own.split(sizes, dim=1) for own in heads), strict=True)
    return torch.cat([own for part in parts for own in part], dim=1)


def _join_sinks(parts: Sequence[_Chunk], index: int) -> Tensor | None:
    """The sinks of a layer's own heads [H]; None: it has none."""
    sinks = [mixer.sinks for chunk in parts if isinstance(mixer := chunk.layers[index].mixer, AttentionWeights)]
    own = [each for each in sinks if each is not None]
    return torch.cat(own) if own else None

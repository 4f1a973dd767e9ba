"""The decoder whose layers are cut into chunks, of which several processes may compute a part each.

A chunk is a part of a layer that reads whole rows and makes whole rows: some key heads with their query heads and the
part of the output matrix that reads them, or a part of the inner width of an MLP, or some experts. The layer is the sum
of its chunks, in a fixed tree. A chunk is computed alone, with the same shapes in every process: so the bits depend on
the number of chunks, which follows from the model, and not on the number of processes. Norms, routers, embedding and
unembedding are whole in every process, and so are the loras.

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
from mint.engine.model.config import DecoderConfig
from mint.engine.model.decoder import Decoder, ForwardBatch
from mint.engine.model.functions import pad_rows
from mint.engine.model.layer_parts import AddBias, AttentionInputs, Mlp, Norm
from mint.engine.model.linear import LoraLinears, Matrix
from mint.engine.model.lora_linear import LoraProduct
from mint.engine.model.mixture_of_experts import route
from mint.engine.model.operations import Attention, Operations
from mint.engine.model.weight_loader import load_ends, load_layers
from mint.engine.model.weights import (
    AttentionWeights,
    BaseWeights,
    LayerSource,
    LayerWeights,
    MixtureWeights,
    MlpWeights,
    layer_matrices,
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

    @property
    def layer_bytes(self) -> int:
        """The memory of the matrices of layers that are here: those of the own chunks, and the routers."""
        layers = [layer for chunk in self._parts for layer in chunk.layers]
        matrices = {id(matrix): matrix for layer in layers for matrix in layer_matrices(layer)}
        return sum(matrix.size_bytes for matrix in matrices.values())

    @override
    def packed_attention(self, blocks: Sequence[AttentionBlock]) -> Attention:
        """Causal attention of packed rows, over the heads of the own chunks."""
        config, own = self._own_config, len(self._chunks.own)
        heads, kv_heads = own * config.num_attention_heads, own * config.num_key_value_heads
        return self.operations.packed_attention(blocks, heads, kv_heads, config.windows)

    @override
    def _load(self, tensors: Mapping[str, StoredTensor], quantization: Quantization | None) -> BaseWeights:
        self._frames: list[_Frame] = []
        self._parts = [self._load_chunk(tensors, number) for number in self._chunks.own]
        of_layers = layer_tensors(tensors)
        return load_ends(
            self.config, {name: own for name, own in tensors.items() if name not in of_layers}, self.operations
        )

    def _load_chunk(self, tensors: Mapping[str, StoredTensor], number: int) -> _Chunk:
        cut = chunk_tensors(tensors, self.config, number, self._chunks.count)
        layers: list[LayerWeights] = []
        for index, layer in enumerate(load_layers(self._own_config, cut, self.operations)):
            if index == len(self._frames):
                router = None
                if isinstance(layer.mlp, MixtureWeights):  # all scores of a row decide, so each process has the whole
                    router = self.operations.matrix(tensors[router_name(index)].read().float())
                self._frames.append(_frame(layer, router))
            router = self._frames[index].router
            mlp = layer.mlp
            if isinstance(mlp, MixtureWeights) and router is not None:
                mlp = replace(mlp, router=router)
            # With a norm behind it, `Mlp` does not add the row itself to its result.
            layers.append(replace(layer, attention_norm=None, mlp_norm=None, mlp_output_norm=torch.empty(0), mlp=mlp))
        return _Chunk(number, layers, self.operations.loras(site_matrices(layers)))

    @override
    def _layer_matrices(self) -> list[Matrix]:
        return [matrix for chunk in self._parts for matrix in site_matrices(chunk.layers).values()]

    @override
    def _open_loras(self) -> ChunkedLoras:
        experts = 0 if self._own_config.experts is None else self._own_config.experts.count
        whole = self.operations.loras({})
        return ChunkedLoras(self._chunks, whole, [chunk.linears for chunk in self._parts], experts)

    @property
    @override
    def _layer_config(self) -> DecoderConfig:
        return self._own_config

    @override
    def _layer(self, index: int, x: Tensor, *, batch: ForwardBatch, rows: Tensor | None) -> Tensor:
        """See `Decoder`."""
        frame = self._frames[index]
        taken = batch if rows is None else self._taken(batch, len(rows))
        attended = self._sum(
            index,
            ("qkv", "o"),
            batch,
            partial(self._attend_chunks, index, batch, taken, rows),
            self._normed(x, frame.attention_norm),
        )
        if rows is not None:
            x = pad_rows(x.index_select(0, rows), len(attended))
        if frame.o_bias is not None:
            attended = AddBias.run(attended, frame.o_bias, self.operations)
        x = self._added(x, attended, frame.attention_output_norm)
        normed = self._normed(x, frame.mlp_norm)
        if frame.router is None:
            run = partial(self._run_mlps, index, taken)
            return self._added(x, self._sum(index, ("gate_up", "down"), taken, run, normed), frame.mlp_output_norm)
        # without the padding, whose rows would go to experts that no token needs
        normed = normed[: taken.count]
        mixture = self.config.experts_of(index)
        assert mixture is not None
        scores = self.loras.multiply(normed, frame.router, f"{index}.router", taken.loras)
        routing_weights, chosen = route(scores, mixture)
        run = partial(self._run_experts, index, taken, chosen)
        routed = self._sum(index, ("experts.",), taken, run, normed, routing_weights)
        return self._added(x, pad_rows(routed, len(x)), frame.mlp_output_norm)

    def _sum(self, index: int, sites: Sequence[str], batch: ForwardBatch, run: RunChunks, *inputs: Tensor) -> Tensor:
        """The sum over all chunks of what they make of `inputs`; `sites` are the prefixes of what loras train there."""

        def at_sites(call: Callable[[LoraWeights, str], None]) -> None:
            lora = batch.loras[0].weights
            assert lora is not None, "a gradient without a lora"
            for site in sites:
                call(lora, f"{index}.{site}")

        clear = partial(at_sites, self.loras.clear_gradient)
        return ChunkedStep(self._chunks, run, clear, partial(at_sites, self.loras.collect_gradient)).sum(*inputs)

    def _attend_chunks(
        self,
        index: int,
        batch: ForwardBatch,
        taken: ForwardBatch,
        rows: Tensor | None,
        inputs: Sequence[Sequence[Tensor]],
    ) -> list[Tensor]:
        """Of each own chunk its part of attention [T, E], from norm(x); of `rows` alone, if given."""
        context = batch.contexts[self.config.ropes[index]]
        heads = []
        for chunk, loras, (normed,) in zip(self._parts, self.loras.by_chunk(batch.loras), inputs, strict=True):
            mixer = _attention(chunk, index)
            qkv = chunk.linears.linear(f"{index}.qkv", mixer.qkv, loras)
            heads.append(AttentionInputs.run(normed, None, mixer, qkv, context, *qkv.parameters)[: batch.count])
        # The heads of all own chunks attend together: a head's bits do not depend on the others.
        attended = batch.attention(index, _join(heads, self._own_config), None)
        outs = []
        parts = attended.split(self._own_config.query_size, dim=1)
        for chunk, loras, part in zip(self._parts, self.loras.by_chunk(taken.loras), parts, strict=True):
            own = part.contiguous() if rows is None else part.index_select(0, rows)
            o = chunk.linears.linear(f"{index}.o", _attention(chunk, index).o, loras)
            outs.append(LoraProduct.run(pad_rows(own, loras[-1].stop), None, o, *o.parameters))
        return outs

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

    def _normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        return x if norm is None else Norm.run(x, norm, self.config.rms_norm_eps, self.operations)

    def _added(self, x: Tensor, out: Tensor, norm: Tensor | None) -> Tensor:
        """x + norm(out), without a norm x + out; all [T, E]."""
        return x + out if norm is None else Norm.run(out, norm, self.config.rms_norm_eps, self.operations, x)


def _attention(chunk: _Chunk, index: int) -> AttentionWeights:
    mixer = chunk.layers[index].mixer
    assert isinstance(mixer, AttentionWeights)
    return mixer


def _frame(layer: LayerWeights, router: Matrix | None) -> _Frame:
    return _Frame(
        layer.attention_norm, layer.attention_output_norm, layer.o_bias, layer.mlp_norm, layer.mlp_output_norm, router
    )


def _join(heads: Sequence[Tensor], config: DecoderConfig) -> Tensor:
    """The heads of several chunks as one model has them: all queries, then all keys, then all values."""
    if len(heads) == 1:
        return heads[0]
    sizes = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
    parts = zip(*(own.split(sizes, dim=1) for own in heads), strict=True)
    return torch.cat([own for part in parts for own in part], dim=1)

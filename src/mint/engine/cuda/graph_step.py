"""A decoding step of fixed shapes, which a GPU replays as one CUDA graph.

The rows of one lora (the usual case: a GRPO batch) are one replay, padded to the size of a bucket; a batch of several
loras needs as many replays. What differs from step to step is in buffers at fixed addresses: tokens, positions, the
pages of each row, the lora's weights. Graphs and buffers outlive batches. The logits are computed outside of the graph,
because each graph would keep memory for them.

Bits of a row: between products every row is treated alone (`cuda/kernels.py`), so no other row and no padding changes a
bit. The products are cuBLAS's, which chooses its order of addition by the shape. Their shape is the bucket's. As long
as the rows of one lora fit into one tile of a product, as those of the first bucket do, a row does not depend on the
others. In larger buckets its last bits may, as in prefill and training on a GPU.

Tested on CPUs, without capture: against `EagerStep`, with torch's operations and with interpreted kernels, and with
tensors of torch's `meta` device, which refuse to be read back. Capture itself needs a GPU and has not been run on one.

Letters: R rows · T rows of a bucket · C pages of a row · E hidden size · H all heads · Q query heads · D head dimension
· I inner width · O outputs · S lora parts of one product · r rank · V vocabulary · N pages in all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.lora import LoraRows, LoraWeights
from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.model.decoder import Decoder
from mint.engine.model.weights import AttentionWeights, MlpWeights
from mint.engine.protocol import LoraSpec
from mint.engine.sampling.decode_step import DecodeStep
from mint.engine.sampling.kv_cache import KVCache
from mint.engine.upload import upload

log = logging.getLogger(__name__)

BUCKETS = (64, 128, 256, 512)
"""Rows of a graph. Up to the first, the time is that of reading the weights, however few the rows."""

SPLIT_PAGES = 4
"""Attention adds so many pages of a row one after another; a longer row is split into parts that run in parallel."""

MAX_GRAPHS = 48
"""One graph more, and the one that was not used for the longest time is thrown away."""


@dataclass(frozen=True)
class LoraPart:
    """The second half of a lora's product at a site: `scale · down · bs.T`, part by part."""

    down: Tensor  # [T, S·r], float32
    bs: Tensor  # [O, r], float32
    scale: float


@dataclass(frozen=True)
class StepContext:
    """What all layers of a step share.

    `inputs` int32 [2 + C, T] are tokens, positions (-1: padding) and pages in order; cos and sin [positions, D / 2];
    attention runs over `splits` of `SPLIT_PAGES` pages.
    """

    inputs: Tensor
    cos: Tensor
    sin: Tensor
    query_heads: int
    kv_heads: int
    head_dim: int
    side_by_side: int
    eps: float
    splits: int


class StepKernels(Protocol):
    """The operations between a step's products; `TritonKernels` says the shapes."""

    def norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """RMS norm, in float32 and in `dtype`."""
        ...

    def heads(
        self,
        product: Tensor,
        lora: LoraPart | None,
        weights: AttentionWeights,
        rows: StepContext,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Queries, normed and rotated; keys and values go into their pages, those of padding nowhere."""
        ...

    def attend(self, queries: Tensor, rows: StepContext, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Attended values, in float32 and in the queries' dtype; undefined for padding."""
        ...

    def swiglu(self, product: Tensor, lora: LoraPart | None) -> tuple[Tensor, Tensor]:
        """`silu(gate) · up`, in float32 and in the product's dtype."""
        ...

    def add(self, product: Tensor, residual: Tensor, lora: LoraPart | None) -> Tensor:
        """Their sum in float32."""
        ...


def run_layers(
    decoder: Decoder, kernels: StepKernels, cache: KVCache, rows: StepContext, lora: LoraWeights | None
) -> Tensor:
    """Final hidden states (normed) [T, E] of a decoder without experts: what is captured."""
    weights = decoder.weights
    dtype = decoder.dtype
    eps = rows.eps
    x = decoder.operations.take_rows(weights.embedding, rows.inputs[0], decoder.config.scales.embedding)
    for index, layer in enumerate(weights.layers):
        mixer = layer.mixer
        if not isinstance(layer.mlp, MlpWeights) or not isinstance(mixer, AttentionWeights):
            raise ValueError(f"layer {index} has experts or a delta net, whose steps are not captured")
        keys, values = cache.planes(index)
        if layer.attention_norm is None or layer.mlp_norm is None:
            raise ValueError(f"layer {index} lacks a norm, and such steps are not captured")
        wide, narrow = kernels.norm(x, layer.attention_norm, eps, dtype)
        product = F.linear(narrow, mixer.qkv.dense())
        queries = kernels.heads(product, _part(lora, f"{index}.qkv", wide), mixer, rows, keys, values)
        wide, narrow = kernels.attend(queries, rows, keys, values)
        x = kernels.add(F.linear(narrow, mixer.o.dense()), x, _part(lora, f"{index}.o", wide))
        wide, narrow = kernels.norm(x, layer.mlp_norm, eps, dtype)
        product = F.linear(narrow, layer.mlp.gate_up.dense())
        wide, narrow = kernels.swiglu(product, _part(lora, f"{index}.gate_up", wide))
        x = kernels.add(F.linear(narrow, layer.mlp.down.dense()), x, _part(lora, f"{index}.down", wide))
    return kernels.norm(x, weights.final_norm, eps, torch.float32)[0]


def _part(lora: LoraWeights | None, name: str, x: Tensor) -> LoraPart | None:
    site = None if lora is None else lora.sites.get(name)
    if lora is None or site is None:
        return None
    # The b matrices of a site are contiguous.
    bs = site.bs[0].as_strided((sum(len(b) for b in site.bs), site.bs[0].shape[1]), site.bs[0].stride())
    return LoraPart(x @ site.a.t(), bs, lora.scale)


@dataclass(frozen=True)
class _Shape:
    """What a graph is captured for: any weights of a lora of this spec."""

    rows: int
    splits: int
    lora: LoraSpec | None


class StepGraphs:
    """`DecodeSteps` by the graphs of one base model over its pages."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        kernels: StepKernels,
        *,
        capture: bool = True,
        buckets: tuple[int, ...] = BUCKETS,
    ) -> None:
        """Nothing captured yet. Without `capture` every step runs its layers anew, on any device."""
        self.decoder = decoder
        self.cache = cache
        self.buckets = buckets
        self._kernels = kernels
        self._capture = capture
        self.columns = -(-decoder.config.max_position_embeddings // PAGE_POSITIONS)
        self._inputs = torch.zeros((2 + self.columns, buckets[-1]), dtype=torch.int32, device=decoder.device)
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._captured: dict[_Shape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        # By spec: the buffers that graphs read, and the lora whose weights are in them, with their version.
        self._buffers: dict[LoraSpec, LoraWeights] = {}
        self._loaded: dict[LoraSpec, tuple[LoraWeights, int | None]] = {}

    def open(
        self,
        table: np.ndarray,
        fronts: np.ndarray,
        positions: np.ndarray,
        loras: Sequence[LoraRows],
        earlier: DecodeStep | None = None,
        states: np.ndarray | None = None,
    ) -> GraphStep:
        """See `DecodeSteps`."""
        # Weights may have changed in place since, and such a tensor does not say so.
        self._loaded = {spec: own for spec, own in self._loaded.items() if own[1] is not None}
        return GraphStep(self, table, positions, loras)

    def hidden(self, inputs: Tensor, splits: int, lora: LoraWeights | None) -> Tensor:
        """Final hidden states [T, E] after `inputs` [2 + C, T] of a bucket's size, C of them filled; valid until the
        next call."""
        width, count = inputs.shape
        self._inputs[:width, :count].copy_(inputs)
        shape = _Shape(count, splits, None if lora is None else replace(lora.spec, seed=0))
        if shape not in self._captured and len(self._captured) >= MAX_GRAPHS:
            self._drop_oldest()
        buffer = None if lora is None or shape.lora is None else self._load(shape.lora, lora)
        if not self._capture:
            return self._run(shape, buffer)
        if shape not in self._captured:
            try:
                self._captured[shape] = self._record(shape, buffer)
            except RuntimeError as error:  # also that memory ran out
                log.warning("decoding without CUDA graphs from now on, because a step could not be captured: %s", error)
                self._capture = False
                self._captured.clear()
                return self._run(shape, buffer)
        graph, hidden = self._captured[shape] = self._captured.pop(shape)  # the last is the one used last
        graph.replay()
        return hidden

    def _drop_oldest(self) -> None:
        """Throws away the graph that was not used for the longest time, and the buffers that no other graph reads."""
        oldest = next(iter(self._captured))
        del self._captured[oldest]
        if oldest.lora is not None and not any(shape.lora == oldest.lora for shape in self._captured):
            self._buffers.pop(oldest.lora, None)
            self._loaded.pop(oldest.lora, None)

    def _load(self, spec: LoraSpec, lora: LoraWeights) -> LoraWeights:
        """The buffers for loras of this spec, with the weights of `lora` in them."""
        if spec not in self._buffers:
            # A tensor made in inference mode could not be written outside of it.
            with torch.inference_mode(mode=False):
                self._buffers[spec] = LoraWeights(self.decoder.sites(spec), spec, self.decoder.device)
        held, version = self._loaded.get(spec, (None, None))
        if held is not lora or version != _version_of(lora):
            self._buffers[spec].flat.copy_(lora.flat.detach())
            self._loaded[spec] = lora, _version_of(lora)
        return self._buffers[spec]

    def _run(self, shape: _Shape, lora: LoraWeights | None) -> Tensor:
        decoder, cache = self.decoder, self.cache
        config = decoder.config
        cos, sin = decoder.rope_tables[config.ropes[0]]
        rows = StepContext(
            inputs=self._inputs[:, : shape.rows],
            cos=cos,
            sin=sin,
            query_heads=cache.query_heads,
            kv_heads=cache.kv_heads,
            head_dim=config.head_dim,
            side_by_side=cache.side_by_side,
            eps=config.rms_norm_eps,
            splits=shape.splits,
        )
        return run_layers(decoder, self._kernels, cache, rows, lora)

    def _record(self, shape: _Shape, lora: LoraWeights | None) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Captures a graph. A run on a side stream comes first, because what libraries set up at a first call must not
        be captured; the replay that follows writes the same keys and values again."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._run(shape, lora)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # One memory pool for all: the result of a graph is read before another graph is replayed.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = self._run(shape, lora)
        return graph, hidden


def _version_of(lora: LoraWeights) -> int | None:
    """What changes whenever the weights do; None where torch does not count, in inference mode."""
    return None if lora.flat.is_inference() else lora.flat._version


@dataclass(frozen=True)
class _GraphRows:
    """Rows `start:stop` of the batch, in `columns` of the step's inputs."""

    start: int
    stop: int
    columns: slice
    splits: int
    lora: LoraWeights | None


class GraphStep:
    """`DecodeStep` by graphs: one replay for each lora, and for each of the largest bucket's rows."""

    def __init__(self, graphs: StepGraphs, table: np.ndarray, positions: np.ndarray, loras: Sequence[LoraRows]) -> None:
        """See `DecodeSteps.open`."""
        self._graphs = graphs
        self._columns = positions // PAGE_POSITIONS
        self._parts: list[_GraphRows] = []
        width = 0
        for run in loras:
            for start in range(run.start, run.stop, graphs.buckets[-1]):
                stop = min(run.stop, start + graphs.buckets[-1])
                size = next(bucket for bucket in graphs.buckets if bucket >= stop - start)
                splits = -(-(int(self._columns[start:stop].max()) + 1) // SPLIT_PAGES)
                columns = slice(width, width + size)
                self._parts.append(_GraphRows(start, stop, columns, 1 << (splits - 1).bit_length(), run.weights))
                width += size
        self._places = np.concatenate(
            [np.arange(p.columns.start, p.columns.start + p.stop - p.start) for p in self._parts]
        )
        used = min(table.shape[1], graphs.columns)
        inputs = np.zeros((2 + used, width), np.int32)
        inputs[2:, self._places] = table[:, :used].T
        self._inputs = upload(graphs.decoder.device, inputs)[0]

    def fits(self, positions: np.ndarray) -> bool:
        """Whether rows at these positions are still within their pages."""
        return bool((positions // PAGE_POSITIONS == self._columns).all())

    def freeze(self, rows: np.ndarray) -> None:
        """Captured models have no delta nets."""

    def run(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        """Logits [R, V]; one transfer to the device, and none back."""
        decoder = self._graphs.decoder
        own = np.full((2, self._inputs.shape[1]), -1, np.int32)
        own[0] = 0
        own[:, self._places] = tokens, positions
        self._inputs[:2].copy_(upload(decoder.device, own)[0])
        logits = []
        for part in self._parts:
            hidden = self._graphs.hidden(self._inputs[:, part.columns], part.splits, part.lora)
            found = decoder.logits(hidden, [LoraRows(0, len(hidden), part.lora)])
            logits.append(found[: part.stop - part.start])
        return logits[0] if len(logits) == 1 else torch.cat(logits)

"""A decoding step of fixed shapes, which a GPU replays as one CUDA graph.

The rows of a batch are one replay, padded to the size of a bucket, whatever loras they have: a row has the number of a
slot that holds its lora (`cuda/lora_slots.py`). What differs from step to step is in buffers at fixed addresses:
tokens, positions, slots, the pages of each row, the weights of loras, how each row draws. Graphs and buffers outlive
batches.

A graph ends with hidden states, or with drawn tokens. In the second case the logits are intermediate results of the
graph: all graphs of a pool share this memory. The tokens go into the inputs of the next replay on the device, so that
the host starts a step before it has read the tokens of the last one (`Sampler` reads them one step later). Rows with
logit rules, and those that asked for more than tokens and logprobs, need the logits: they are drawn outside.

Bits of a row: between products every row is treated alone (`cuda/kernels.py`), so no other row and no padding changes a
bit. The products are cuBLAS's, which chooses its order of addition by the shape. Their shape is the bucket's. As long
as the rows of a replay fit into one tile of a product, as those of the first bucket do, a row does not depend on the
others. In larger buckets its last bits may, as in prefill and training on a GPU. In the batch-invariant mode the
products have tiles that do not depend on the shape (`cuda/invariant_kernels.py`).

Tested on CPUs, without capture: against `EagerStep`, with torch's operations and with interpreted kernels, and with
tensors of torch's `meta` device, which refuse to be read back. Capture was run on an H100.

Letters: R rows · T rows of a bucket · C pages of a row · E hidden size · H all heads · Q query heads · D head dimension
· I inner width · O outputs · V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from mint.engine.cuda.capture import capture
from mint.engine.cuda.lora_slots import MAX_SLOTS, TILE_ROWS, LoraPart, LoraSlots, common_spec
from mint.engine.drawing.device_draw import RULES, DrawRules, draw_rows
from mint.engine.lora import LoraRows, LoraWeights
from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.model.decoder import Decoder
from mint.engine.model.weights import AttentionWeights, MlpWeights
from mint.engine.protocol import LoraSpec
from mint.engine.sampling.decode_step import DecodeStep
from mint.engine.sampling.kv_cache import KVCache
from mint.engine.transfers import Readback, upload

log = logging.getLogger(__name__)

BUCKETS = (64, 128, 256, 512)
"""Rows of a graph. Up to the first, the time is that of reading the weights, however few the rows."""

SPLIT_PAGES = 4
"""Attention adds so many pages of a row one after another; a longer row is split into parts that run in parallel."""

FIRST_PAGE = 3
"""Where the pages begin in the inputs of a step."""

MAX_GRAPHS = 48
"""One graph more, and the one that was not used for the longest time is thrown away."""


@dataclass(frozen=True)
class StepContext:
    """What all layers of a step share.

    `inputs` int32 [3 + C, T] are tokens, positions (-1: padding), slots of loras (-1: none) and pages in order; cos and
    sin [positions, D / 2]; attention runs over `splits` of `SPLIT_PAGES` pages.
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

    @property
    def slots(self) -> Tensor:
        """Those of the rows [T]."""
        return self.inputs[2]


class StepKernels(Protocol):
    """A step's products and the operations between them; `TritonKernels` says the shapes."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product with a matrix of the base, in its dtype."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """RMS norm, in float32 and in `dtype`."""
        ...

    def shrink(self, x: Tensor, a: Tensor, slots: Tensor) -> Tensor:
        """The first half of the loras' product: each row of x times `a[slot].T`, as sums that `LoraPart` adds up; zeros
        for a slot of -1."""
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


@runtime_checkable
class StepMixture(Protocol):
    """Experts that a captured step can compute: nothing is read back, and all sizes are fixed."""

    def run_step(self, x: Tensor, rows: StepContext, loras: LoraSlots | None) -> Tensor:
        """x plus the weighted sum of the chosen experts of norm(x), both float32 [T, E]; padding has no experts."""
        ...


def run_layers(
    decoder: Decoder, kernels: StepKernels, cache: KVCache, rows: StepContext, loras: LoraSlots | None
) -> Tensor:
    """Final hidden states (normed) [T, E]: what is captured."""
    weights = decoder.weights
    dtype = decoder.dtype
    eps = rows.eps

    def part(site: str, own: Tensor) -> LoraPart | None:
        held = None if loras is None else loras.sites.get(site)
        if held is None:
            return None
        return LoraPart(kernels.shrink(own, held.a, rows.slots), held.bs, held.scales, rows.slots)

    x = decoder.operations.take_rows(weights.embedding, rows.inputs[0], decoder.config.scales.embedding)
    for index, layer in enumerate(weights.layers):
        mixer = layer.mixer
        if not isinstance(mixer, AttentionWeights):
            raise ValueError(f"layer {index} has a delta net, whose steps are not captured")
        keys, values = cache.planes(index)
        if layer.attention_norm is None or layer.mlp_norm is None:
            raise ValueError(f"layer {index} lacks a norm, and such steps are not captured")
        wide, narrow = kernels.norm(x, layer.attention_norm, eps, dtype)
        product = kernels.linear(narrow, mixer.qkv.dense())
        queries = kernels.heads(product, part(f"{index}.qkv", wide), mixer, rows, keys, values)
        wide, narrow = kernels.attend(queries, rows, keys, values)
        x = kernels.add(kernels.linear(narrow, mixer.o.dense()), x, part(f"{index}.o", wide))
        if not isinstance(layer.mlp, MlpWeights):
            mixture = decoder.mixtures[index]
            if not isinstance(mixture, StepMixture):
                raise ValueError(f"layer {index} loops over its experts, and such steps are not captured")
            x = mixture.run_step(x, rows, loras)
            continue
        wide, narrow = kernels.norm(x, layer.mlp_norm, eps, dtype)
        product = kernels.linear(narrow, layer.mlp.gate_up.dense())
        wide, narrow = kernels.swiglu(product, part(f"{index}.gate_up", wide))
        x = kernels.add(kernels.linear(narrow, layer.mlp.down.dense()), x, part(f"{index}.down", wide))
    return kernels.norm(x, weights.final_norm, eps, torch.float32)[0]


@dataclass(frozen=True)
class _Shape:
    """What a graph is captured for: any loras in slots of this kind."""

    rows: int
    splits: int
    kind: LoraSpec | None
    draws: Literal["nothing", "plain", "restricted"] = "nothing"
    """What follows the hidden states; top-k and top-p need a sort."""


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
        draw_rows_at_once: int | None = None,
    ) -> None:
        """Nothing captured yet. Without `capture` every step runs its layers anew, on any device. `draw_rows_at_once`
        as `draw` takes them; None: as many as the operations say."""
        self.decoder = decoder
        self.cache = cache
        self.buckets = buckets
        self._kernels = kernels
        self._capture = capture
        self.columns = -(-decoder.config.max_position_embeddings // PAGE_POSITIONS)
        self._inputs = torch.zeros((FIRST_PAGE + self.columns, buckets[-1]), dtype=torch.int32, device=decoder.device)
        self._rules = torch.ones((RULES, buckets[-1]), dtype=torch.float64, device=decoder.device)
        self._draw_rows = draw_rows_at_once or decoder.operations.rows_in_cache(decoder.vocab_size)
        self._draws_inside = True
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._captured: dict[_Shape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._slots: dict[LoraSpec, LoraSlots] = {}

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
        if earlier is None:  # a step that goes on has the same weights
            for slots in self._slots.values():
                slots.forget_uncounted()
        return GraphStep(self, table, positions, loras, earlier)

    def place(self, kind: LoraSpec | None, loras: Sequence[LoraWeights]) -> list[int]:
        """The slots of these different loras, which are of this kind, for the next call of `hidden`."""
        if kind is None:
            return [-1] * len(loras)
        slots = self._slots.get(kind)
        if slots is None or slots.count < len(loras):
            self._captured = {shape: graph for shape, graph in self._captured.items() if shape.kind != kind}
            count = 1 << (len(loras) - 1).bit_length()
            # A tensor made in inference mode could not be written outside of it.
            with torch.inference_mode(mode=False):
                slots = self._slots[kind] = LoraSlots(self.decoder.sites(kind), kind, count, self.decoder.device)
        return slots.place(loras)

    def hidden(self, inputs: Tensor, splits: int, kind: LoraSpec | None) -> Tensor:
        """Final hidden states [T, E] after `inputs` [3 + C, T] of a bucket's size, C of them filled; valid until the
        next call. The loras of this kind are in their slots."""
        return self._replay(inputs, _Shape(inputs.shape[1], splits, kind))

    def drawn(
        self,
        inputs: Tensor,
        splits: int,
        kind: LoraSpec | None,
        loras: Sequence[LoraRows],
        rules: Tensor,
        *,
        is_restricted: bool,
    ) -> Tensor:
        """Tokens, logprobs and normalisers [3, T] as `draw_rows` returns them, by the `rules` [4, T]; else as `hidden`.
        `loras` of the columns are asked for the unembedding's."""
        has_own_logits = any(run.weights is not None and run.weights.layout.spec.train_unembed for run in loras)
        if has_own_logits or not self._draws_inside:
            logits = self.decoder.logits(self.hidden(inputs, splits, kind), loras)
            return draw_rows(logits, rules, is_restricted=is_restricted, rows_at_once=self._draw_rows)
        count = inputs.shape[1]
        self._rules[:, :count].copy_(rules)
        return self._replay(inputs, _Shape(count, splits, kind, "restricted" if is_restricted else "plain"))

    def _replay(self, inputs: Tensor, shape: _Shape) -> Tensor:
        width, count = inputs.shape
        self._inputs[:width, :count].copy_(inputs)
        if shape not in self._captured and len(self._captured) >= MAX_GRAPHS:
            self._drop_oldest(shape.kind)
        if not self._capture:
            return self._run(shape)
        if shape not in self._captured:
            try:
                self._captured[shape] = self._record(shape)
            except RuntimeError as error:  # also that memory ran out
                self._give_up(shape, error)
                return self._run(shape)
        graph, found = self._captured[shape] = self._captured.pop(shape)  # the last is the one used last
        graph.replay()
        return found

    def _give_up(self, shape: _Shape, error: RuntimeError) -> None:
        """Captures no more draws, or nothing at all, because this shape could not be captured."""
        if shape.draws != "nothing":
            log.warning("drawing outside of CUDA graphs from now on, because a draw could not be captured: %s", error)
            self._draws_inside = False
            return
        log.warning("decoding without CUDA graphs from now on, because a step could not be captured: %s", error)
        self._capture = False
        self._captured.clear()

    def _drop_oldest(self, needed: LoraSpec | None) -> None:
        """Throws away the graph that was not used for the longest time, and slots that no other graph reads, except of
        the kind that is `needed`: the graph that comes next reads them, and `place` has filled them."""
        oldest = next(iter(self._captured))
        del self._captured[oldest]
        kinds = {needed, *(shape.kind for shape in self._captured)}
        if oldest.kind is not None and oldest.kind not in kinds:
            del self._slots[oldest.kind]

    def _run(self, shape: _Shape) -> Tensor:
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
        loras = None if shape.kind is None else self._slots[shape.kind]
        hidden = run_layers(decoder, self._kernels, cache, rows, loras)
        if shape.draws == "nothing":
            return hidden
        logits = decoder.logits(hidden, [LoraRows(0, shape.rows, None)])
        rules = self._rules[:, : shape.rows]
        return draw_rows(logits, rules, is_restricted=shape.draws == "restricted", rows_at_once=self._draw_rows)

    def _record(self, shape: _Shape) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Captures a graph; the replay that follows writes the same keys and values again. One memory pool for all: the
        result of a graph is read before another graph is replayed."""
        return capture(lambda: self._run(shape), pool=self._pool)


@dataclass(frozen=True)
class _GraphRows:
    """Rows of the batch that are one replay, in `columns` of the step's inputs; row `start + i` is in the column
    `places[i]` of these.

    `runs` are the loras of the columns, and `numbers` [T] say which of `loras` a column has (-1: none).
    """

    start: int
    columns: slice
    places: np.ndarray
    splits: int
    kind: LoraSpec | None
    loras: list[LoraWeights]
    numbers: np.ndarray
    runs: list[LoraRows]
    taken: Tensor | None
    """`places` on the device; None where these are the first columns."""

    @property
    def stop(self) -> int:
        return self.start + len(self.places)


@dataclass(frozen=True)
class _DrawnParts:
    """`PendingDraw` of a step's replays, each with the columns of its rows."""

    parts: list[tuple[Readback, np.ndarray]]

    def wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        found = np.concatenate([readback.wait()[:, places] for readback, places in self.parts], axis=1)
        return found[0].astype(np.int64), found[1].astype(np.float32), found[2].astype(np.float32)


class GraphStep:
    """`DrawingStep` by graphs: one replay for the rows of the largest bucket and `MAX_SLOTS` loras."""

    def __init__(
        self,
        graphs: StepGraphs,
        table: np.ndarray,
        positions: np.ndarray,
        loras: Sequence[LoraRows],
        earlier: DecodeStep | None = None,
    ) -> None:
        """See `DecodeSteps.open`."""
        self._graphs = graphs
        self._columns = positions // PAGE_POSITIONS
        self._parts: list[_GraphRows] = []
        width = 0
        for runs in cut_runs(loras, graphs.buckets[-1]):
            self._parts.append(self._lay_out(runs, width))
            width = self._parts[-1].columns.stop
        used = min(table.shape[1], graphs.columns)
        inputs = np.zeros((FIRST_PAGE + used, width), np.int32)
        for part in self._parts:
            inputs[FIRST_PAGE:, part.columns.start + part.places] = table[part.start : part.stop, :used].T
        self._inputs = upload(graphs.decoder.device, inputs)[0]
        if isinstance(earlier, GraphStep):  # of the same rows, so its tokens are in the same columns
            self._inputs[0].copy_(earlier._inputs[0])

    def _lay_out(self, runs: Sequence[LoraRows], width: int) -> _GraphRows:
        """Each run begins at a multiple of `TILE_ROWS`; the replay begins at the column `width` of the inputs."""
        graphs = self._graphs
        firsts, end = [], 0
        for run in runs:
            firsts.append(-(-end // TILE_ROWS) * TILE_ROWS)
            end = firsts[-1] + run.stop - run.start
        size = next(bucket for bucket in graphs.buckets if bucket >= end)
        loras = list(dict.fromkeys(run.weights for run in runs if run.weights is not None))
        numbers = np.full(size, -1)
        places, covers = [], []
        for run, first, following in zip(runs, firsts, [*firsts[1:], size], strict=True):
            places.append(np.arange(first, first + run.stop - run.start))
            covers.append(LoraRows(first, following, run.weights))
            if run.weights is not None:
                numbers[first:following] = loras.index(run.weights)
        start, stop = runs[0].start, runs[-1].stop
        splits = -(-(int(self._columns[start:stop].max()) + 1) // SPLIT_PAGES)
        joined = np.concatenate(places)
        return _GraphRows(
            start=start,
            columns=slice(width, width + size),
            places=joined,
            splits=1 << (splits - 1).bit_length(),
            kind=common_spec(loras),
            loras=loras,
            numbers=numbers,
            runs=covers,
            taken=None if len(runs) == 1 else upload(graphs.decoder.device, joined)[0],
        )

    def fits(self, positions: np.ndarray) -> bool:
        """Whether rows at these positions are still within their pages."""
        return bool((positions // PAGE_POSITIONS == self._columns).all())

    def freeze(self, rows: np.ndarray) -> None:
        """Captured models have no delta nets."""

    def run(self, tokens: np.ndarray, positions: np.ndarray) -> Tensor:
        """Logits [R, V]; one transfer to the device for each replay, and none back."""
        graphs = self._graphs
        logits = []
        for part in self._parts:
            hidden = graphs.hidden(self._filled(part, tokens, positions), part.splits, part.kind)
            found = graphs.decoder.logits(hidden, part.runs)
            logits.append(found[: len(part.places)] if part.taken is None else found.index_select(0, part.taken))
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def draw(self, tokens: np.ndarray | None, positions: np.ndarray, rules: DrawRules) -> _DrawnParts:
        """See `DrawingStep`; two transfers to the device for each replay, and one back, which `wait` waits for."""
        graphs = self._graphs
        parts = []
        for part in self._parts:
            inputs = self._filled(part, tokens, positions)
            own = np.ones((RULES, len(part.numbers)))
            own[:, part.places] = rules.columns[:, part.start : part.stop]
            uploaded = upload(graphs.decoder.device, own)[0]
            found = graphs.drawn(inputs, part.splits, part.kind, part.runs, uploaded, is_restricted=rules.is_restricted)
            inputs[0].copy_(found[0])
            parts.append((Readback(found), part.places))
        return _DrawnParts(parts)

    def _filled(self, part: _GraphRows, tokens: np.ndarray | None, positions: np.ndarray) -> Tensor:
        """The inputs of a replay, with the slots of its loras, which are there from then on."""
        slots = np.array([*self._graphs.place(part.kind, part.loras), -1])
        own = np.zeros((FIRST_PAGE, len(part.numbers)), np.int32)
        own[1], own[2] = -1, slots[part.numbers]
        own[1, part.places] = positions[part.start : part.stop]
        if tokens is not None:
            own[0, part.places] = tokens[part.start : part.stop]
        first = 0 if tokens is not None else 1  # the tokens are there already
        inputs = self._inputs[:, part.columns]
        inputs[first:FIRST_PAGE].copy_(upload(self._graphs.decoder.device, own[first:])[0])
        return inputs


def cut_runs(loras: Sequence[LoraRows], most: int) -> list[list[LoraRows]]:
    """The runs of a batch, in order, cut into replays of up to `most` columns and `MAX_SLOTS` loras."""
    replays: list[list[LoraRows]] = []
    end = 0
    for run in loras:
        for start in range(run.start, run.stop, most):
            own = LoraRows(start, min(run.stop, start + most), run.weights)
            count = own.stop - own.start
            first = -(-end // TILE_ROWS) * TILE_ROWS
            others = {id(other.weights) for other in replays[-1]} if replays else set()
            if not replays or first + count > most or len(others | {id(own.weights)}) > MAX_SLOTS:
                replays.append([own])
                end = count
            else:
                replays[-1].append(own)
                end = first + count
    return replays

"""The experts of one chunk: a run of neighbours among those of a layer.

The results of a row are summed in the order of the chunk's experts, so no row's bits depend on the other rows.

Letters: T rows · E hidden size · K experts per row · P pairs of a row and an expert of this chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mint.engine.lora import LoraRows
from mint.engine.model.layer_parts import with_bias
from mint.engine.model.linear import LoraLinears
from mint.engine.model.mixture_of_experts import SwiGlu
from mint.engine.model.operations import Operations
from mint.engine.model.weights import MlpWeights, expert_site


def run_chunk_experts(
    normed: Tensor,
    routing_weights: Tensor,
    chosen: Tensor,
    experts: Sequence[MlpWeights],
    first: int,
    *,
    layer: int,
    operations: Operations,
    linears: LoraLinears,
    loras: Sequence[LoraRows],
) -> Tensor:
    """The weighted sum [T, E] of those of the experts `chosen` [T, K], with `routing_weights` [T, K], that are
    `experts`, the first of which is the expert `first` of the layer; of `normed` [T, E]. Sites are named from 0 on."""
    numbers = chosen.reshape(-1) - first
    pairs = ((numbers >= 0) & (numbers < len(experts))).nonzero().reshape(-1)
    pairs = pairs[torch.argsort(numbers[pairs], stable=True)]  # by expert, the rows of each in their own order
    out = torch.zeros(normed.shape, device=normed.device)
    if not len(pairs):
        return out
    rows_of_pairs = pairs // chosen.shape[1]
    rows = normed.index_select(0, rows_of_pairs)
    counts = torch.bincount(numbers[pairs], minlength=len(experts)).tolist()
    starts = torch.tensor([own.start for own in loras], device=pairs.device)
    parts, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            own = slice(start, start + count)
            start += count
            weights, site = experts[expert], expert_site(layer, expert)
            covers = _covers(rows_of_pairs[own], starts, loras)
            wide = linears.multiply(rows[own], weights.gate_up, f"{site}.gate_up", covers)
            inner = SwiGlu.run(with_bias(wide, weights.gate_up_bias, operations), operations)
            narrow = linears.multiply(inner, weights.down, f"{site}.down", covers)
            parts.append(with_bias(narrow, weights.down_bias, operations))
    weighted = torch.cat(parts) * routing_weights.reshape(-1).index_select(0, pairs).unsqueeze(1)
    return out.index_add(0, rows_of_pairs, weighted)


def _covers(rows: Tensor, starts: Tensor, loras: Sequence[LoraRows]) -> list[LoraRows]:
    """The loras of ascending `rows`, as runs of their places."""
    if len(loras) == 1:
        return [LoraRows(0, len(rows), loras[0].weights)]
    edges = [*torch.searchsorted(rows, starts).tolist(), len(rows)]
    runs = zip(edges, edges[1:], loras, strict=False)
    return [LoraRows(start, stop, own.weights) for start, stop, own in runs if start < stop]

"""A mixture of experts on a GPU without gradients: one grouped product over all experts, and no wait for the device.

`MixtureOfExperts` runs two products for each expert, and has to read back how many rows each of them has. Here pairs of
a row and an expert are sorted by expert into a layout of fixed size, in which each expert begins a tile of rows. One
grouped product of torch computes all experts, and the kernels of captured steps add a lora's part, with the expert as
the slot of a tile. The layout is that of vLLM's fused experts (`moe_align_block_size`). With a gradient it is the loop
over experts.

Experts whose gate and up are one layer (GPT-OSS, Qwen3.5-MoE) have one lora part for both. Those of GPT-OSS also have
biases and a clamped SwiGLU. The kernels' SwiGLU takes none of these. There the kernels add the bias and the lora to a
product, and torch computes the activation.

In a captured step, the pairs are sorted by expert and then by lora, so that one pass has all loras of the batch, and
rows of padding go to no expert. Elsewhere, several loras are one pass each.

Letters: T rows · E hidden size · K experts per row · P pairs (T·K) · N experts · M rows of the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.cuda.graph_step import StepContext, StepKernels
from mint.engine.cuda.lora_slots import TILE_ROWS, LoraPart, LoraSlots
from mint.engine.lora import LoraRows, LoraWeights
from mint.engine.model.config import DecoderConfig, ExpertsConfig
from mint.engine.model.linear import DenseMatrix, LoraLinears
from mint.engine.model.mixture_of_experts import MixtureOfExperts, route
from mint.engine.model.operations import Operations
from mint.engine.model.weights import MixtureWeights, MlpWeights, expert_site


@dataclass(frozen=True)
class TiledPairs:
    """The layout of pairs: `places` [T, K] of each pair, `ends` int32 [N] of each expert, and the expert of each place,
    `experts` int32 [M] (-1: none). An expert's rows begin at a multiple of `TILE_ROWS`."""

    places: Tensor
    ends: Tensor
    experts: Tensor


def tile_pairs(chosen: Tensor, count: int) -> TiledPairs:
    """The layout of the experts `chosen` [T, K] out of `count`; its size depends on T, K and `count` alone."""
    pairs, device = chosen.numel(), chosen.device
    order = torch.argsort(chosen.reshape(-1), stable=True)
    owners = chosen.reshape(-1)[order]
    borders = torch.searchsorted(owners, torch.arange(count + 1, device=device))
    tiles = (borders.diff() + TILE_ROWS - 1) // TILE_ROWS
    ends = tiles.cumsum(0) * TILE_ROWS
    shifts = ends - tiles * TILE_ROWS - borders[:-1]
    places = torch.empty_like(order).scatter_(0, order, torch.arange(pairs, device=device) + shifts[owners])
    size = TILE_ROWS * min(pairs, (pairs + count * (TILE_ROWS - 1)) // TILE_ROWS)
    experts = torch.searchsorted(ends, torch.arange(size, device=device), right=True)
    experts = experts.masked_fill(experts == count, -1)
    return TiledPairs(places.view(chosen.shape), ends.int(), experts.int())


@dataclass(frozen=True)
class StepPairs:
    """The layout of pairs that are sorted by expert and then by lora: `places` [T, K], `ends` int32 [N] of each expert,
    and for each place its expert and the slot of its lora, both int32 [M] (-1: none)."""

    places: Tensor
    ends: Tensor
    experts: Tensor
    slots: Tensor


def tile_step_pairs(chosen: Tensor, slots: Tensor, is_padding: Tensor, count: int, loras: int) -> StepPairs:
    """The layout of the experts `chosen` [T, K] out of `count`, of rows with the `slots` int32 [T] of `loras` loras
    (-1: none). Rows that are padding, bool [T], lie behind all experts."""
    kinds = loras + 1
    groups = chosen * kinds + (slots.long() + 1)[:, None]
    groups = groups.masked_fill(is_padding[:, None], count * kinds)
    pairs = tile_pairs(groups, count * kinds + 1)
    nobody = (pairs.experts < 0) | (pairs.experts == count * kinds)
    experts = torch.where(nobody, -1, pairs.experts // kinds)
    own = torch.where(nobody, -1, pairs.experts % kinds - 1)
    return StepPairs(pairs.places, pairs.ends[kinds - 1 : count * kinds : kinds].contiguous(), experts, own)


class GroupedMixtureOfExperts(MixtureOfExperts):
    """`MixtureOfExperts` whose experts are computed together where no gradient is needed."""

    def __init__(
        self,
        operations: Operations,
        kernels: StepKernels,
        weights: MixtureWeights,
        norm: Tensor,
        layer: int,
        config: DecoderConfig,
        mixture: ExpertsConfig,
        loras: LoraLinears,
    ) -> None:
        """`norm` [E]. The experts' matrices become views into one tensor each."""
        super().__init__(operations, weights, norm, layer, config, loras)
        self._kernels = kernels
        self._count = mixture.count
        self._is_joint = _is_joint(config)
        self._gate_up = torch.stack([own.gate_up.dense() for own in weights.experts])
        self._down = torch.stack([own.down.dense() for own in weights.experts])
        self._gate_up_bias = _stack([own.gate_up_bias for own in weights.experts])
        self._down_bias = _stack([own.down_bias for own in weights.experts])
        weights.experts[:] = [
            MlpWeights(operations.matrix(gate_up), operations.matrix(down), own.gate_up_bias, own.down_bias)
            for gate_up, down, own in zip(self._gate_up, self._down, weights.experts, strict=True)
        ]
        operations.release_memory()

    @staticmethod
    def fits(config: DecoderConfig, weights: MixtureWeights) -> bool:
        """Whether the experts are in the base's dtype, of widths that a grouped product takes, and either SwiGLUs
        without biases whose loras have one part for the gate and one for up, or experts whose loras have one part for
        both."""
        first = weights.experts[0]
        if not all(isinstance(own, DenseMatrix) for own in (first.gate_up, first.down)):
            return False
        is_plain = first.gate_up_bias is None and first.down_bias is None and config.family.activation == "silu"
        fits_kernels = is_plain or _is_joint(config)
        return fits_kernels and first.down.inputs % 8 == 0 and first.down.outputs % 8 == 0

    @override
    def run_experts(
        self, normed: Tensor, routing_weights: Tensor, chosen: Tensor, residual: Tensor, loras: Sequence[LoraRows]
    ) -> Tensor:
        if torch.is_grad_enabled():
            return super().run_experts(normed, routing_weights, chosen, residual, loras)
        out = residual.clone()
        for run in loras:
            rows = slice(run.start, min(run.stop, len(normed)))
            if rows.start < rows.stop:
                pairs = tile_pairs(chosen[rows], self._count)
                part = partial(self._part, run.weights, pairs.experts)
                self._add_experts(out[rows], normed[rows], routing_weights[rows], pairs, part)
        return out

    def run_step(self, x: Tensor, rows: StepContext, loras: LoraSlots | None) -> Tensor:
        """See `StepMixture`."""
        normed, _ = self._kernels.norm(x, self._norm, self._eps, torch.float32)
        scores = self._add_bias(self._weights.router.product(normed), self._weights.router_bias)
        routing_weights, chosen = route(scores, self._mixture)
        slots, is_padding = rows.slots, rows.inputs[1] < 0
        if loras is None:
            slots = torch.full_like(slots, -1)
        pairs = tile_step_pairs(chosen, slots, is_padding, self._count, 0 if loras is None else loras.count)
        out = x.clone()
        self._add_experts(out, normed, routing_weights, pairs, partial(self._slots_part, loras, pairs))
        return out

    def _add_experts(
        self,
        out: Tensor,
        normed: Tensor,
        routing_weights: Tensor,
        pairs: TiledPairs | StepPairs,
        part: Callable[[str, Tensor], LoraPart | None],
    ) -> None:
        """Adds the weighted sum of each row's experts to `out` [T, E]; `part` is the loras' of a product."""
        places, dtype = pairs.places, self._gate_up.dtype
        wide = normed.new_zeros(len(pairs.experts), normed.shape[1])
        wide.index_copy_(0, places.reshape(-1), normed.repeat_interleave(places.shape[1], dim=0))
        product = F.grouped_mm(wide.to(dtype), self._gate_up.mT, offs=pairs.ends)
        wide, narrow = self._activate(product, pairs.experts, part("gate_up", wide))
        product = F.grouped_mm(narrow, self._down.mT, offs=pairs.ends)
        found = self._kernels.add(product, _of_places(self._down_bias, pairs.experts, product), part("down", wide))
        for choice in range(places.shape[1]):
            out.add_(found.index_select(0, places[:, choice]).mul_(routing_weights[:, choice : choice + 1]))

    def _activate(self, product: Tensor, experts: Tensor, lora: LoraPart | None) -> tuple[Tensor, Tensor]:
        """The inner values [M, I] of a product [M, 2·I], in float32 and in its dtype."""
        if not self._is_joint:
            return self._kernels.swiglu(product, lora)
        gate_up = self._kernels.add(product, _of_places(self._gate_up_bias, experts, product), lora)
        inner = self._operations.swiglu(gate_up)
        return inner, inner.to(product.dtype)

    def _sites(self, product: str) -> list[str]:
        """The sites of the first two experts, or of the only one."""
        return [f"{expert_site(self._layer, expert)}.{product}" for expert in range(min(2, self._count))]

    def _part(self, lora: LoraWeights | None, experts: Tensor, product: str, x: Tensor) -> LoraPart | None:
        """A lora's part of a product of all experts: their matrices lie equally far from one another."""
        names = self._sites(product)
        if lora is None or names[0] not in lora.sites:
            return None
        first, last = lora.sites[names[0]], lora.sites[names[-1]]
        apart = last.a.storage_offset() - first.a.storage_offset()
        a, b = first.a.detach(), first.bs[0].detach()
        stacked_a = a.as_strided((self._count, *a.shape), (apart, *a.stride()))
        outputs = sum(len(own) for own in first.bs)
        stacked_b = b.as_strided((self._count, outputs, b.shape[1]), (apart, *b.stride()))
        scales = torch.full((self._count,), lora.scale, device=x.device)
        return LoraPart(self._kernels.shrink(x, stacked_a, experts), stacked_b, scales, experts)

    def _slots_part(self, loras: LoraSlots | None, pairs: StepPairs, product: str, x: Tensor) -> LoraPart | None:
        """The part of all loras that are in slots."""
        name = self._sites(product)[0]
        if loras is None or name not in loras.sites:
            return None
        stacked = loras.of_experts(name, self._count)
        numbers = torch.where(pairs.slots < 0, -1, pairs.slots * loras.experts_apart + pairs.experts)
        return LoraPart(self._kernels.shrink(x, stacked.a, numbers), stacked.bs, stacked.scales, numbers)


def _is_joint(config: DecoderConfig) -> bool:
    """Whether an expert's gate and up are one layer, which has one lora part."""
    return config.family.experts is not None and config.family.experts.stacked


def _stack(biases: Sequence[Tensor | None]) -> Tensor | None:
    """All experts' biases [N, O], if they have some."""
    present = [bias for bias in biases if bias is not None]
    return torch.stack(present) if present else None


def _of_places(bias: Tensor | None, experts: Tensor, product: Tensor) -> Tensor:
    """The bias [N, O] of each place's expert, float32 [M, O] as the `product`; zeros without one. Places without an
    expert have any."""
    if bias is None:
        return torch.zeros(product.shape, device=product.device)
    return bias.index_select(0, experts.clamp(min=0))

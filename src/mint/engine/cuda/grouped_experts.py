"""A mixture of experts on a GPU: one grouped product over all experts, and no wait for the device.

`MixtureOfExperts` runs two products for each expert, and has to read back how many rows each of them has. Here pairs of
a row and an expert are sorted by expert into a layout of fixed size, in which each expert begins a tile of rows. One
grouped product of torch computes all experts, and the kernels of captured steps add a lora's part, with the expert as
the slot of a tile. The layout is that of vLLM's fused experts (`moe_align_block_size`).

With a gradient, torch's products of tiles compute the lora, each tile with the matrices of its expert, and the backward
adds the lora's gradient of all experts to where their `grad` is. Such a batch has one lora.

Experts whose gate and up are one layer (GPT-OSS, Qwen3.5-MoE) have one lora part for both. Those of GPT-OSS also have
biases and a clamped SwiGLU. The kernels' SwiGLU takes none of these. There the kernels add the bias and the lora to a
product, and torch computes the activation.

In a captured step, the pairs are sorted by expert and then by lora, so that one pass has all loras of the batch, and
rows of padding go to no expert. Elsewhere, several loras are one pass each.

Letters: T rows · E hidden size · K experts per row · P pairs (T·K) · N experts · M rows of the layout · I inputs and
O outputs of a product · G tiles of S rows · R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.cuda.graph_step import StepContext, StepKernels
from mint.engine.cuda.lora_slots import TILE_ROWS, LoraPart, LoraSlots
from mint.engine.lora import LoraRows, LoraWeights, SiteWeights
from mint.engine.model.autograd import AutogradFunction
from mint.engine.model.config import DecoderConfig, ExpertsConfig
from mint.engine.model.layer_parts import with_bias
from mint.engine.model.linear import DenseMatrix, LoraLinears
from mint.engine.model.mixture_of_experts import MixtureOfExperts, SwiGlu, route
from mint.engine.model.operations import Operations
from mint.engine.model.weights import MixtureWeights, MlpWeights, expert_site

MAX_TRAINED_TILE_ROWS = 128
"""Rows of a tile in training, where there are enough of them: a tile reads its expert's lora once."""


@dataclass(frozen=True)
class TiledPairs:
    """The layout of pairs: `places` [T, K] of each pair, `ends` int32 [N] of each expert, and the expert of each place,
    `experts` int32 [M] (-1: none). An expert's rows begin at a multiple of `TILE_ROWS`."""

    places: Tensor
    ends: Tensor
    experts: Tensor


def tile_pairs(chosen: Tensor, count: int, tile_rows: int = TILE_ROWS) -> TiledPairs:
    """The layout of the experts `chosen` [T, K] out of `count`, in tiles of `tile_rows`; its size depends on T, K and
    `count` alone."""
    pairs, device = chosen.numel(), chosen.device
    order = torch.argsort(chosen.reshape(-1), stable=True)
    owners = chosen.reshape(-1)[order]
    borders = torch.searchsorted(owners, torch.arange(count + 1, device=device))
    tiles = (borders.diff() + tile_rows - 1) // tile_rows
    ends = tiles.cumsum(0) * tile_rows
    shifts = ends - tiles * tile_rows - borders[:-1]
    places = torch.empty_like(order).scatter_(0, order, torch.arange(pairs, device=device) + shifts[owners])
    size = tile_rows * min(pairs, (pairs + count * (tile_rows - 1)) // tile_rows)
    experts = torch.searchsorted(ends, torch.arange(size, device=device), right=True)
    experts = experts.masked_fill(experts == count, -1)
    return TiledPairs(places.view(chosen.shape), ends.int(), experts.int())


def trained_tile_rows(pairs: int, count: int) -> int:
    """Rows of a tile, a power of two: `count` experts add at most a quarter of the `pairs`, where these are many."""
    rows = min(MAX_TRAINED_TILE_ROWS, max(TILE_ROWS, pairs // (4 * count)))
    return 1 << (rows.bit_length() - 1)


@dataclass(frozen=True)
class StackedLora:
    """A trained lora of all experts at one site: views of its weights, `a` [N, R, I] and `b` [N, O, R of a
    part], and of their gradients; the ranks and outputs of each part; one of its matrices, as autograd knows it."""

    a: Tensor
    b: Tensor
    a_gradient: Tensor
    b_gradient: Tensor
    parts: Sequence[tuple[slice, slice]]
    scale: float
    tracked: Tensor


@dataclass(frozen=True)
class ExpertsProduct:
    """One product of all experts, with a gradient: frozen matrices [N, O, I], perhaps biases [N, O], and a lora.

    Rows are in the layout of `pairs`, whose tiles the last expert continues to its end, so that all results
    are defined.
    """

    matrices: Tensor
    biases: Tensor | None
    lora: StackedLora | None
    ends: Tensor  # int32 [N]
    experts: Tensor  # of each tile, int64 [G]

    def product(self, x: Tensor) -> Tensor:
        """Float32 [M, O] of x [M, I]."""
        out = F.grouped_mm(x.to(self.matrices.dtype), self.matrices.mT, offs=self.ends).float()
        tiles = self._tiled(out)
        if self.biases is not None:
            tiles += self.biases[self.experts][:, None]
        if self.lora is not None:
            down = torch.bmm(self._tiled(x), self.lora.a[self.experts].mT)
            b = self.lora.b[self.experts]
            for columns, own in self.lora.parts:
                tiles[:, :, own].baddbmm_(down[:, :, columns], b[:, own].mT, alpha=self.lora.scale)
        return out

    def gradient(self, grad: Tensor, x: Tensor, *, for_input: bool) -> Tensor | None:
        """From grad [M, O] the gradient for x [M, I], if asked for. The lora's is added to `a_gradient` and
        `b_gradient`."""
        grad_x = None
        if for_input:
            grad_x = F.grouped_mm(grad.to(self.matrices.dtype), self.matrices, offs=self.ends).float()
        if self.lora is not None:
            self._add_lora_gradient(self.lora, self._tiled(grad), self._tiled(x), grad_x)
        return grad_x

    def _add_lora_gradient(self, lora: StackedLora, grad: Tensor, x: Tensor, grad_x: Tensor | None) -> None:
        """`grad` [G, S, O] and x [G, S, I]."""
        a, b = lora.a[self.experts], lora.b[self.experts]
        down = torch.bmm(x, a.mT)
        grad_down = torch.empty_like(down)
        for columns, own in lora.parts:
            part = grad[:, :, own]
            grad_down[:, :, columns] = torch.bmm(part, b[:, own]).mul_(lora.scale)
            lora.b_gradient[:, own] += self._sum(torch.bmm(part.mT, down[:, :, columns])).mul_(lora.scale)
        lora.a_gradient.add_(self._sum(torch.bmm(grad_down.mT, x)))
        if grad_x is not None:
            self._tiled(grad_x).baddbmm_(grad_down, a)

    def _sum(self, tiles: Tensor) -> Tensor:
        """Adds up the tiles of each expert, in one order: [N, ...] of [G, ...]."""
        numbers = torch.arange(len(self.matrices), device=tiles.device)
        is_own = (numbers[:, None] == self.experts).to(tiles.dtype)
        return is_own.mm(tiles.flatten(1)).view(len(numbers), *tiles.shape[1:])

    def _tiled(self, x: Tensor) -> Tensor:
        """[G, S, width] of [M, width]."""
        return x.view(len(self.experts), -1, x.shape[1])


class _Multiply(AutogradFunction):
    """`product.product`. The lora's gradient is not autograd's: an expert's matrices would be a leaf each."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, product: ExpertsProduct, *tracked: Tensor) -> Tensor:
        """Float32 [M, O] from x [M, I]; a matrix of the lora is `tracked`, so that the backward runs."""
        ctx.save_for_backward(x)
        ctx.product = product
        return product.product(x)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for x."""
        (x,) = ctx.saved_tensors
        grad_x = ctx.product.gradient(grad.contiguous(), x, for_input=ctx.needs_input_grad[0])
        return grad_x, *(None,) * (len(ctx.needs_input_grad) - 1)


class _Spread(AutogradFunction):
    """Copies rows [T, E] to the places [T, K] of their pairs, [size, E]; other places are zero. The gradients
    of a row's pairs are added in one order."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, places: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(places)
        pairs = x.repeat_interleave(places.shape[1], dim=0)
        return x.new_zeros(size, x.shape[1]).index_copy_(0, places.reshape(-1), pairs)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        total = grad.index_select(0, places[:, 0])
        for choice in range(1, places.shape[1]):
            total.add_(grad.index_select(0, places[:, choice]))
        return total, None, None


class _Collect(AutogradFunction):
    """`residual` [T, E] plus the pairs of each row, at `places` [T, K] of `wide` [M, E], times their routing
    weights."""

    @staticmethod
    @override
    def forward(ctx: Any, wide: Tensor, routing_weights: Tensor, residual: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(wide, routing_weights, places)
        out = residual.clone()
        for choice in range(places.shape[1]):
            out.add_(wide.index_select(0, places[:, choice]).mul_(routing_weights[:, choice : choice + 1]))
        return out

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for wide, routing weights and residual."""
        wide, routing_weights, places = ctx.saved_tensors
        grad_wide = torch.zeros_like(wide)
        grad_weights = torch.empty_like(routing_weights)
        for choice in range(places.shape[1]):
            own = places[:, choice]
            torch.sum(wide.index_select(0, own).mul_(grad), -1, out=grad_weights[:, choice])
            grad_wide.index_copy_(0, own, grad * routing_weights[:, choice : choice + 1])
        return grad_wide, grad_weights, grad, None


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
    """`MixtureOfExperts` whose experts are computed together."""

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
            return self._run_trained(normed, routing_weights, chosen, residual, loras[0].weights)
        out = residual.clone()
        for run in loras:
            rows = slice(run.start, min(run.stop, len(normed)))
            if rows.start < rows.stop:
                pairs = tile_pairs(chosen[rows], self._count)
                part = partial(self._part, run.weights, pairs.experts)
                self._add_experts(out[rows], normed[rows], routing_weights[rows], pairs, part)
        return out

    def _run_trained(
        self, normed: Tensor, routing_weights: Tensor, chosen: Tensor, residual: Tensor, lora: LoraWeights | None
    ) -> Tensor:
        """`run_experts` with a gradient; all rows have this lora."""
        tile_rows = trained_tile_rows(chosen.numel(), self._count)
        pairs = tile_pairs(chosen, self._count, tile_rows)
        size = len(pairs.experts)
        pairs.ends[-1:] = size
        experts = pairs.experts[::tile_rows].long()
        experts = experts.masked_fill(experts < 0, self._count - 1)

        def multiply(x: Tensor, name: str, matrices: Tensor, biases: Tensor | None) -> Tensor:
            own = self._stacked(lora, name)
            product = ExpertsProduct(matrices, biases, own, pairs.ends, experts)
            return _Multiply.run(x, product, *(() if own is None else (own.tracked,)))

        wide = _Spread.run(normed, pairs.places, size)
        inner = SwiGlu.run(multiply(wide, "gate_up", self._gate_up, self._gate_up_bias), self._operations)
        found = multiply(inner, "down", self._down, self._down_bias)
        return _Collect.run(found, routing_weights, residual, pairs.places)

    def run_step(self, x: Tensor, rows: StepContext, loras: LoraSlots | None) -> Tensor:
        """See `StepMixture`."""
        normed, _ = self._kernels.norm(x, self._norm, self._eps, torch.float32)
        scores = with_bias(self._weights.router.product(normed), self._weights.router_bias, self._operations)
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
        stacked_a, stacked_b = self._stack_lora(lora.sites[names[0]], lora.sites[names[-1]])
        scales = torch.full((self._count,), lora.scale, device=x.device)
        return LoraPart(self._kernels.shrink(x, stacked_a, experts), stacked_b, scales, experts)

    def _stack_lora(self, first: SiteWeights, last: SiteWeights) -> tuple[Tensor, Tensor]:
        """Views [N, R, I] and [N, O, R of a part] of the matrices of all experts, of which the first and another one,
        or the only one, are given."""
        apart = last.a.storage_offset() - first.a.storage_offset()
        a, b = first.a.detach(), first.bs[0].detach()
        outputs = sum(len(own) for own in first.bs)
        stacked_a = a.as_strided((self._count, *a.shape), (apart, *a.stride()))
        return stacked_a, b.as_strided((self._count, outputs, b.shape[1]), (apart, *b.stride()))

    def _stacked(self, lora: LoraWeights | None, product: str) -> StackedLora | None:
        """A lora with its gradient, if it trains the experts."""
        names = self._sites(product)
        if lora is None or names[0] not in lora.sites:
            return None
        first, last = lora.sites[names[0]], lora.sites[names[-1]]
        weights = self._stack_lora(first, last)
        gradients = self._stack_lora(_gradient_of(first), _gradient_of(last))
        parts = [(columns, own) for columns, own, _ in first.parts()]
        return StackedLora(*weights, *gradients, parts, lora.scale, first.a)

    def _slots_part(self, loras: LoraSlots | None, pairs: StepPairs, product: str, x: Tensor) -> LoraPart | None:
        """The part of all loras that are in slots."""
        name = self._sites(product)[0]
        if loras is None or name not in loras.sites:
            return None
        stacked = loras.of_experts(name, self._count)
        numbers = torch.where(pairs.slots < 0, -1, pairs.slots * loras.experts_apart + pairs.experts)
        return LoraPart(self._kernels.shrink(x, stacked.a, numbers), stacked.bs, stacked.scales, numbers)


def _gradient_of(site: SiteWeights) -> SiteWeights:
    """Where the gradients of its matrices are added up (`LoraWeights.enable_gradient`)."""
    found = [own.grad for own in (site.a, *site.bs) if own.grad is not None]
    if len(found) <= len(site.bs):
        raise ValueError("the gradient of this lora is not enabled")
    return SiteWeights(found[0], tuple(found[1:]))


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

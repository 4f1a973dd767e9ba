"""The operations of a captured step in plain torch: what Triton's kernels are compared with, and what stands for them
where there is no Triton. Nothing here reads a number back from the device."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.cuda.graph_step import FIRST_PAGE, StepContext
from mint.engine.cuda.lora_slots import LoraPart
from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.model.weights import AttentionWeights


class PlainKernels:
    """`StepKernels` of torch's own operations, on any device; sums in `wide`."""

    def __init__(self, wide: torch.dtype = torch.float32) -> None:
        self.wide = wide

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        own = x.to(self.wide)
        out = own * (own.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
        return out, out.to(dtype)

    def shrink(self, x: Tensor, a: Tensor, slots: Tensor) -> Tensor:
        own = a.to(self.wide)[slots.clamp(min=0)]
        return torch.where(slots[:, None] >= 0, torch.einsum("ti,tri->tr", x.to(self.wide), own), 0.0)[None]

    def heads(
        self,
        product: Tensor,
        lora: LoraPart | None,
        weights: AttentionWeights,
        rows: StepContext,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        count, rotated = len(product), rows.query_heads + rows.kv_heads
        heads = product.to(self.wide)
        if lora is not None:
            sizes = [rows.query_heads * rows.head_dim, *[rows.kv_heads * rows.head_dim] * 2]
            heads = heads + self._lora(lora, sizes)
        if weights.qkv_bias is not None:
            heads = heads + weights.qkv_bias
        heads = heads.view(count, -1, rows.head_dim)
        turned = heads[:, :rotated]
        if weights.head_norms is not None:
            turned = turned * (turned.square().mean(-1, keepdim=True) + rows.eps).rsqrt() * weights.head_norms
        positions = rows.inputs[1]
        cos, sin = (table[positions.clamp(min=0)][:, None] for table in (rows.cos, rows.sin))
        first, second = turned.chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        for plane, own in ((keys, turned[:, rows.query_heads :]), (values, heads[:, rotated:])):
            self._write(plane, own.to(plane.dtype), rows)
        return turned[:, : rows.query_heads].to(product.dtype)

    def attend(self, queries: Tensor, rows: StepContext, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        table, positions = rows.inputs[FIRST_PAGE:].T, rows.inputs[1]
        key, value = (self._read(plane, table, rows) for plane in (keys, values))
        groups = rows.query_heads // rows.kv_heads
        query = queries.to(self.wide).unflatten(1, (rows.kv_heads, groups))
        scores = torch.einsum("tkgd,tkwd->tkgw", query, key) / math.sqrt(rows.head_dim)
        hidden = torch.arange(key.shape[2], device=queries.device) > positions.clamp(min=0)[:, None]
        shares = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
        mixed = torch.einsum("tkgw,tkwd->tkgd", shares, value).flatten(1).to(queries.dtype)
        return mixed.to(self.wide), mixed

    def swiglu(self, product: Tensor, lora: LoraPart | None) -> tuple[Tensor, Tensor]:
        wide = product.to(self.wide)
        if lora is not None:
            wide = wide + self._lora(lora, [wide.shape[1] // 2] * 2)
        gate, up = wide.chunk(2, -1)
        out = F.silu(gate) * up
        return out, out.to(product.dtype)

    def add(self, product: Tensor, residual: Tensor, lora: LoraPart | None) -> Tensor:
        out = residual + product.to(self.wide)
        return out if lora is None else out + self._lora(lora, [out.shape[1]])

    def _lora(self, lora: LoraPart, outputs: list[int]) -> Tensor:
        slots = lora.slots.clamp(min=0)
        downs = lora.down.to(self.wide).sum(0).chunk(len(outputs), -1)
        bs = lora.bs.to(self.wide)[slots].split(outputs, dim=1)
        found = torch.cat([torch.einsum("tr,tor->to", down, b) for down, b in zip(downs, bs, strict=True)], -1)
        return torch.where(lora.slots[:, None] >= 0, lora.scales.to(self.wide)[slots, None] * found, 0.0)

    def _write(self, plane: Tensor, own: Tensor, rows: StepContext) -> None:
        """`own` [T, K, D] into plane [N, K/J, PAGE_POSITIONS, J·D]; padding rows write what the first row writes."""
        positions = rows.inputs[1].long()
        pages = rows.inputs[FIRST_PAGE:].gather(0, (positions.clamp(min=0) // PAGE_POSITIONS)[None])[0].long()
        real = (positions >= 0)[:, None]
        parts = pages[:, None] * plane.shape[1] + torch.arange(plane.shape[1], device=plane.device)
        places = parts * PAGE_POSITIONS + positions[:, None] % PAGE_POSITIONS
        new = own.reshape(len(own), plane.shape[1], -1)
        places = torch.where(real, places, places[:1])
        new = torch.where(real[..., None], new, new[:1])
        plane.view(-1, plane.shape[-1]).index_copy_(0, places.reshape(-1), new.flatten(0, 1))

    def _read(self, plane: Tensor, table: Tensor, rows: StepContext) -> Tensor:
        """[T, K, W, D] of the pages `table` [T, C]."""
        own = plane[table.long()].to(self.wide)  # [T, C, K/J, PAGE_POSITIONS, J·D]
        own = own.unflatten(-1, (rows.side_by_side, rows.head_dim)).permute(0, 2, 4, 1, 3, 5)
        return own.reshape(len(table), rows.kv_heads, -1, rows.head_dim)

"""Attention by the native kernels: of packed rows, with its gradient, and of one new token per sequence.

On a CPU with kernels they replace `model/packed_attention` and `sampling/decode_attention`. Both compute query by query
in one kernel, so a row's bits are the same in training, prefill and decoding.

Letters: T rows · R rows of one token each · C pages of a row · H heads (K·G query, K key, K value) · D head dimension.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.cpu.kernels import NativeKernels
from mint.engine.cpu.threads import Int64, Split
from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.model.autograd import AutogradFunction
from mint.engine.model.config import NO_WINDOWS, Windows
from mint.engine.packing import AttentionBlock
from mint.engine.sampling.kv_cache import KVCache


class PackedRows(ctypes.Structure):
    """`Packed` in lanes.h; keeps the arrays that it points to."""

    _fields_ = (
        ("rows", Int64),
        ("total_heads", Int64),
        ("query_heads", Int64),
        ("kv_heads", Int64),
        ("longest", Int64),
        ("row", ctypes.c_void_p),
        ("prefix", ctypes.c_void_p),
        ("prefix_count", ctypes.c_void_p),
        ("own", ctypes.c_void_p),
    )

    def __init__(
        self, query_heads: int, kv_heads: int, row: np.ndarray, prefix: np.ndarray, count: np.ndarray, own: np.ndarray
    ) -> None:
        """Row `row[r]` attends to `count[r]` rows from `prefix[r]` on, and from `own[r]` to itself; int64 [rows]."""
        self.arrays = np.array([row, prefix, count, own], np.int64)
        super().__init__(
            rows=len(row),
            total_heads=query_heads + 2 * kv_heads,
            query_heads=query_heads,
            kv_heads=kv_heads,
            longest=int((count + row - own + 1).max(initial=1)),
            row=self.arrays[0].ctypes.data,
            prefix=self.arrays[1].ctypes.data,
            prefix_count=self.arrays[2].ctypes.data,
            own=self.arrays[3].ctypes.data,
        )


class DecodedRows(ctypes.Structure):
    """`Decode` in attention.c; reads the arrays that it points to at every call, and keeps them."""

    _fields_ = (
        ("rows", Int64),
        ("total_heads", Int64),
        ("query_heads", Int64),
        ("kv_heads", Int64),
        ("side", Int64),
        ("chunk", Int64),
        ("columns", Int64),
        ("longest", Int64),
        ("table", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
    )

    def __init__(
        self, query_heads: int, kv_heads: int, side: int, chunk: int, table: np.ndarray, positions: np.ndarray
    ) -> None:
        """Row r is the token at `positions[r]` of a sequence in the pages `table[r]`, each of `chunk` keys with `side`
        kv heads side by side; int64 [rows, columns] and [rows]."""
        self.arrays = np.ascontiguousarray(table, np.int64), np.ascontiguousarray(positions, np.int64)
        super().__init__(
            rows=len(positions),
            total_heads=query_heads + 2 * kv_heads,
            query_heads=query_heads,
            kv_heads=kv_heads,
            side=side,
            chunk=chunk,
            columns=table.shape[1],
            longest=int(positions.max(initial=0)) + 1,
            table=self.arrays[0].ctypes.data,
            positions=self.arrays[1].ctypes.data,
        )


class NativePackedAttention:
    """Causal attention of packed rows; callable as the decoder's `Attention`."""

    def __init__(
        self,
        kernels: NativeKernels,
        blocks: Sequence[AttentionBlock],
        query_heads: int,
        kv_heads: int,
        windows: Windows = NO_WINDOWS,
    ) -> None:
        """The rows of `blocks`; results come in their order."""
        self.kernels = kernels
        self._windows = windows
        described = np.concatenate(list(map(_describe, blocks)), axis=1)
        self.rows = PackedRows(query_heads, kv_heads, *described[:, np.argsort(described[0])])

    def __call__(self, layer: int, heads: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attended values [rows, K·G·D] of `heads` [T, H, D], in float32 where there is no gradient; `sinks` [K·G]."""
        return _Attend.run(heads, self, self._windows.get(layer, 0), sinks)


class _Attend(AutogradFunction):
    """softmax(q·k / √D) · v over each row's own keys, or the last `window` of them."""

    @classmethod
    @override
    def infer(cls, heads: Tensor, plan: NativePackedAttention, window: int, sinks: Tensor | None) -> Tensor:
        return widen(plan.kernels, attend_packed(plan.kernels, plan.rows, heads.contiguous(), window, sinks))

    @staticmethod
    @override
    def forward(ctx: Any, heads: Tensor, plan: NativePackedAttention, window: int, sinks: Tensor | None) -> Tensor:
        """[rows, K·G·D] from heads [T, H, D]."""
        heads = heads.contiguous()
        ctx.save_for_backward(heads)
        ctx.plan, ctx.window, ctx.sinks = plan, window, sinks
        return attend_packed(plan.kernels, plan.rows, heads, window, sinks)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for heads."""
        (heads,) = ctx.saved_tensors
        grad = grad.to(heads.dtype).contiguous()
        grads = attend_packed_backward(ctx.plan.kernels, ctx.plan.rows, heads, grad, ctx.window, ctx.sinks)
        return grads, None, None, None


class NativeDecodeAttention:
    """`StepAttention` for rows that stay the same, each within its pages.

    Table and positions are read where they lie at every call, so they may change under a recorded step.
    """

    def __init__(self, kernels: NativeKernels, cache: KVCache, table: np.ndarray, positions: np.ndarray) -> None:
        """Row r is at `positions[r]` in the pages `table[r]`, in order; int64 [R, C] and [R], contiguous."""
        self._kernels = kernels
        self._cache = cache
        self._table = table
        self._positions = positions
        self._columns = positions // PAGE_POSITIONS
        self._rows = DecodedRows(
            cache.query_heads, cache.kv_heads, cache.side_by_side, PAGE_POSITIONS, table, positions
        )

    def fits(self, positions: np.ndarray) -> bool:
        """Whether rows at these positions are still within their pages."""
        return bool((positions // PAGE_POSITIONS == self._columns).all())

    def begin_step(self, positions: np.ndarray) -> None:
        """The next token of each row is at `positions` [R]."""
        self._positions[:] = positions
        self.reserve(int(positions.max()) + 1)

    def reserve(self, keys: int) -> None:
        """Prepares for rows of up to so many keys."""
        self._rows.longest = keys

    def __call__(self, layer: int, heads: Tensor, sinks: Tensor | None) -> Tensor:
        """Attended values [R, K·G·D] in float32 of `heads` [R, H, D], whose keys and values are stored; `sinks`
        [K·G]."""
        heads = heads.contiguous()
        store(self._kernels, self._cache, layer, heads, self._table, self._positions)
        window = self._cache.windows.get(layer, 0)
        planes = self._cache.planes(layer)
        return widen(self._kernels, attend_pages(self._kernels, self._rows, heads, *planes, window, sinks))


def attend_packed(
    kernels: NativeKernels, rows: PackedRows, heads: Tensor, window: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """Attended values [rows, K·G·D] of heads [T, H, D], both in one dtype. Here as below, a row sees the last `window`
    of its keys, 0: all of them; and `sinks` [K·G] in float32 take part in the softmax, if given."""
    out = heads.new_empty(rows.rows, rows.query_heads * heads.shape[2])
    kernels.libraries["attention"].attend_packed(
        rows.rows,
        rows.rows * rows.longest * rows.query_heads,
        rows=rows,
        dim=heads.shape[2],
        half=heads.dtype == torch.bfloat16,
        window=window,
        sinks=sinks,
        heads=heads,
        out=out,
    )
    return out


def attend_packed_backward(
    kernels: NativeKernels,
    rows: PackedRows,
    heads: Tensor,
    grad: Tensor,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The gradient for heads [T, H, D] from grad [rows, K·G·D], all in one dtype."""
    grads = torch.empty_like(heads) if rows.rows == len(heads) else torch.zeros_like(heads)
    # Split by kv head, not by row: many rows add to the gradient of one key, and always in the same order.
    kernels.libraries["attention_backward"].attend_packed_backward(
        rows.kv_heads,
        rows.rows * rows.longest * rows.query_heads,
        Split.ONE_BY_ONE,
        rows=rows,
        count=len(heads),
        dim=heads.shape[2],
        half=heads.dtype == torch.bfloat16,
        window=window,
        sinks=sinks,
        heads=heads,
        grad_out=grad,
        grads=grads,
    )
    return grads


def attend_pages(
    kernels: NativeKernels,
    rows: DecodedRows,
    heads: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attended values [rows, K·G·D] of heads [rows, H, D] over `keys` and `values` in pages."""
    out = heads.new_empty(len(heads), rows.query_heads * heads.shape[2])
    kernels.libraries["attention"].attend_pages(
        rows.rows,
        rows.rows * rows.longest * rows.query_heads,
        rows=rows,
        dim=heads.shape[2],
        half=heads.dtype == torch.bfloat16,
        window=window,
        sinks=sinks,
        heads=heads,
        keys=keys,
        values=values,
        out=out,
    )
    return out


def store(
    kernels: NativeKernels, cache: KVCache, layer: int, heads: Tensor, table: np.ndarray, positions: np.ndarray
) -> None:
    """Stores the key and value heads of heads [R, H, D] at `positions` int64 [R] of the rows' pages, int64 [R, C]."""
    keys, values = cache.planes(layer)
    kernels.libraries["row_copies"].write_pages(
        len(heads),
        heads.numel(),
        table=table,
        positions=positions,
        columns=table.shape[1],
        chunk=PAGE_POSITIONS,
        query_heads=cache.query_heads,
        kv_heads=cache.kv_heads,
        side=cache.side_by_side,
        bytes=heads.shape[2] * heads.element_size(),
        heads=heads,
        keys=keys,
        values=values,
    )


def widen(kernels: NativeKernels, x: Tensor) -> Tensor:
    """x [T, E] in float32; E is a multiple of 16."""
    if x.dtype == torch.float32:
        return x
    out = torch.empty(x.shape)
    kernels.libraries["row_copies"].widen_rows(len(x), x.numel(), x=x, width=x.shape[1], out=out)
    return out


def _describe(block: AttentionBlock) -> np.ndarray:
    """For each row with a result: the row, the first row of its prefix, the prefix's length, the first row of its span;
    [4, rows]."""
    span = block.cells // block.queries.shape[1]
    first = block.queries[span, 0]
    prefix = block.keys[span, 0] if block.offset else np.zeros_like(first)
    return np.stack([block.rows, prefix, np.full_like(first, block.offset), first])

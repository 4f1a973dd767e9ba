"""Attention by the native kernels: of packed rows, with its gradient, and of one new token per sequence.

Stands where `packed_attention` and `decode_attention` stand, on a CPU, where the kernels are wanted. Both go through
one kernel, query by query, so a row's bits are the same in training, prefill and decoding. Knows nothing of layers.

Letters: T rows · R rows of one token each · C cells of a row · H heads (K·G query, K key, K value) · D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.cpu.kernels import DecodedRows, NativeKernels, PackedRows
from mint.engine.model.attention import CHUNK
from mint.engine.model.functions import run
from mint.engine.packing import AttentionBlock
from mint.engine.sampling.kv_cache import KvCells


class NativePackedAttention:
    """Causal attention of packed rows; callable as the decoder's `Attention`."""

    def __init__(
        self, kernels: NativeKernels, blocks: Sequence[AttentionBlock], query_heads: int, kv_heads: int
    ) -> None:
        """The rows of `blocks`; results come in their order."""
        self.kernels = kernels
        described = np.concatenate([_describe(block) for block in blocks], axis=1)
        self.rows = PackedRows(query_heads, kv_heads, *described[:, np.argsort(described[0])])

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """Attended values [rows, K·G·D] of `heads` [T, H, D]; every layer attends alike."""
        return run(_Attend, heads, self)


class _Attend(torch.autograd.Function):
    """softmax(q·k / √D) · v over each row's own keys."""

    @staticmethod
    @override
    def forward(ctx: Any, heads: Tensor, plan: NativePackedAttention) -> Tensor:
        """[rows, K·G·D] from heads [T, H, D]."""
        heads = heads.contiguous()
        out = heads.new_empty(plan.rows.rows, plan.rows.query_heads * heads.shape[2])
        plan.kernels.attend_packed(plan.rows, heads, out)
        ctx.save_for_backward(heads)
        ctx.plan = plan
        return out

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for heads."""
        (heads,) = ctx.saved_tensors
        grads = torch.zeros(heads.shape)
        ctx.plan.kernels.attend_packed_backward(ctx.plan.rows, heads, grad.to(heads.dtype).contiguous(), grads)
        return grads.to(heads.dtype), None


class NativeDecodeAttention:
    """The decoder's `Attention` for rows that stay the same, and within their cells; `begin_step` before each step."""

    def __init__(self, kernels: NativeKernels, cells: KvCells, table: np.ndarray, positions: np.ndarray) -> None:
        """`table` [R, C] has the cells of each row in order."""
        self._kernels, self._cells, self._table = kernels, cells, table
        self._columns = positions // CHUNK
        self.begin_step(positions)

    def fits(self, positions: np.ndarray) -> bool:
        """Whether rows at these positions are still within their cells."""
        return bool((positions // CHUNK == self._columns).all())

    def begin_step(self, positions: np.ndarray) -> None:
        """The next token of each row is at `positions` [R]."""
        cells = self._cells
        self._places = cells.places(self._table[np.arange(len(positions)), self._columns], positions)
        heads = (cells.query_heads, cells.kv_heads)
        self._rows = DecodedRows(*heads, cells.side_by_side, CHUNK, self._table, positions)

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """Attended values [R, K·G·D] of `heads` [R, H, D], whose keys and values are stored."""
        heads = heads.contiguous()
        self._cells.write(layer, heads, self._places)
        out = heads.new_empty(len(heads), self._cells.query_heads * heads.shape[2])
        self._kernels.attend_cells(self._rows, heads, *self._cells.planes(layer), out)
        return out


def _describe(block: AttentionBlock) -> np.ndarray:
    """Of each row with a result: itself, the first row of its prefix, how many, the first of its span; [4, rows]."""
    span = block.cells // block.queries.shape[1]
    first = block.queries[span, 0]
    prefix = block.keys[span, 0] if block.offset else np.zeros_like(first)
    return np.stack([block.rows, prefix, np.full_like(first, block.offset), first])

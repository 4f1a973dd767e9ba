"""Products and attention that give a row the same bits in any batch, as Triton kernels.

A library chooses its kernel by the number of rows, and may split a sum over the inputs among programs. Both change the
order of addition. Here the tiles are fixed, one program adds up all inputs of an entry in order, and one program adds
up all keys of a row in blocks that are counted from the first position of its own sequence. The design is that of
`batch_invariant_ops` (Thinking Machines Lab 2025) and of torchtitan's `rl/batch_invariance.py`. Needs Triton, as
`cuda/kernels.py` does.

Letters: T rows · I inputs · O outputs · H = Q + 2·K heads · Q query heads · K kv heads · D head dimension.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.cuda.kernels import TritonKernels

ROWS_AT_ONCE, COLUMNS_AT_ONCE, INPUTS_AT_ONCE = 64, 128, 64
"""The tile of a product, for any number of rows."""

KEYS_AT_ONCE = 64


class InvariantKernels(TritonKernels):
    """`RowKernels`, and `StepKernels` with these products."""

    @override
    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.product(x, weight, x.dtype)

    def product(self, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """`x @ weight.T` [T, O] in `dtype`, summed in float32; x [T, I] and weight [O, I] have one dtype."""
        x = x.contiguous()
        count, inner = x.shape
        outputs = len(weight)
        out = torch.empty(count, outputs, dtype=dtype, device=x.device)
        _product[(triton.cdiv(outputs, COLUMNS_AT_ONCE), triton.cdiv(count, ROWS_AT_ONCE))](
            x=x,
            weight=weight,
            out=out,
            count=count,
            inner=inner,
            outputs=outputs,
            weight_row=weight.stride(0),
            weight_column=weight.stride(1),
            ROWS=ROWS_AT_ONCE,
            COLUMNS=COLUMNS_AT_ONCE,
            INPUTS=INPUTS_AT_ONCE,
        )
        return out

    def attend_packed(self, heads: Tensor, seen: Tensor, results: slice, query_heads: int) -> Tensor:
        """Attended values [rows of `results`, Q·D] of heads [T, H, D]. Row q sees the rows `seen[1, q]`..`seen[2, q]`
        - 1 and then `seen[0, q]`..q; `seen` is int32 [3, T]."""
        heads = heads.contiguous()
        _, total, dim = heads.shape
        kv_heads = (total - query_heads) // 2
        groups = query_heads // kv_heads
        count = results.stop - results.start
        out = heads.new_empty(count, query_heads * dim)
        _attend_packed[(count, kv_heads)](
            heads=heads,
            seen=seen,
            out=out,
            first_result=results.start,
            scale=1 / math.sqrt(dim),
            stride=seen.stride(0),
            QUERY_HEADS=query_heads,
            KV_HEADS=kv_heads,
            GROUPS=groups,
            DIM=dim,
            QUERIES=max(16, triton.next_power_of_2(groups)),
            WIDTH=max(16, triton.next_power_of_2(dim)),
            KEYS=KEYS_AT_ONCE,
        )
        return out


@triton.jit
def _product(
    x,
    weight,
    out,
    count,
    inner,
    outputs,
    weight_row,
    weight_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    columns = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    real, within = rows < count, columns < outputs
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, inner, INPUTS):
        inputs = start + tl.arange(0, INPUTS)
        known = inputs < inner
        left = tl.load(x + rows[:, None] * inner + inputs[None, :], mask=real[:, None] & known[None, :], other=0.0)
        right = tl.load(
            weight + columns[None, :] * weight_row + inputs[:, None] * weight_column,
            mask=within[None, :] & known[:, None],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    place = rows[:, None] * outputs + columns[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=real[:, None] & within[None, :])


@triton.jit
def _attend_packed(
    heads,
    seen,
    out,
    first_result,
    scale,
    stride,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One row's queries of one kv head over all of its keys, scaled by the largest score so far."""
    row, kv = tl.program_id(0) + first_result, tl.program_id(1)
    own, first = tl.load(seen + row), tl.load(seen + stride + row)
    prefix = tl.load(seen + 2 * stride + row) - first
    length = prefix + row - own + 1
    width = (QUERY_HEADS + 2 * KV_HEADS) * DIM
    group, dims = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    within = (dims < DIM)[None, :]
    mask = (group < GROUPS)[:, None] & within
    inside = (kv * GROUPS + group)[:, None] * DIM + dims[None, :]
    query = tl.load(heads + row.to(tl.int64) * width + inside, mask=mask, other=0.0)
    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    start = 0
    while start < length:
        position = start + tl.arange(0, KEYS)
        visible = position < length
        source = tl.where(position < prefix, first + position, own + position - prefix).to(tl.int64)
        place = source[:, None] * width + (QUERY_HEADS + kv) * DIM + dims[None, :]
        loaded = visible[:, None] & within
        key = tl.load(heads + place, mask=loaded, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(visible[None, :], scores, -float("inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrunk = tl.exp(largest - higher)
        value = tl.load(heads + place + KV_HEADS * DIM, mask=loaded, other=0.0)
        mixed = mixed * shrunk[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * shrunk + tl.sum(weights, 1)
        largest = higher
        start += KEYS
    place = tl.program_id(0).to(tl.int64) * (QUERY_HEADS * DIM) + inside
    tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=mask)

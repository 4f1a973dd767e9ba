"""The operations of a decoding step between its products, as Triton kernels: `StepKernels` on a GPU.

Needs Triton, which CUDA builds of torch bring with them. This module, `fused_passes` and `invariant_kernels` alone
import it, and they are imported only where a GPU is used. Every kernel treats each row alone and adds in an order that
follows from the row: the number of rows, of padding rows and of splits changes no bit. Tested without a GPU: against
float64 by Triton's interpreter, which has no products of bfloat16 and was given float16 instead, and by compiling for
an H100. On one, they passed the self-check in bfloat16.

Letters: T rows · E hidden size · H all heads · Q query heads · K kv heads · G query heads per kv head · J kv heads side
by side · D head dimension · I inner width · O outputs · L slots of loras · S lora parts of one product · r rank · C
pages of a row · N parts of the inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from mint.engine.cuda.graph_step import FIRST_PAGE, SPLIT_PAGES, StepContext
from mint.engine.cuda.lora_slots import TILE_ROWS, LoraPart
from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.model.weights import AttentionWeights

ROWS_AT_ONCE, COLUMNS_AT_ONCE = TILE_ROWS, 64
"""Entries of a product that one program computes. Products within kernels need at least 16 rows, and the rows of a
program have one lora."""

RANKS_AT_ONCE, INPUTS_AT_ONCE = 16, 64
"""Those of the first half of a lora's product, and the inputs that it adds at a time."""

INPUTS_OF_PART, MAX_PARTS = 256, 8
"""The first half has few results and many inputs: programs share the inputs, at least so many each and in at most so
many parts, and the second half adds up their sums."""

RANKS_ADDED = 64
"""Ranks that the second half adds at a time: the memory of a program does not grow with the rank."""

PRECISION = "tf32x3" if torch.version.hip is None else "ieee"
"""How Triton multiplies the float32 factors of a lora. With "tf32x3" it adds three products in TF32, which are nearly
as accurate as one in float32. The matrix units of NVIDIA's GPUs compute them from Ampere on. AMD's GPUs lack this
mode."""


class TritonKernels:
    """`StepKernels` by Triton. Tensors are contiguous, rows first; `product` is in the base's dtype."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x @ weight.T` [T, O] of x [T, I] and weight [O, I], in their dtype, by torch's own library."""
        return F.linear(x, weight)

    def norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`x / rms(x) · weight` [T, E] in float32 and in `dtype`."""
        wide, narrow = _pair(x.shape, x.device, dtype)
        width = x.shape[1]
        _norm[(len(x),)](x, weight, wide, narrow, eps, width, triton.next_power_of_2(width))
        return wide, narrow

    def shrink(self, x: Tensor, a: Tensor, slots: Tensor) -> Tensor:
        """x [T, I] times, row by row, `a[slot].T` of a [L, S·r, I]: sums of N parts of the inputs, float32 [N, T,
        S·r]."""
        count, inner = x.shape
        ranks = a.shape[1]
        shared = max(INPUTS_OF_PART, triton.cdiv(inner, MAX_PARTS))
        inputs_of_part = triton.cdiv(shared, INPUTS_AT_ONCE) * INPUTS_AT_ONCE
        down = x.new_empty(triton.cdiv(inner, inputs_of_part), count, ranks)
        _shrink[(triton.cdiv(count, ROWS_AT_ONCE), triton.cdiv(ranks, RANKS_AT_ONCE), len(down))](
            x=x,
            a=a,
            slots=slots,
            down=down,
            count=count,
            inner=inner,
            ranks=ranks,
            slot_size=a.stride(0),
            inputs_of_part=inputs_of_part,
            ROWS=ROWS_AT_ONCE,
            RANKS=RANKS_AT_ONCE,
            INPUTS=INPUTS_AT_ONCE,
            PRECISION=PRECISION,
        )
        return down

    def heads(
        self,
        product: Tensor,
        lora: LoraPart | None,
        weights: AttentionWeights,
        rows: StepContext,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Queries [T, Q, D] of product [T, H·D]; keys and values go into their pages."""
        count, dim = len(product), rows.head_dim
        queries = product.new_empty(count, rows.query_heads, dim)
        parts = _parts(lora, product)
        absent = product
        _heads[(triton.cdiv(count, ROWS_AT_ONCE), rows.query_heads + 2 * rows.kv_heads)](
            product=product,
            **parts.tensors,
            bias=absent if weights.qkv_bias is None else weights.qkv_bias,
            norms=absent if weights.head_norms is None else weights.head_norms,
            cos=rows.cos,
            sin=rows.sin,
            inputs=rows.inputs,
            queries=queries,
            keys=keys,
            values=values,
            eps=rows.eps,
            count=count,
            stride=rows.inputs.stride(0),
            page_size=keys.stride(0),
            QUERY_HEADS=rows.query_heads,
            KV_HEADS=rows.kv_heads,
            DIM=dim,
            SIDE=rows.side_by_side,
            PAGE_POSITIONS=PAGE_POSITIONS,
            FIRST_PAGE=FIRST_PAGE,
            BIASED=weights.qkv_bias is not None,
            NORMED=weights.head_norms is not None,
            ROWS=ROWS_AT_ONCE,
            HALF=max(16, triton.next_power_of_2(dim // 2)),
            **parts.constants,
        )
        return queries

    def attend(self, queries: Tensor, rows: StepContext, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Attended values [T, Q·D] of queries [T, Q, D], in float32 and in their dtype."""
        count, heads, dim = queries.shape
        wide, narrow = _pair((count, heads * dim), queries.device, queries.dtype)
        groups, splits = heads // rows.kv_heads, rows.splits
        partial = wide
        if splits > 1:
            partial = torch.empty(count * rows.kv_heads * splits * groups * (dim + 2), device=queries.device)
        _attend[(count, rows.kv_heads, splits)](
            queries=queries,
            keys=keys,
            values=values,
            inputs=rows.inputs,
            parts=partial,
            wide=wide,
            narrow=narrow,
            scale=1 / math.sqrt(dim),
            stride=rows.inputs.stride(0),
            page_size=keys.stride(0),
            splits=splits,
            GROUPS=groups,
            DIM=dim,
            SIDE=rows.side_by_side,
            PAGE_POSITIONS=PAGE_POSITIONS,
            FIRST_PAGE=FIRST_PAGE,
            SPLIT_PAGES=SPLIT_PAGES,
            SINGLE=splits == 1,
            QUERIES=_padded(groups),
            WIDTH=_padded(dim),
        )
        if splits > 1:
            _merge[(count, rows.kv_heads)](
                parts=partial,
                inputs=rows.inputs,
                wide=wide,
                narrow=narrow,
                stride=rows.inputs.stride(0),
                splits=splits,
                GROUPS=groups,
                DIM=dim,
                PAGE_POSITIONS=PAGE_POSITIONS,
                SPLIT_PAGES=SPLIT_PAGES,
                QUERIES=triton.next_power_of_2(groups),
                WIDTH=triton.next_power_of_2(dim),
            )
        return wide, narrow

    def swiglu(self, product: Tensor, lora: LoraPart | None) -> tuple[Tensor, Tensor]:
        """`silu(gate) · up` [T, I] of product [T, 2·I], in float32 and in its dtype."""
        count, inner = len(product), product.shape[1] // 2
        wide, narrow = _pair((count, inner), product.device, product.dtype)
        parts = _parts(lora, product)
        _swiglu[_tiles(count, inner)](
            product=product,
            **parts.tensors,
            wide=wide,
            narrow=narrow,
            count=count,
            inner=inner,
            ROWS=ROWS_AT_ONCE,
            COLUMNS=COLUMNS_AT_ONCE,
            **parts.constants,
        )
        return wide, narrow

    def add(self, product: Tensor, residual: Tensor, lora: LoraPart | None) -> Tensor:
        """`residual` [T, O] plus `product` [T, O] and the lora's part, in float32."""
        count, outputs = product.shape
        out = torch.empty_like(residual)
        parts = _parts(lora, product)
        _add[_tiles(count, outputs)](
            product=product,
            residual=residual,
            **parts.tensors,
            out=out,
            count=count,
            outputs=outputs,
            ROWS=ROWS_AT_ONCE,
            COLUMNS=COLUMNS_AT_ONCE,
            **parts.constants,
        )
        return out


def _pair(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory for a result in float32 and in `dtype`: one tensor where these are the same."""
    wide = torch.empty(shape, device=device)
    return wide, wide if dtype == torch.float32 else torch.empty(shape, dtype=dtype, device=device)


@dataclass(frozen=True)
class _Parts:
    """The arguments of a kernel for the loras."""

    tensors: dict[str, Any]
    constants: dict[str, Any]


def _parts(lora: LoraPart | None, absent: Tensor) -> _Parts:
    """Without a lora the rank is 0, and `absent` stands for the tensors."""
    names = ("down", "bs", "scales", "slots")
    if lora is None:
        absents = dict.fromkeys(names, absent) | {"slot_size": 0, "sum_size": 0}
        return _Parts(absents, _constants(rank=0, sums=1))
    tensors = {name: getattr(lora, name) for name in names}
    sizes = {"slot_size": lora.bs.stride(0), "sum_size": lora.down.stride(0)}
    return _Parts(tensors | sizes, _constants(rank=lora.bs.shape[2], sums=len(lora.down)))


def _constants(*, rank: int, sums: int) -> dict[str, Any]:
    return {"RANK": rank, "RANKS": min(RANKS_ADDED, _padded(rank)), "SUMS": sums, "PRECISION": PRECISION}


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _tiles(rows: int, columns: int) -> tuple[int, int]:
    return triton.cdiv(rows, ROWS_AT_ONCE), triton.cdiv(columns, COLUMNS_AT_ONCE)


@triton.jit
def _shrink(
    x,
    a,
    slots,
    down,
    count,
    inner,
    ranks,
    slot_size,
    inputs_of_part,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    real, known = rows < count, rank < ranks
    slot = tl.load(slots + tl.program_id(0) * ROWS)
    own = a + slot.to(tl.int64) * slot_size
    total = tl.zeros([ROWS, RANKS], tl.float32)
    first = tl.program_id(2) * inputs_of_part
    if slot >= 0:
        for start in range(0, inputs_of_part, INPUTS):
            inputs = first + start + tl.arange(0, INPUTS)
            within = inputs < inner
            left = tl.load(x + rows[:, None] * inner + inputs[None, :], mask=real[:, None] & within[None, :], other=0.0)
            right = tl.load(
                own + rank[None, :] * inner + inputs[:, None], mask=known[None, :] & within[:, None], other=0.0
            )
            total += tl.dot(left, right, input_precision=PRECISION)
    place = (tl.program_id(2) * count + rows[:, None]) * ranks + rank[None, :]
    tl.store(down + place, total, mask=real[:, None] & known[None, :])


@triton.jit
def _lora_tile(
    down,
    bs,
    scales,
    slots,
    slot_size,
    sum_size,
    rows,
    real,
    width,
    columns,
    within,
    part,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """scale · down · bs.T for a tile: rows of `down`, the sum of `SUMS` tensors [T, width], of which part `part`, and
    rows `columns` of the bs in the slot of the tile's first row."""
    slot = tl.load(slots + tl.program_id(0) * rows.shape[0])
    own = bs + slot.to(tl.int64) * slot_size
    total = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    for start in tl.static_range(0, RANK, RANKS):
        ranks = start + tl.arange(0, RANKS)
        known = ranks < tl.where(slot >= 0, RANK, 0)
        place = rows[:, None] * width + part * RANK + ranks[None, :]
        left = tl.load(down + place, mask=real[:, None] & known[None, :], other=0.0)
        for index in tl.static_range(1, SUMS):
            left += tl.load(down + index * sum_size + place, mask=real[:, None] & known[None, :], other=0.0)
        place = columns[None, :] * RANK + ranks[:, None]
        right = tl.load(own + place, mask=known[:, None] & within[None, :], other=0.0)
        total += tl.dot(left, right, input_precision=PRECISION)
    return tl.load(scales + tl.maximum(slot, 0)) * total


@triton.jit
def _norm(x, weight, wide, narrow, eps, width, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, WIDTH)
    real = columns < width
    own = tl.load(x + row + columns, mask=real, other=0.0)
    own = own * tl.rsqrt(tl.sum(own * own) / width + eps) * tl.load(weight + columns, mask=real, other=0.0)
    tl.store(wide + row + columns, own, mask=real)
    tl.store(narrow + row + columns, own.to(narrow.dtype.element_ty), mask=real)


@triton.jit
def _heads(
    product,
    down,
    bs,
    scales,
    slots,
    slot_size,
    sum_size,
    bias,
    norms,
    cos,
    sin,
    inputs,
    queries,
    keys,
    values,
    eps,
    count,
    stride,
    page_size,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SIDE: tl.constexpr,
    PAGE_POSITIONS: tl.constexpr,
    FIRST_PAGE: tl.constexpr,
    RANK: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    RANKS: tl.constexpr,
    SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    half = tl.arange(0, HALF)
    real, within = rows < count, half < DIM // 2
    mask = real[:, None] & within[None, :]
    column = head * DIM + half
    place = rows[:, None] * ((QUERY_HEADS + 2 * KV_HEADS) * DIM) + column[None, :]
    first = tl.load(product + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(product + place + DIM // 2, mask=mask, other=0.0).to(tl.float32)
    if RANK > 0:
        part = (head >= QUERY_HEADS).to(tl.int32) + (head >= QUERY_HEADS + KV_HEADS).to(tl.int32)
        first += _lora_tile(
            down,
            bs,
            scales,
            slots,
            slot_size,
            sum_size,
            rows,
            real,
            3 * RANK,
            column,
            within,
            part,
            RANK,
            RANKS,
            SUMS,
            PRECISION,
        )
        second += _lora_tile(
            down,
            bs,
            scales,
            slots,
            slot_size,
            sum_size,
            rows,
            real,
            3 * RANK,
            column + DIM // 2,
            within,
            part,
            RANK,
            RANKS,
            SUMS,
            PRECISION,
        )
    if BIASED:
        first += tl.load(bias + column, mask=within, other=0.0)[None, :]
        second += tl.load(bias + column + DIM // 2, mask=within, other=0.0)[None, :]
    position = tl.load(inputs + stride + rows, mask=real, other=-1)
    used = position >= 0  # others are padding
    if head < QUERY_HEADS + KV_HEADS:
        if NORMED:
            inverse = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + eps)[:, None]
            first = first * inverse * tl.load(norms + column, mask=within, other=0.0)[None, :]
            second = second * inverse * tl.load(norms + column + DIM // 2, mask=within, other=0.0)[None, :]
        angle = position[:, None].to(tl.int64) * (DIM // 2) + half[None, :]
        turned = used[:, None] & within[None, :]
        cosine = tl.load(cos + angle, mask=turned, other=0.0)
        sine = tl.load(sin + angle, mask=turned, other=0.0)
        before = first
        first = before * cosine - second * sine
        second = second * cosine + before * sine
    kind = queries.dtype.element_ty
    if head < QUERY_HEADS:
        own = rows[:, None] * (QUERY_HEADS * DIM) + column[None, :]
        tl.store(queries + own, first.to(kind), mask=mask)
        tl.store(queries + own + DIM // 2, second.to(kind), mask=mask)
    else:
        kv = (head - QUERY_HEADS) % KV_HEADS
        used = used & real
        page = tl.load(inputs + (FIRST_PAGE + position // PAGE_POSITIONS) * stride + rows, mask=used, other=0).to(
            tl.int64
        )
        start = (
            page * page_size
            + ((kv // SIDE) * PAGE_POSITIONS + position % PAGE_POSITIONS) * (SIDE * DIM)
            + (kv % SIDE) * DIM
        )
        inside = start[:, None] + half[None, :]
        stored = used[:, None] & within[None, :]
        if head < QUERY_HEADS + KV_HEADS:
            tl.store(keys + inside, first.to(kind), mask=stored)
            tl.store(keys + inside + DIM // 2, second.to(kind), mask=stored)
        else:
            tl.store(values + inside, first.to(kind), mask=stored)
            tl.store(values + inside + DIM // 2, second.to(kind), mask=stored)


@triton.jit
def _attend(
    queries,
    keys,
    values,
    inputs,
    parts,
    wide,
    narrow,
    scale,
    stride,
    page_size,
    splits,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    SIDE: tl.constexpr,
    PAGE_POSITIONS: tl.constexpr,
    FIRST_PAGE: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    SINGLE: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One row's queries of one kv head over `SPLIT_PAGES` of its pages, scaled by the largest score so far."""
    row, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    length = tl.load(inputs + stride + row) + 1
    group, dims, keys_of_page = tl.arange(0, QUERIES), tl.arange(0, WIDTH), tl.arange(0, PAGE_POSITIONS)
    known = (group < GROUPS) & (SINGLE | (split * (SPLIT_PAGES * PAGE_POSITIONS) < length))
    mask = known[:, None] & (dims < DIM)[None, :]
    place = ((row * kv_heads + kv) * GROUPS + group)[:, None] * DIM + dims[None, :]
    query = tl.load(queries + place, mask=mask, other=0.0)
    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    offset = (kv // SIDE) * (PAGE_POSITIONS * SIDE * DIM) + (kv % SIDE) * DIM
    inside = keys_of_page[:, None] * (SIDE * DIM) + dims[None, :]
    for index in range(SPLIT_PAGES):  # of constant length, so that the loads are pipelined
        column = split * SPLIT_PAGES + index
        page = tl.load(inputs + (FIRST_PAGE + column) * stride + row, mask=column * PAGE_POSITIONS < length, other=0)
        start = page.to(tl.int64) * page_size + offset
        seen = column * PAGE_POSITIONS + keys_of_page < length
        loaded = seen[:, None] & (dims < DIM)[None, :]
        key = tl.load(keys + start + inside, mask=loaded, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(largest, tl.max(scores, 1))
        peak = tl.where(higher == -float("inf"), 0.0, higher)  # padding has no key at all
        weights = tl.exp(scores - peak[:, None])
        shrunk = tl.exp(largest - peak)
        value = tl.load(values + start + inside, mask=loaded, other=0.0)
        mixed = mixed * shrunk[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * shrunk + tl.sum(weights, 1)
        largest = higher
    if SINGLE:
        _store(wide, narrow, place, mixed / tl.where(total > 0, total, 1.0)[:, None], mask)
    else:
        own = ((row * kv_heads + kv).to(tl.int64) * splits + split) * GROUPS + group
        tl.store(parts + own[:, None] * (DIM + 2) + dims[None, :], mixed, mask=mask)
        tl.store(parts + own * (DIM + 2) + DIM, total, mask=known)
        tl.store(parts + own * (DIM + 2) + DIM + 1, largest, mask=known)


@triton.jit
def _merge(
    parts,
    inputs,
    wide,
    narrow,
    stride,
    splits,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_POSITIONS: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Adds a row's splits in order, as many as its length has."""
    row, kv = tl.program_id(0), tl.program_id(1)
    kv_heads = tl.num_programs(1)
    length = tl.load(inputs + stride + row) + 1
    group, dims = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    known = group < GROUPS
    mask = known[:, None] & (dims < DIM)[None, :]
    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    split = 0
    while split * (SPLIT_PAGES * PAGE_POSITIONS) < length:
        own = ((row * kv_heads + kv).to(tl.int64) * splits + split) * GROUPS + group
        found = tl.load(parts + own * (DIM + 2) + DIM + 1, mask=known, other=0.0)
        higher = tl.maximum(largest, found)
        shrunk, share = tl.exp(largest - higher), tl.exp(found - higher)
        part = tl.load(parts + own[:, None] * (DIM + 2) + dims[None, :], mask=mask, other=0.0)
        mixed = mixed * shrunk[:, None] + part * share[:, None]
        total = total * shrunk + tl.load(parts + own * (DIM + 2) + DIM, mask=known, other=0.0) * share
        largest = higher
        split += 1
    place = ((row * kv_heads + kv) * GROUPS + group)[:, None] * DIM + dims[None, :]
    _store(wide, narrow, place, mixed / tl.where(total > 0, total, 1.0)[:, None], mask)


@triton.jit
def _store(wide, narrow, place, result, mask):
    """Rounds to the dtype of the next product, and stores the same number in float32, too."""
    result = result.to(narrow.dtype.element_ty)
    tl.store(narrow + place, result, mask=mask)
    tl.store(wide + place, result.to(tl.float32), mask=mask)


@triton.jit
def _swiglu(
    product,
    down,
    bs,
    scales,
    slots,
    slot_size,
    sum_size,
    wide,
    narrow,
    count,
    inner,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real, within = rows < count, columns < inner
    mask = real[:, None] & within[None, :]
    place = rows[:, None] * (2 * inner) + columns[None, :]
    gate = tl.load(product + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(product + place + inner, mask=mask, other=0.0).to(tl.float32)
    if RANK > 0:
        gate += _lora_tile(
            down,
            bs,
            scales,
            slots,
            slot_size,
            sum_size,
            rows,
            real,
            2 * RANK,
            columns,
            within,
            0,
            RANK,
            RANKS,
            SUMS,
            PRECISION,
        )
        up += _lora_tile(
            down,
            bs,
            scales,
            slots,
            slot_size,
            sum_size,
            rows,
            real,
            2 * RANK,
            columns + inner,
            within,
            1,
            RANK,
            RANKS,
            SUMS,
            PRECISION,
        )
    mixed = gate / (1.0 + tl.exp(-gate)) * up
    place = rows[:, None] * inner + columns[None, :]
    tl.store(wide + place, mixed, mask=mask)
    tl.store(narrow + place, mixed.to(narrow.dtype.element_ty), mask=mask)


@triton.jit
def _add(
    product,
    residual,
    down,
    bs,
    scales,
    slots,
    slot_size,
    sum_size,
    out,
    count,
    outputs,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real, within = rows < count, columns < outputs
    mask = real[:, None] & within[None, :]
    place = rows[:, None] * outputs + columns[None, :]
    total = tl.load(residual + place, mask=mask, other=0.0)
    total += tl.load(product + place, mask=mask, other=0.0).to(tl.float32)
    if RANK > 0:
        total += _lora_tile(
            down,
            bs,
            scales,
            slots,
            slot_size,
            sum_size,
            rows,
            real,
            RANK,
            columns,
            within,
            0,
            RANK,
            RANKS,
            SUMS,
            PRECISION,
        )
    tl.store(out + place, total, mask=mask)

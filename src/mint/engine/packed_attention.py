"""Causal attention of packed rows: a training micro-batch, or prompts to be prefilled.

Spans of similar length go through one product each, cut where the position passes a multiple of `BLOCK`, with the
arithmetic that `attention` lays down. Rows are gathered by head into the layout of the products and back, one copy
each way. Knows nothing of layers or weights.

Letters: T rows · n spans · L queries of a span · W keys · K kv heads · G query heads per kv head · M = G·L queries of
one kv head · H = K·G + 2·K heads · D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.attention import BLOCK, MIN_QUERIES, add_parts, cuts
from mint.engine.kernels import run
from mint.engine.packing import AttentionBlock

KEPT_SHARES = 1 << 20
"""Probabilities of a layer kept for the backward (4 MB); more are computed again, so that memory does not grow with the
square of the length."""


@dataclass(frozen=True)
class _Piece:
    """Queries of all spans of a block, which attend to the first `keys` keys of theirs."""

    queries: Tensor  # [n·K·G·L]: places in heads [T·H]
    sources: Tensor  # [n·K·G·L]: where their results are in the output [T·K·G]
    idle: Tensor  # places in [n·K·G·L] whose results go nowhere: padding
    mask: Tensor  # [L, BLOCK], added to the scores of the last keys
    keys: int


@dataclass(frozen=True)
class _Block:
    keys: Tensor  # [n·K·W]: places in heads [T·H]; those of the values are K further on
    products: int  # n·K
    pieces: tuple[_Piece, ...]


class PackedAttention:
    """Causal attention of packed rows; callable as the decoder's `Attention`."""

    def __init__(self, blocks: Sequence[AttentionBlock], query_heads: int, kv_heads: int, device: torch.device) -> None:
        """Moves the index arrays of `blocks` to the device."""
        self.query_heads, self.kv_heads, self.device = query_heads, kv_heads, device
        # Results in the order of their rows; a prefill's rows that are only read have none.
        ranks = np.argsort(np.argsort(np.concatenate([block.rows for block in blocks])))
        ends = np.cumsum([len(block.rows) for block in blocks])
        self.blocks, cells, start = [], [], 0
        for block, end in zip(blocks, ends.tolist(), strict=True):
            own, used = _move(block, ranks[end - len(block.rows) : end], query_heads, kv_heads, device)
            self.blocks.append(own)
            for targets, count in used:
                cells.append((targets, start))
                start += count
        self.rows = len(ranks)
        places = np.empty(len(ranks) * query_heads, np.int64)
        for targets, first in cells:
            real = np.flatnonzero(targets >= 0)
            places[targets[real]] = first + real
        self.order = torch.from_numpy(places).to(device)  # [T·K·G]: where each row's result lies among all pieces'

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """Attended values [T, K·G·D] of `heads` [T, H, D]; every layer attends alike."""
        return run(_Attend, heads, self)

    @cached_property
    def readers(self) -> tuple[Tensor, Tensor]:
        """For each key head and value head of a row [T·2·K]: the places among all gathered keys, then values, whose
        gradients add up to its own, and where its run of them begins."""
        total, own = self.query_heads + 2 * self.kv_heads, 2 * self.kv_heads
        keys = torch.cat([block.keys for block in self.blocks])
        flat = torch.cat([keys, keys + self.kv_heads])
        heads = torch.div(flat, total, rounding_mode="floor") * own + flat % total - self.query_heads
        return torch.argsort(heads, stable=True), _starts(torch.bincount(heads, minlength=self.rows * own))


class _Attend(torch.autograd.Function):
    """softmax(q·k / √D + mask) · v, piece by piece; many probabilities are computed again in the backward."""

    @staticmethod
    @override
    def forward(ctx: Any, heads: Tensor, plan: PackedAttention) -> Tensor:
        """[T, K·G·D] from heads [T, H, D]."""
        flat = heads.flatten(0, 1)
        mixed, kept, room = [], [], KEPT_SHARES
        for block in plan.blocks:
            key, value = _gather_keys(flat, block, plan.kv_heads)
            for piece in block.pieces:
                shares = _shares(_gather_queries(flat, piece, block), key[:, : piece.keys], piece)
                own = shares.to(heads.dtype)
                parts = (_multiply(own[..., a:b], value[:, a:b]) for a, b in cuts(piece.keys))
                mixed.append(add_parts(parts).view(-1, heads.shape[2]))
                keep = shares.numel() <= room
                room -= shares.numel() if keep else 0
                kept.append(shares if keep else None)
        out = (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).index_select(0, plan.order)
        ctx.save_for_backward(heads, *kept)
        ctx.plan = plan
        return out.view(plan.rows, -1)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for heads."""
        heads, *kept = ctx.saved_tensors
        plan, size = ctx.plan, heads.shape[2]
        flat, grad, remaining = heads.flatten(0, 1), grad.reshape(-1, size), iter(kept)
        query_grads, key_grads, value_grads = [], [], []
        for block in plan.blocks:
            key, value = _gather_keys(flat, block, plan.kv_heads)
            # In float32: a prompt's keys collect the gradients of many samples.
            grad_key, grad_value = (torch.zeros(key.shape, device=key.device) for _ in range(2))
            for piece in block.pieces:
                query, seen, read = _gather_queries(flat, piece, block), key[:, : piece.keys], value[:, : piece.keys]
                found = next(remaining)
                shares = _shares(query, seen, piece) if found is None else found
                own = grad.index_select(0, piece.sources).index_fill_(0, piece.idle, 0).view_as(query)
                grad_value[:, : piece.keys] += shares.to(grad.dtype).transpose(1, 2) @ own
                slopes = torch._softmax_backward_data((own @ read.transpose(1, 2)).float(), shares, -1, torch.float32)
                slopes = slopes.to(grad.dtype)
                query_grads.append((slopes @ seen).view(-1, size))
                grad_key[:, : piece.keys] += slopes.transpose(1, 2) @ query
            key_grads.append(grad_key.view(-1, size))
            value_grads.append(grad_value.view(-1, size))
        order, starts = plan.readers
        out = torch.empty(heads.shape, device=heads.device)
        own = torch.cat(query_grads).index_select(0, plan.order).view(plan.rows, -1, size)
        torch.mul(own, 1 / math.sqrt(size), out=out[:, : plan.query_heads])
        # Sums of rows in one order, on every device.
        summed = F.embedding_bag(order, torch.cat([*key_grads, *value_grads]), starts, mode="sum")
        out[:, plan.query_heads :] = summed.view(plan.rows, -1, size)
        return out.to(heads.dtype), None


def _gather_queries(flat: Tensor, piece: _Piece, block: _Block) -> Tensor:
    """Scaled queries [n·K, M, D] of heads [T·H, D]."""
    size = flat.shape[1]
    return flat.index_select(0, piece.queries).mul_(1 / math.sqrt(size)).view(block.products, -1, size)


def _gather_keys(flat: Tensor, block: _Block, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values [n·K, W, D] of heads [T·H, D]."""
    shape = (block.products, -1, flat.shape[1])
    key, value = (flat.index_select(0, places).view(shape) for places in (block.keys, block.keys + kv_heads))
    return key, value


def _shares(query: Tensor, key: Tensor, piece: _Piece) -> Tensor:
    """The probabilities [n·K, M, W] in float32."""
    scores = _multiply(query, key.transpose(1, 2)).float()
    # Keys before the queries' own block are all visible.
    scores.view(len(query), -1, *piece.mask.shape[:1], piece.keys)[..., piece.keys - BLOCK :].add_(piece.mask)
    return torch.softmax(scores, dim=-1)


def _multiply(rows: Tensor, other: Tensor) -> Tensor:
    """Batched product; a lone one would be split over threads, and then summed in another order."""
    if len(rows) == 1:
        return torch.bmm(rows.expand(2, -1, -1), other.expand(2, -1, -1))[:1]
    return torch.bmm(rows, other)


def _starts(counts: Tensor) -> Tensor:
    return torch.cumsum(counts, 0) - counts


def _move(
    block: AttentionBlock, ranks: np.ndarray, query_heads: int, kv_heads: int, device: torch.device
) -> tuple[_Block, list[tuple[np.ndarray, int]]]:
    """The block on the device; and of each piece, where its results go in the output (-1: nowhere), and their number.

    `ranks` are the places of the block's rows in the output.
    """
    spans, length = block.queries.shape
    total, groups = query_heads + 2 * kv_heads, query_heads // kv_heads
    width = -(-block.keys.shape[1] // BLOCK) * BLOCK
    # Padded with a row of the span's own: another's could be NaN, and 0 · NaN would spoil the sum.
    filling = np.repeat(block.queries[:, :1], width - block.keys.shape[1], axis=1)
    keys = np.concatenate([block.keys, filling], axis=1)
    targets = np.full(spans * length, -1)
    targets[block.cells] = ranks
    targets = targets.reshape(spans, length)
    kv = np.arange(kv_heads)[:, None]
    heads = (np.arange(kv_heads)[:, None] * groups + np.arange(groups))[:, :, None]  # [K, G, 1]
    pieces, used, start = [], [], 0
    while start < length:
        seen = ((block.offset + start) // BLOCK + 1) * BLOCK
        stop = min(length, seen - block.offset)
        # The last query again and again, if products of so few rows would sum in another order.
        least = -(-MIN_QUERIES // groups)
        own = np.minimum(np.arange(start, max(stop, start + least)), stop - 1)
        real = np.arange(len(own)) < stop - start
        places = block.queries[:, None, None, own] * total + heads
        sources = np.where(real, targets[:, own], -1)[:, None, None]
        sources = np.where(sources < 0, -1, sources * query_heads + heads).reshape(-1)
        hidden = np.arange(BLOCK) > (block.offset + own)[:, None] % BLOCK
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
        arrays = (places.reshape(-1), np.maximum(sources, 0), np.flatnonzero(sources < 0), mask)
        pieces.append(_Piece(*(torch.from_numpy(array).to(device) for array in arrays), keys=seen))
        used.append((sources, len(sources)))
        start = stop
    places = (keys[:, None] * total + query_heads + kv).reshape(-1)
    return _Block(torch.from_numpy(places).to(device), spans * kv_heads, tuple(pieces)), used

"""Attention, written so that a row's bits are the same in training, in prefill and in decoding.

A query at position t attends to the first (t // BLOCK + 1) · BLOCK keys, those after t masked; nothing else about the
batch reaches its arithmetic: not the neighbours, not the length of its sequence, not whether it came alone (a decoded
token) or with the others of its block. So the sampler's logprobs are the trainer's, to the last bit where products of
at least `MIN_QUERIES` rows treat each row alike (measured for float32 and bfloat16 on CPUs, and tested).

Knows nothing of layers or weights. Letters: T rows · n spans · L queries · W keys · K kv heads · G query heads per kv
head · H = K·G + 2·K heads · D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.kernels import run
from mint.engine.packing import AttentionBlock

BLOCK = 32
"""Queries whose positions agree in t // BLOCK attend to equally many keys."""

KEPT_SHARES = 1 << 19
"""Probabilities of a piece kept for the backward (2 MB); more are computed again, so that memory does not grow with
the square of the length."""

MIN_QUERIES = 4
"""Below this, BLAS multiplies matrix and vector in another order (measured)."""


@dataclass(frozen=True)
class _Piece:
    """Queries `start:stop` of a span, which attend to the first `keys` keys; `mask` [G·(stop − start), keys]."""

    start: int
    stop: int
    keys: int
    mask: Tensor


@dataclass(frozen=True)
class _Block:
    queries: Tensor  # [n·L]
    keys: Tensor  # [n·W]
    spans: int
    cells: Tensor  # where the block's results lie in [n·L]
    pieces: tuple[_Piece, ...]


class PackedAttention:
    """Causal attention of one micro-batch; callable as the decoder's `Attention`."""

    def __init__(self, blocks: Sequence[AttentionBlock], query_heads: int, kv_heads: int, device: torch.device) -> None:
        """Moves the index arrays of `blocks` to the device."""
        self._query_heads, self._kv_heads = query_heads, kv_heads
        self._blocks = [_move(block, query_heads // kv_heads, device) for block in blocks]
        rows = np.concatenate([block.rows for block in blocks])
        self._order = torch.from_numpy(np.argsort(rows)).to(device)

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """Attended values [T, K·G·D] of `heads` [T, H, D]; every layer attends alike."""
        query, key, value = heads.split([self._query_heads, self._kv_heads, self._kv_heads], dim=1)
        parts = [self._attend(block, query, key, value) for block in self._blocks]
        return torch.cat(parts).index_select(0, self._order)

    def _attend(self, block: _Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mixed = run(
            CausalAttention,
            _gather(query, block.queries, block.spans).unflatten(1, (self._kv_heads, -1)),
            _gather(key, block.keys, block.spans),
            _gather(value, block.keys, block.spans),
            block.pieces,
        )
        return mixed.permute(0, 3, 1, 2, 4).reshape(len(block.queries), -1).index_select(0, block.cells)


class CausalAttention(torch.autograd.Function):
    """softmax(q·k / √D + mask) · v, piece by piece; large probabilities are computed again in the backward."""

    @staticmethod
    @override
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: Sequence[_Piece]) -> Tensor:
        """[n, K, G, L, D] from query [n, K, G, L, D], key and value [n, K, W, D]."""
        out = torch.empty_like(query)
        kept = []
        for piece in pieces:
            mixed, shares = _attend(_rows(query, piece), key[:, :, : piece.keys], value[:, :, : piece.keys], piece.mask)
            _rows_of(out, piece).copy_(mixed.unflatten(2, (query.shape[2], -1)))
            kept.append(shares if shares.numel() <= KEPT_SHARES else None)
        ctx.save_for_backward(query, key, value, out)
        ctx.pieces, ctx.kept = pieces, kept
        return out

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for query, key and value."""
        query, key, value, out = ctx.saved_tensors
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        scale = 1 / math.sqrt(query.shape[-1])
        for piece, kept in zip(ctx.pieces, ctx.kept, strict=True):
            own, own_grad = _rows(query, piece), _rows(grad, piece)
            seen, read = key[:, :, : piece.keys], value[:, :, : piece.keys]
            shares = _shares(own, seen, piece.mask) if kept is None else kept
            grad_value[:, :, : piece.keys] += shares.to(grad.dtype).transpose(2, 3) @ own_grad
            # d softmax: p · (slope - Σ p · slope), and Σ p · slope = Σ out · grad
            mean = (_rows(out, piece) * own_grad).float().sum(-1, keepdim=True)
            slopes = (own_grad @ read.transpose(2, 3)).float().sub_(mean).mul_(shares).mul_(scale).to(grad.dtype)
            _rows_of(grad_query, piece).copy_((slopes @ seen).unflatten(2, (query.shape[2], -1)))
            grad_key[:, :, : piece.keys] += slopes.transpose(2, 3) @ own
        return grad_query, grad_key, grad_value, None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """[n, K, M, D] from query [n, K, M, D], key and value [n, K, W, D]; `mask` is added to the scores [n, K, M, W]."""
    return _attend(query, key, value, mask)[0]


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The result of `attend`, and the probabilities [n, K, M, W] in float32."""
    count = query.shape[2]
    if count < MIN_QUERIES:
        copies = -(-MIN_QUERIES // count)
        repeated_mask = mask if mask.shape[-2] == 1 else mask.repeat(copies, 1)
        mixed, shares = _attend(query.repeat(1, 1, copies, 1), key, value, repeated_mask)
        return mixed[:, :, :count], shares[:, :, :count]
    if query.shape[0] * query.shape[1] == 1:  # a lone product is split over threads, and then summed in another order
        mixed, shares = _attend(*(heads.expand(2, -1, -1, -1) for heads in (query, key, value)), mask)
        return mixed[:1], shares[:1]
    shares = _shares(query, key, mask)
    return shares.to(value.dtype) @ value, shares


def _shares(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """The probabilities [n, K, M, W] in float32."""
    scaled = query * (1 / math.sqrt(query.shape[-1]))
    return torch.softmax((scaled @ key.transpose(2, 3)).float().add_(mask), dim=-1)


def _rows_of(heads: Tensor, piece: _Piece) -> Tensor:
    """The view [n, K, G, rows, D] of a piece."""
    return heads[:, :, :, piece.start : piece.stop]


def _rows(heads: Tensor, piece: _Piece) -> Tensor:
    """[n, K, G·rows, D] of [n, K, G, L, D]."""
    return _rows_of(heads, piece).flatten(2, 3)


def _gather(heads: Tensor, rows: Tensor, spans: int) -> Tensor:
    """[n, heads, L, D] of [T, heads, D], contiguous."""
    return heads.index_select(0, rows).view(spans, -1, *heads.shape[1:]).transpose(1, 2).contiguous()


def _move(block: AttentionBlock, groups: int, device: torch.device) -> _Block:
    spans, length = block.queries.shape
    width = -(-block.keys.shape[1] // BLOCK) * BLOCK
    # Padded with a row of the span's own: another's could be NaN, and 0 · NaN would spoil the sum.
    filling = np.repeat(block.queries[:, :1], width - block.keys.shape[1], axis=1)
    keys = np.concatenate([block.keys, filling], axis=1)
    return _Block(
        queries=torch.from_numpy(block.queries.reshape(-1)).to(device),
        keys=torch.from_numpy(keys.reshape(-1)).to(device),
        spans=spans,
        cells=torch.from_numpy(block.cells).to(device),
        pieces=tuple(_cut(length, block.offset, groups, device)),
    )


def _cut(length: int, offset: int, groups: int, device: torch.device) -> Iterator[_Piece]:
    """Queries 0 … length, at positions from `offset` on, cut where the position passes a multiple of `BLOCK`."""
    start = 0
    while start < length:
        keys = ((offset + start) // BLOCK + 1) * BLOCK
        stop = min(length, keys - offset)
        positions = torch.arange(offset + start, offset + stop, device=device)
        hidden = torch.arange(keys, device=device) > positions[:, None]
        mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -math.inf)
        yield _Piece(start, stop, keys, mask.repeat(groups, 1))
        start = stop

"""Causal attention of packed rows: a training micro-batch, or prompts to be prefilled.

Spans of similar length are computed together, cut where the position passes a multiple of `BLOCK`, by the rules in
`attention`. Rows are copied once into the layout of the products, and once back.

Letters: T rows · n spans · L queries of a span · W keys · P of them a prefix · K kv heads · G query heads per kv head ·
M = G·L queries of one kv head · H = K·G + 2·K heads · D head dimension.
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

from mint.engine.model.attention import BLOCK, MIN_QUERIES, add_parts, cuts, hide_keys, softmax
from mint.engine.model.autograd import AutogradFunction
from mint.engine.model.config import NO_WINDOWS, Windows
from mint.engine.model.functions import multiply_each
from mint.engine.packing import AttentionBlock

SAVED_PROBABILITIES = 1 << 20
"""Probabilities of a layer that are saved for the backward (4 MB). The others are computed again, so that memory does
not grow with the square of the length."""


MIN_PREFIX_KEYS = 1 << 11
"""If the spans of a block have at least so many keys in prefixes, and groups of one size share each prefix, a backward
multiplies each prefix with the queries of its whole group at once. For fewer keys that is not worth the calls."""


@dataclass(frozen=True)
class _QueryRows:
    """Queries of all spans of a block, which attend to the first `keys` keys of theirs."""

    queries: Tensor  # [K·n·G·L]: places in heads [T·H]
    sources: Tensor  # [K·n·G·L]: where their results are in the output [T·K·G]
    idle: Tensor  # places in [K·n·G·L] whose results go nowhere: padding
    mask: Tensor  # [L, BLOCK], added to the scores of the last keys
    positions: Tensor  # [L, 1]
    keys: int


@dataclass(frozen=True)
class _SpanBlock:
    keys: Tensor  # [K·n·W]: places in heads [T·H]; those of the values are K further on
    products: int  # K·n
    pieces: tuple[_QueryRows, ...]
    spans: AttentionBlock


class PackedAttention:
    """Causal attention of packed rows; callable as the decoder's `Attention`."""

    def __init__(
        self,
        blocks: Sequence[AttentionBlock],
        query_heads: int,
        kv_heads: int,
        device: torch.device,
        windows: Windows = NO_WINDOWS,
    ) -> None:
        """Moves the index arrays of `blocks` to the device."""
        self._windows = windows
        self.query_heads = query_heads
        self.kv_heads = kv_heads
        self.device = device
        # Results come in the order of their rows. Rows that a prefill only reads have none.
        ranks = np.argsort(np.argsort(np.concatenate([block.rows for block in blocks])))
        ends = np.cumsum([len(block.rows) for block in blocks])
        self.blocks = []
        cells = []
        start = 0
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
        # [T·K·G]: the place of each row's result among the results of all pieces
        self.order = torch.from_numpy(places).to(device)

    def __call__(self, layer: int, heads: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attended values [T, K·G·D] of `heads` [T, H, D], with `sinks` [K·G], if given."""
        return _Attend.run(heads, self, self._windows.get(layer, 0), sinks)

    @cached_property
    def backward(self) -> _Backward:
        """The index arrays that only a backward needs."""
        parts = [_list_keys(block, self.kv_heads) for block in self.blocks]
        total, own = self.query_heads + 2 * self.kv_heads, 2 * self.kv_heads
        keys = torch.cat([found[0].places for found in parts])
        flat = torch.cat([keys, keys + self.kv_heads])
        heads = torch.div(flat, total, rounding_mode="floor") * own + flat % total - self.query_heads
        starts = _starts(torch.bincount(heads, minlength=self.rows * own))
        queries = sum(len(piece.queries) for block in self.blocks for piece in block.pieces)
        return _Backward(parts, queries, len(keys), torch.argsort(heads, stable=True), starts)


@dataclass(frozen=True)
class _KeyColumns:
    """Keys `columns` of all spans of a block."""

    places: Tensor  # [B·keys]: places in heads [T·H]
    products: int  # B: one for each kv head and span, or group of spans that share a prefix
    columns: slice


@dataclass(frozen=True)
class _Backward:
    """How the gradients of all pieces lie in one matrix: first of the queries, then of the keys (the first part of each
    block), then of the values.

    The gradient of each key head and value head of a row [T·2·K] is a sum of rows of that matrix: their places are a
    run of `order`, which begins at `starts`."""

    parts: list[list[_KeyColumns]]
    queries: int
    keys: int
    order: Tensor
    starts: Tensor


class _Attend(AutogradFunction):
    """softmax(q·k / √D + mask) · v, piece by piece; many probabilities are computed again in the backward."""

    @staticmethod
    @override
    def forward(ctx: Any, heads: Tensor, plan: PackedAttention, window: int, sinks: Tensor | None) -> Tensor:
        """[T, K·G·D] from heads [T, H, D]."""
        flat = heads.flatten(0, 1)
        mixed = []
        saved = []
        room = SAVED_PROBABILITIES
        for block in plan.blocks:
            key, value = (_gather(flat, places, block.products) for places in (block.keys, block.keys + plan.kv_heads))
            for piece in block.pieces:
                query = _gather_queries(flat, piece, block)
                own_sinks = _spread_sinks(sinks, piece, block, plan.kv_heads)
                probabilities = _probabilities(query, key[:, : piece.keys], piece, window, own_sinks)
                own = probabilities.to(heads.dtype)
                parts = (multiply_each(own[..., a:b], value[:, a:b]) for a, b in cuts(piece.keys))
                mixed.append(add_parts(parts).view(-1, heads.shape[2]))
                keep = probabilities.numel() <= room
                room -= probabilities.numel() if keep else 0
                saved.append(probabilities if keep else None)
        out = (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).index_select(0, plan.order)
        out = out.view(plan.rows, -1)
        ctx.save_for_backward(heads, out, *saved)
        ctx.plan, ctx.window, ctx.sinks = plan, window, sinks
        return out

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for heads, summed in float32, because the keys of a shared prefix collect from many samples.
        They are multiplied once with the queries of all that share them."""
        heads, out, *saved = ctx.saved_tensors
        plan = ctx.plan
        size = heads.shape[2]
        needs = plan.backward
        flat = heads.flatten(0, 1)
        grad = grad.reshape(-1, size)
        remaining = iter(saved)
        # The softmax subtracts this from the slopes of its row: Σ probabilities · slopes = grad · out (FlashAttention-2
        # calls it D).
        deltas = (grad.float() * out.view(-1, size)).sum(1, keepdim=True)
        results = torch.zeros((needs.queries + 2 * needs.keys, size), device=heads.device)
        found, *own_grads = results.split([needs.queries, needs.keys, needs.keys])
        query_grads = found
        prefixes = []
        for block, parts in zip(plan.blocks, needs.parts, strict=True):
            # Each block takes the next rows of the matrix.
            count = len(parts[0].places)
            grads = [[found[:count] for found in own_grads]]
            grads += [list(torch.zeros((2, len(part.places), size), device=heads.device)) for part in parts[1:]]
            sums = [_KeySums(flat, part, plan.kv_heads, own) for part, own in zip(parts, grads, strict=True)]
            own_grads = [found[count:] for found in own_grads]
            prefixes += sums[1:]
            for piece in block.pieces:
                query = _gather_queries(flat, piece, block)
                probabilities = next(remaining)
                if probabilities is None:
                    key = _gather(flat, block.keys, block.products)[:, : piece.keys]
                    own_sinks = _spread_sinks(ctx.sinks, piece, block, plan.kv_heads)
                    probabilities = _probabilities(query, key, piece, ctx.window, own_sinks)
                own, delta = (
                    x.index_select(0, piece.sources).index_fill_(0, piece.idle, 0).view(block.products, -1, x.shape[1])
                    for x in (grad, deltas)
                )
                target, query_grads = query_grads[: len(piece.queries)], query_grads[len(piece.queries) :]
                for part in sums:
                    part.add(probabilities, query, own, delta, target.view_as(query))
        out = torch.empty(heads.shape, device=heads.device)
        own = found.index_select(0, plan.order).view(plan.rows, -1, size)
        torch.mul(own, 1 / math.sqrt(size), out=out[:, : plan.query_heads])
        # Sums of rows in one order, on every device; a prefix names each row once.
        summed = F.embedding_bag(needs.order, results[needs.queries :], needs.starts, mode="sum")
        out[:, plan.query_heads :] = summed.view(plan.rows, -1, size)
        for part in prefixes:
            part.add_to(out.view(-1, size))
        return out.to(heads.dtype), None, None, None


class _KeySums:
    """Some keys and values, and their gradients so far, two of [B·keys, D]."""

    def __init__(self, flat: Tensor, keys: _KeyColumns, kv_heads: int, grads: Sequence[Tensor]) -> None:
        self._keys = keys
        self._grads = grads
        self._kv_heads = kv_heads
        self._key, self._value = (
            _gather(flat, places, keys.products) for places in (keys.places, keys.places + kv_heads)
        )

    def add(self, probabilities: Tensor, query: Tensor, grad: Tensor, delta: Tensor, target: Tensor) -> None:
        """Adds a piece's part to the gradients of keys and values, and to `target`, those of its queries.

        `probabilities` [K·n, M, W], `query`, `grad` and `target` [K·n, M, D], `delta` [K·n, M, 1].
        """
        tensors = (probabilities, query, grad, delta, target)
        probabilities, query, grad, delta, target = (x.view(self._keys.products, -1, x.shape[2]) for x in tensors)
        probabilities = probabilities[..., self._keys.columns]
        key, value = (x[:, : probabilities.shape[2]] for x in (self._key, self._value))
        key_grad, value_grad = (x.view(self._key.shape)[:, : probabilities.shape[2]] for x in self._grads)
        slopes = torch.bmm(grad, value.transpose(1, 2)).float().sub_(delta).mul_(probabilities).to(query.dtype)
        _add_product(target, slopes, key)
        _add_product(key_grad, slopes.transpose(1, 2), query)
        _add_product(value_grad, probabilities.to(grad.dtype).transpose(1, 2), grad)

    def add_to(self, out: Tensor) -> None:
        """Adds the gradients to `out` [T·H, D]."""
        for offset, grad in enumerate(self._grads):
            out.index_add_(0, self._keys.places + offset * self._kv_heads, grad)


def _add_product(total: Tensor, rows: Tensor, other: Tensor) -> None:
    if total.is_contiguous() and total.dtype == rows.dtype:  # baddbmm_ would loop over the batch
        total.baddbmm_(rows, other)
    else:
        total.add_(torch.bmm(rows, other))


def _gather_queries(flat: Tensor, piece: _QueryRows, block: _SpanBlock) -> Tensor:
    """Scaled queries [K·n, M, D] of heads [T·H, D]."""
    size = flat.shape[1]
    return flat.index_select(0, piece.queries).mul_(1 / math.sqrt(size)).view(block.products, -1, size)


def _gather(flat: Tensor, places: Tensor, products: int) -> Tensor:
    """Keys or values [K·n, W, D] of heads [T·H, D]."""
    return flat.index_select(0, places).view(products, -1, flat.shape[1])


def _spread_sinks(sinks: Tensor | None, piece: _QueryRows, block: _SpanBlock, kv_heads: int) -> Tensor | None:
    """The sinks [K·n, M, 1] of the queries of a piece, from those of the heads [K·G]."""
    if sinks is None:
        return None
    by_head = sinks.view(kv_heads, 1, -1, 1)
    spread = by_head.expand(-1, block.products // kv_heads, -1, len(piece.mask))
    return spread.reshape(block.products, -1, 1)


def _probabilities(query: Tensor, key: Tensor, piece: _QueryRows, window: int, sinks: Tensor | None) -> Tensor:
    """The probabilities [K·n, M, W] in float32; `sinks` [K·n, M, 1]."""
    scores = multiply_each(query, key.transpose(1, 2)).float()
    # Keys before the queries' own block are all visible.
    by_query = scores.view(len(query), -1, *piece.mask.shape[:1], piece.keys)
    by_query[..., piece.keys - BLOCK :].add_(piece.mask)
    if window:
        hide_keys(by_query, piece.positions, window)
    return softmax(scores, sinks)


def _starts(counts: Tensor) -> Tensor:
    return torch.cumsum(counts, 0) - counts


def _list_keys(block: _SpanBlock, kv_heads: int) -> list[_KeyColumns]:
    """How a backward multiplies the keys of the spans: together with their prefixes, or these apart."""
    (count, length) = block.spans.queries.shape
    prefix = block.spans.offset
    places = block.keys.view(kv_heads, count, -1)[:, :, : prefix + length]
    if block.products * prefix >= MIN_PREFIX_KEYS:
        starts = np.flatnonzero(np.diff(block.spans.keys[:, 0], prepend=-1))  # spans that share a prefix are neighbours
        step = count // len(starts)
        if step > 1 and np.array_equal(starts, np.arange(0, count, step)):
            own, apart = slice(prefix, prefix + length), slice(0, prefix)
            return [
                _KeyColumns(places[:, :, own].reshape(-1), block.products, own),
                _KeyColumns(places[:, ::step, apart].reshape(-1), kv_heads * len(starts), apart),
            ]
    return [_KeyColumns(places.reshape(-1), block.products, slice(0, prefix + length))]


def _move(
    block: AttentionBlock,
    ranks: np.ndarray,
    query_heads: int,
    kv_heads: int,
    device: torch.device,
) -> tuple[_SpanBlock, list[tuple[np.ndarray, int]]]:
    """The block on the device; and for each piece the places of its results in the output (-1: none), and their number.

    `ranks` are the places of the block's rows in the output.
    """
    spans, length = block.queries.shape
    total, groups = query_heads + 2 * kv_heads, query_heads // kv_heads
    width = -(-block.keys.shape[1] // BLOCK) * BLOCK
    # Padded with a row of the same span: a row of another could be NaN, and 0 · NaN is NaN.
    filling = np.repeat(block.queries[:, :1], width - block.keys.shape[1], axis=1)
    keys = np.concatenate([block.keys, filling], axis=1)
    targets = np.full(spans * length, -1)
    targets[block.cells] = ranks
    targets = targets.reshape(spans, length)
    kv = np.arange(kv_heads)[:, None, None]
    heads = (np.arange(kv_heads)[:, None] * groups + np.arange(groups))[:, None, :, None]  # [K, 1, G, 1]
    pieces = []
    used = []
    start = 0
    while start < length:
        seen = ((block.offset + start) // BLOCK + 1) * BLOCK
        stop = min(length, seen - block.offset)
        # Few queries are padded with the last one, because BLAS sums products of few rows in another order.
        least = -(-MIN_QUERIES // groups)
        own = np.minimum(np.arange(start, max(stop, start + least)), stop - 1)
        real = np.arange(len(own)) < stop - start
        places = block.queries[:, None, own] * total + heads
        sources = np.where(real, targets[:, own], -1)[:, None]
        sources = np.where(sources < 0, -1, sources * query_heads + heads).reshape(-1)
        hidden = np.arange(BLOCK) > (block.offset + own)[:, None] % BLOCK
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
        piece = _QueryRows(
            queries=torch.from_numpy(places.reshape(-1)).to(device),
            sources=torch.from_numpy(np.maximum(sources, 0)).to(device),
            idle=torch.from_numpy(np.flatnonzero(sources < 0)).to(device),
            mask=torch.from_numpy(mask).to(device),
            positions=torch.from_numpy(block.offset + own[:, None]).to(device),
            keys=seen,
        )
        pieces.append(piece)
        used.append((sources, len(sources)))
        start = stop
    places = (keys * total + query_heads + kv).reshape(-1)
    return _SpanBlock(torch.from_numpy(places).to(device), spans * kv_heads, tuple(pieces), block), used

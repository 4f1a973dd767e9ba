"""Attention of one new token per sequence, over keys and values in pages.

Sequences that share pages (the samples of one prompt) are multiplied with them in one product. A row attends to as many
keys as `model.attention` says for its position, the later ones masked, and its products are cut where training cuts
them. So its bits are those of training and do not depend on the other rows.

Letters: R rows · C pages of a row · K kv heads · J kv heads side by side · G query heads per kv head · D head
dimension · M query rows of one sequence · W keys · N pages in all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from mint.engine.model.attention import BLOCK, MIN_QUERIES, PAGE_POSITIONS, add_parts, cuts, hide_keys, softmax
from mint.engine.model.functions import multiply_each
from mint.engine.sampling.kv_cache import KVCache


@dataclass(frozen=True)
class _PageRows:
    """Rows `start:stop`, of which every `each` neighbours share one page, and the positions `within` of those pages.

    The pages are consecutive ones from `page` on, or `ids` where these are given.
    """

    start: int
    stop: int
    each: int
    within: slice
    page: int
    ids: Tensor | None

    def product(self, rows: Tensor, plane: Tensor, *, transposed: bool) -> Tensor:
        """rows [n, K/J, M, ·] times the pages in plane [N, K/J, PAGE_POSITIONS, J·D]."""
        if len(rows) != self.stop - self.start:
            rows = rows[self.start : self.stop]
        count, parts, queries, _ = rows.shape
        groups = count // self.each
        if self.ids is None:
            own = plane[self.page : self.page + groups, :, self.within].flatten(0, 1)
        else:
            own = plane[:, :, self.within].index_select(0, self.ids).flatten(0, 1)
        if self.each == 1 or parts == 1:
            found = _multiply(rows.reshape(groups * parts, self.each * queries, -1), own, transposed=transposed)
            return found.view(count, parts, queries, -1)
        stacked = rows.unflatten(0, (groups, self.each)).transpose(1, 2).reshape(groups * parts, -1, rows.shape[-1])
        found = _multiply(stacked, own, transposed=transposed)
        return found.view(groups, parts, self.each, queries, -1).transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class _EqualRows:
    """Rows `start:stop`, which attend to `keys` keys each; for each part of the keys, how its rows read their pages."""

    start: int
    stop: int
    keys: int
    parts: tuple[tuple[_PageRows, ...], ...]


class DecodeAttention:
    """`StepAttention` in torch, for rows that stay the same and within their query blocks."""

    def __init__(self, cache: KVCache, table: np.ndarray, fronts: np.ndarray, positions: np.ndarray) -> None:
        """`table` [R, C] has the pages of each row in order. Its first `BLOCK` positions are read in the pages `fronts`
        [R] instead, which samples of one prompt share. Rows that share pages should be neighbours."""
        self._cache = cache
        self._table = table
        blocks = positions // BLOCK + 1
        starts = np.flatnonzero(np.diff(blocks, prepend=-1))
        stops = np.append(starts[1:], len(blocks))
        self._runs = [
            _plan(np.column_stack([fronts[a:b], table[a:b]]), a, b, int(blocks[a]) * BLOCK, cache.device)
            for a, b in zip(starts.tolist(), stops.tolist(), strict=True)
        ]
        self._blocks = blocks
        self._rows = np.arange(len(blocks))
        self._query: Tensor | None = None
        self._places = self._mask = self._positions = torch.zeros(0, device=cache.device)

    def fits(self, positions: np.ndarray) -> bool:
        """Whether rows at these positions are still within their blocks."""
        return bool((positions // BLOCK + 1 == self._blocks).all())

    def begin_step(self, positions: np.ndarray) -> None:
        """The next token of each row is at `positions` [R]."""
        own = self._table[self._rows, positions // PAGE_POSITIONS]
        self._places = self._cache.places(own, positions)
        hidden = np.arange(BLOCK) > positions[:, None] % BLOCK
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
        self._mask = torch.from_numpy(mask).to(self._cache.device)[:, None, None]
        self._positions = torch.from_numpy(positions).to(self._cache.device)[:, None, None, None]

    def __call__(self, layer: int, heads: Tensor, sinks: Tensor | None) -> Tensor:
        """Attended values [R, query heads · D] of `heads` [R, all heads, D], whose keys and values are stored."""
        self._cache.write(layer, heads, self._places)
        keys, values = self._cache.planes(layer)
        query = self._spread(heads)
        window = self._cache.windows.get(layer, 0)
        own_sinks = None if sinks is None else self._spread_sinks(sinks)
        mixed = [self._attend(run, query[run.start : run.stop], keys, values, window, own_sinks) for run in self._runs]
        return self._collect(mixed[0] if len(mixed) == 1 else torch.cat(mixed), heads.shape[-1])

    def _attend(
        self, run: _EqualRows, query: Tensor, keys: Tensor, values: Tensor, window: int, sinks: Tensor | None
    ) -> Tensor:
        """[rows, K/J, M, J·D] of query of the same shape; `sinks` [K/J, M, 1]."""
        found = [_over(pieces, query, keys, transposed=True) for pieces in run.parts]
        scores = (found[0] if len(found) == 1 else torch.cat(found, dim=-1)).float()
        scores[..., run.keys - BLOCK :].add_(self._mask[run.start : run.stop])
        if window:
            hide_keys(scores, self._positions[run.start : run.stop], window)
        probabilities = softmax(scores, sinks).to(values.dtype)
        return add_parts(
            _over(pieces, probabilities[..., start:stop], values, transposed=False)
            for pieces, (start, stop) in zip(run.parts, cuts(run.keys), strict=True)
        )

    def _spread(self, heads: Tensor) -> Tensor:
        """Scaled queries [R, K/J, M, J·D]: each in the columns of its own kv head, zeros in the others'."""
        cache = self._cache
        dim = heads.shape[-1]
        side = cache.side_by_side
        groups = cache.query_heads // cache.kv_heads
        copies = -(-MIN_QUERIES // (side * groups))
        shape = (len(heads), cache.kv_heads // side, copies, side, groups, side, dim)
        if self._query is None:
            self._query = torch.zeros(shape, dtype=heads.dtype, device=heads.device)
        own = heads[:, : cache.query_heads].reshape(len(heads), shape[1], 1, side, groups, dim)
        torch.mul(
            own.permute(0, 1, 2, 4, 5, 3).expand(-1, -1, copies, -1, -1, -1),
            1 / math.sqrt(dim),
            out=self._query.diagonal(dim1=3, dim2=5),
        )
        return self._query.view(len(heads), shape[1], copies * side * groups, side * dim)

    def _spread_sinks(self, sinks: Tensor) -> Tensor:
        """Those of the rows of `_spread`, [K/J, M, 1], from those of the query heads."""
        cache = self._cache
        own = sinks.view(cache.kv_heads // cache.side_by_side, 1, -1)
        copies = -(-MIN_QUERIES // own.shape[-1])
        return own.expand(-1, copies, -1).reshape(len(own), -1, 1)

    def _collect(self, mixed: Tensor, dim: int) -> Tensor:
        """[R, query heads · D] from the columns that belong to each query's own kv head."""
        cache = self._cache
        side = cache.side_by_side
        groups = cache.query_heads // cache.kv_heads
        first = mixed[:, :, : side * groups].unflatten(2, (side, groups)).unflatten(-1, (side, dim))
        return first.diagonal(dim1=2, dim2=4).permute(0, 1, 4, 2, 3).reshape(len(mixed), -1)


def _over(pieces: tuple[_PageRows, ...], rows: Tensor, plane: Tensor, *, transposed: bool) -> Tensor:
    found = [piece.product(rows, plane, transposed=transposed) for piece in pieces]
    return found[0] if len(found) == 1 else torch.cat(found)


def _multiply(rows: Tensor, own: Tensor, *, transposed: bool) -> Tensor:
    """Batched product of rows [n, M, ·] with own [n, w, ·], or its transpose."""
    return multiply_each(rows, own.transpose(1, 2) if transposed else own)


def _plan(table: np.ndarray, start: int, stop: int, keys: int, device: torch.device) -> _EqualRows:
    """`table` [rows, 1 + C]: the page of the first block, and then all pages."""
    parts = []
    for first, last in cuts(keys):
        column = 0 if first == 0 else first // PAGE_POSITIONS + 1
        within = slice(first % PAGE_POSITIONS, first % PAGE_POSITIONS + last - first)
        parts.append(_pieces(table[:, column], within, device))
    return _EqualRows(start, stop, keys, tuple(parts))


def _pieces(pages: np.ndarray, within: slice, device: torch.device) -> tuple[_PageRows, ...]:
    """Groups rows that read `pages` [n] into runs in which equally many neighbours share each page."""
    first = np.flatnonzero(np.diff(pages, prepend=-1))
    each = np.diff(first, append=len(pages))
    distinct = pages[first]
    # Consecutive pages are read without a copy. Runs are split for that only if few products come of it.
    apart = np.diff(distinct, prepend=distinct[:1]) != 1
    changes = np.diff(each, prepend=each[:1]) != 0
    for breaks in (changes | (apart & (each == 1)), changes):
        edges = np.unique(np.concatenate([[0], np.flatnonzero(breaks), [len(first)]]))
        if len(edges) - 1 <= max(2, len(pages) // 4):
            bounds = [*first[edges[:-1]].tolist(), len(pages)]
            return tuple(
                _piece(distinct[a:b], bounds[place], bounds[place + 1], within, device)
                for place, (a, b) in enumerate(pairwise(edges.tolist()))
            )
    return (_piece(pages, 0, len(pages), within, device),)


def _piece(pages: np.ndarray, start: int, stop: int, within: slice, device: torch.device) -> _PageRows:
    neighbours = bool((np.diff(pages) == 1).all())
    ids = None if neighbours else torch.from_numpy(pages).to(device)
    return _PageRows(start, stop, (stop - start) // len(pages), within, int(pages[0]), ids)

"""Layouts of packed rows for attention tests, and what attention over them is by definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mint.engine.packing import Span

LAYOUTS = {
    "groups of one size": [(40, [31] * 6), (40, [31, 30, 29, 31, 32, 25]), (40, [27] * 6)],
    "groups of several sizes": [(40, [31] * 6), (40, [31, 30, 7, 32, 25]), (17, [27, 1, 90])],
    "nothing shared": [(33, []), (100, []), (5, [])],
    "longer than a tile": [(300, [200, 129]), (128, [128, 1])],
    "one row": [(1, [])],
}
"""For each group the rows of a prefix, and the lengths of the spans that share it."""


def lay_out(groups: Sequence[tuple[int, Sequence[int]]]) -> list[Span]:
    """Spans one after the other, each prefix before those that share it."""
    spans, start = [], 0
    for shared, lengths in groups:
        prefix = (start, start + shared)
        spans.append(Span(*prefix))
        start += shared
        for length in lengths:
            spans.append(Span(start, start + length, prefix))
            start += length
    return spans


def attend_by_definition(
    heads: Tensor, spans: Sequence[Span], kv_heads: int, window: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """softmax(q·k / √D) · v of every row over its prefix and what is before it in its span, or the last `window` of
    these; `sinks` [query heads] are further logits, whose values are 0."""
    query_heads, size = heads.shape[1] - 2 * kv_heads, heads.shape[2]
    out = []
    for span in spans:
        seen = torch.cat([heads[slice(*span.prefix)], heads[span.start : span.stop]])
        query, key, value = seen.split([query_heads, kv_heads, kv_heads], dim=1)
        key, value = (x.repeat_interleave(query_heads // kv_heads, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / size**0.5
        hidden = torch.ones(len(seen), len(seen), dtype=torch.bool, device=heads.device).triu(1)
        if window:
            hidden |= torch.ones_like(hidden).tril(-window)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            added = sinks.to(scores.dtype)[:, None, None].expand(-1, len(seen), 1)
            scores, value = torch.cat([added, scores], dim=-1), torch.cat([torch.zeros_like(value[:1]), value])
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
        out.append(mixed[span.prefix_length :].flatten(1))
    return torch.cat(out)

"""Prefill: runs prompts, or parts of them, and stores their keys and values in the KV cache.

The tokens before a part are read from the cache, which gives the same bits as computing them again. Knows nothing of
jobs, drawing or who shares cells.

Letters: T tokens computed · X tokens read · H all heads · D head dimension · E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mint.engine.lora import LoraRows, LoraWeights, rows_of
from mint.engine.model.attention import CHUNK
from mint.engine.model.decoder import Decoder
from mint.engine.packing import Span, attention_blocks
from mint.engine.sampling.kv_cache import KVCache
from mint.engine.upload import upload


@dataclass(frozen=True)
class PromptPart:
    """The beginning of a prompt. The keys and values of its first `start` tokens are in the `cells` already."""

    tokens: np.ndarray
    start: int
    cells: np.ndarray
    lora: LoraWeights | None


def run_prompts(decoder: Decoder, cache: KVCache, parts: Sequence[PromptPart]) -> Tensor:
    """Hidden states [T, E] of all tokens from each part's `start` on, one part after the other."""
    positions = [np.arange(part.start, len(part.tokens)) for part in parts]
    before = [np.arange(part.start) for part in parts]
    known = sum(part.start for part in parts)
    packed = decoder.packed_attention(attention_blocks(_spans(parts, known)))
    places = [
        cache.list_places(
            np.concatenate([part.cells[own // CHUNK] for part, own in zip(parts, rows, strict=True)]),
            np.concatenate(rows),
        )
        for rows in (positions, before)
    ]
    computed = np.concatenate([part.tokens[part.start :] for part in parts])
    tokens, place, written, read = upload(decoder.device, computed, np.concatenate(positions), *places)

    def attention(layer: int, heads: Tensor) -> Tensor:
        cache.write(layer, heads, written)
        if not known:
            return packed(layer, heads)
        extended = heads.new_zeros(known + len(heads), *heads.shape[1:])
        extended[:known, cache.query_heads :] = cache.read(layer, read)
        extended[known:] = heads
        return packed(layer, extended)

    return decoder.forward(tokens, place, attention, _spread(parts))


def _spans(parts: Sequence[PromptPart], known: int) -> list[Span]:
    """The rows of the parts: first the cached rows of all parts, then the rows to compute."""
    spans, start, first = [], known, 0
    for part in parts:
        stop = start + len(part.tokens) - part.start
        spans.append(Span(start, stop, (first, first + part.start) if part.start else (0, 0)))
        start, first = stop, first + part.start
    return spans


def _spread(parts: Sequence[PromptPart]) -> list[LoraRows]:
    """The parts' loras as runs over their tokens."""
    ends = np.cumsum([len(part.tokens) - part.start for part in parts]).tolist()
    runs = rows_of([part.lora for part in parts])
    return [LoraRows(ends[run.start - 1] if run.start else 0, ends[run.stop - 1], run.weights) for run in runs]

"""Prefill: runs prompts, or parts of them, and stores their keys and values in the KV cache.

The tokens before a part are read from the cache, which gives the same bits as computing them again.

Letters: T tokens computed · X tokens read · H all heads · D head dimension · E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mint.engine.lora import LoraWeights, rows_of
from mint.engine.model.attention import PAGE_POSITIONS
from mint.engine.model.decoder import Decoder
from mint.engine.packing import Span, attention_blocks
from mint.engine.sampling.kv_cache import KVCache
from mint.engine.upload import upload


@dataclass(frozen=True)
class PromptPart:
    """The beginning of a prompt. The keys and values of its first `start` tokens are in the `pages` already."""

    tokens: np.ndarray
    start: int
    pages: np.ndarray
    lora: LoraWeights | None


def run_prompts(decoder: Decoder, cache: KVCache, parts: Sequence[PromptPart]) -> Tensor:
    """Hidden states [T, E] of all tokens from each part's `start` on, one part after the other."""
    # The rows of attention: first those that are read from the cache, of all parts, then those to compute.
    known = sum(part.start for part in parts)
    spans = []
    counts = []
    first = 0
    row = known
    tokens = []
    positions = []
    positions_before = []
    pages = []
    pages_before = []
    for part in parts:
        before = np.arange(part.start)
        own = np.arange(part.start, len(part.tokens))
        spans.append(Span(row, row + len(own), (first, first + part.start) if part.start else (0, 0)))
        first += part.start
        row += len(own)
        counts.append(len(own))
        tokens.append(part.tokens[part.start :])
        positions.append(own)
        positions_before.append(before)
        pages.append(part.pages[own // PAGE_POSITIONS])
        pages_before.append(part.pages[before // PAGE_POSITIONS])
    packed = decoder.packed_attention(attention_blocks(spans))
    computed, places, written, read = upload(
        decoder.device,
        np.concatenate(tokens),
        np.concatenate(positions),
        cache.list_places(np.concatenate(pages), np.concatenate(positions)),
        cache.list_places(np.concatenate(pages_before), np.concatenate(positions_before)),
    )

    def attention(layer: int, heads: Tensor) -> Tensor:
        cache.write(layer, heads, written)
        if not known:
            return packed(layer, heads)
        extended = heads.new_zeros(known + len(heads), *heads.shape[1:])
        extended[:known, cache.query_heads :] = cache.read(layer, read)
        extended[known:] = heads
        return packed(layer, extended)

    loras = rows_of([part.lora for part in parts], counts)
    return decoder.forward(computed, places, attention, loras)

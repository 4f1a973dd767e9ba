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
from mint.engine.packing import Span, StateSpans, attention_blocks
from mint.engine.sampling.kv_cache import KVCache
from mint.engine.sampling.state_cache import StateCache
from mint.engine.transfers import upload


@dataclass(frozen=True)
class PromptPart:
    """The beginning of a prompt. The keys and values of its first `start` tokens are in the `pages` already."""

    tokens: np.ndarray
    start: int
    pages: np.ndarray
    lora: LoraWeights | None
    states: PartStates | None = None


@dataclass(frozen=True)
class PartStates:
    """Where the state of a part lies: it starts from the one in the slot `loaded` (-1: from nothing), and the last one
    goes to `own`. Those after the first `length` tokens, for each (length, slot) of `cuts`, are kept, too."""

    loaded: int
    own: int
    cuts: Sequence[tuple[int, int]]


def run_prompts(
    decoder: Decoder, cache: KVCache, parts: Sequence[PromptPart], states: StateCache | None = None
) -> Tensor:
    """Hidden states [T, E] of all tokens from each part's `start` on, one part after the other. The states of delta
    nets are in `states`."""
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

    def attention(layer: int, heads: Tensor, sinks: Tensor | None) -> Tensor:
        cache.write(layer, heads, written)
        if not known:
            return packed(layer, heads, sinks)
        extended = heads.new_zeros(known + len(heads), *heads.shape[1:])
        extended[:known, cache.query_heads :] = cache.read(layer, read)
        extended[known:] = heads
        return packed(layer, extended, sinks)

    loras = rows_of([part.lora for part in parts], counts)
    delta_rule = None if states is None else decoder.delta_rule(_state_spans(parts), states.of_layer)
    return decoder.forward(computed, places, attention, loras, delta_rule=delta_rule)


def _state_spans(parts: Sequence[PromptPart]) -> StateSpans:
    """The rows to compute, one part after the other, cut where a state is kept."""
    spans: list[tuple[int, int, int, int]] = []
    groups = [0]
    row = 0
    for part in parts:
        if part.states is None:
            raise ValueError("a prompt has no slot for its state")
        loaded = part.states.loaded
        start = part.start
        for length, slot in (*part.states.cuts, (len(part.tokens), part.states.own)):
            spans.append((row, row + length - start, loaded, slot))
            row += length - start
            start, loaded = length, slot
        groups.append(len(spans))
    return StateSpans(*np.array(spans, np.int64).T.copy(), np.array(groups))

"""The rules of attention that give a row the same bits in training, in prefill and in decoding.

A query at position t attends to the first (t // BLOCK + 1) · BLOCK keys; those after t are masked. Nothing else about
the batch reaches its arithmetic: not the neighbours, not the length of its sequence, not whether it is computed alone
(a decoded token) or with the rest of its block. So the sampler's logprobs equal the trainer's to the last bit, wherever
products of at least `MIN_QUERIES` rows treat each row alike (measured for float32 and bfloat16 on CPUs, and tested).

In a layer with a window, keys that lie further back are masked, too. Where a query head has a sink, its logit takes
part in the softmax of each of its queries.

`packed_attention` follows these rules for many rows of a sequence, `sampling/decode_attention` for one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 32
"""Positions of a block: its queries attend to equally many keys."""

PAGE_POSITIONS = 64
"""Positions of a page of the KV cache. Sums over values are cut at multiples of this, and once more at `BLOCK`; the
parts are added in order, in float32. So samples can be multiplied with the keys of a shared prompt in one product and
with their own keys in another."""

MIN_QUERIES = 4
"""Below this, BLAS multiplies matrix and vector in another order (measured)."""


def cuts(keys: int) -> list[tuple[int, int]]:
    """The keys `start:stop` of each part of a sum over so many keys, a multiple of `BLOCK`."""
    edges = [0, *range(PAGE_POSITIONS, keys, PAGE_POSITIONS), keys]
    if keys > BLOCK:
        edges.insert(1, BLOCK)
    return list(pairwise(edges))


def hide_keys(scores: Tensor, positions: Tensor, window: int) -> None:
    """Masks in `scores` [..., keys] what lies before the last `window` keys of queries at `positions` [..., 1]."""
    keys = torch.arange(scores.shape[-1], device=scores.device)
    scores.masked_fill_(keys <= positions - window, -math.inf)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Probabilities of keys [..., keys], contiguous, which share 1 with those of `sinks` [..., 1], if given."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    # Torch's softmax of a row depends on that row alone, which a quotient of its own could not promise.
    both = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    return torch.softmax(both, dim=-1)[..., :-1].contiguous()


def add_parts(parts: Iterable[Tensor]) -> Tensor:
    """The sum of `parts` in order, in float32, rounded to their own dtype at the end; may overwrite the first part."""
    remaining = iter(parts)
    first = next(remaining)
    total = first.float()
    for part in remaining:
        total.add_(part)
    return total.to(first.dtype)

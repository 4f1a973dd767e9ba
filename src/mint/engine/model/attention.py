"""The rules of attention by which a row's bits are the same in training, in prefill and in decoding.

A query at position t attends to the first (t // BLOCK + 1) · BLOCK keys, those after t masked; nothing else about the
batch reaches its arithmetic: not the neighbours, not the length of its sequence, not whether it came alone (a decoded
token) or with the others of its block. So the sampler's logprobs are the trainer's, to the last bit where products of
at least `MIN_QUERIES` rows treat each row alike (measured for float32 and bfloat16 on CPUs, and tested).

Whoever attends keeps to them: `packed_attention` for many rows of a sequence, `decode_attention` for one.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from torch import Tensor

BLOCK = 32
"""Queries whose positions agree in t // BLOCK attend to equally many keys."""

CHUNK = 64
"""Sums over values are cut at keys that are multiples of this, and the first once more at `BLOCK`; their parts are
added in order, in float32. So samples that share the keys of their prompt may be multiplied with those in one product,
and with their own in another."""

MIN_QUERIES = 4
"""Below this, BLAS multiplies matrix and vector in another order (measured)."""


def cuts(keys: int) -> list[tuple[int, int]]:
    """The keys `start:stop` of each part of a sum over so many keys, a multiple of `BLOCK`."""
    edges = [0, *range(CHUNK, keys, CHUNK), keys]
    if keys > BLOCK:
        edges.insert(1, BLOCK)
    return list(pairwise(edges))


def add_parts(parts: Iterable[Tensor]) -> Tensor:
    """Their sum in order, in float32 and then in their own dtype; may overwrite the first."""
    remaining = iter(parts)
    first = next(remaining)
    total = first.float()
    for part in remaining:
        total.add_(part)
    return total.to(first.dtype)

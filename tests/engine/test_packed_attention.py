"""Attention of packed rows: values and gradients against the definition in float64, span by span."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from mint.engine import packed_attention
from mint.engine.packed_attention import PackedAttention
from mint.engine.packing import Span, attention_blocks

QUERY_HEADS, KV_HEADS, SIZE = 4, 2, 8


def _spans(groups: list[tuple[int, list[int]]]) -> list[Span]:
    """For each group a prefix of some rows, and spans of some lengths that share it."""
    spans, start = [], 0
    for shared, lengths in groups:
        prefix = (start, start + shared)
        spans.append(Span(*prefix))
        start += shared
        for length in lengths:
            spans.append(Span(start, start + length, prefix))
            start += length
    return spans


def _defined(heads: Tensor, spans: list[Span]) -> Tensor:
    """softmax(q·k / √D) · v of every row over its prefix and what is before it in its span."""
    out = []
    for span in spans:
        seen = torch.cat([heads[slice(*span.prefix)], heads[span.start : span.stop]])
        query, key, value = seen.split([QUERY_HEADS, KV_HEADS, KV_HEADS], dim=1)
        key, value = (x.repeat_interleave(QUERY_HEADS // KV_HEADS, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / SIZE**0.5
        hidden = torch.ones(len(seen), len(seen), dtype=torch.bool).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)
        out.append(mixed[span.prefix_length :].flatten(1))
    return torch.cat(out)


@pytest.mark.parametrize(
    "groups",
    [
        [(40, [31] * 6), (40, [31, 30, 29, 31, 32, 25]), (40, [27] * 6)],  # one size: multiplied by group
        [(40, [31] * 6), (40, [31, 30, 7, 32, 25]), (17, [27, 1, 90])],  # several sizes
        [(33, []), (100, []), (5, [])],  # nothing shared
    ],
)
@pytest.mark.parametrize("kept", [packed_attention.KEPT_SHARES, 0])
@pytest.mark.parametrize("least", [1, packed_attention.MIN_PREFIX_KEYS, 1 << 30])
def test_values_and_gradients_are_those_of_the_definition(
    groups: list[tuple[int, list[int]]], kept: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_attention, "KEPT_SHARES", kept)
    monkeypatch.setattr(packed_attention, "MIN_PREFIX_KEYS", least)
    spans = _spans(groups)
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(spans[-1].stop, QUERY_HEADS + 2 * KV_HEADS, SIZE, generator=generator).requires_grad_()
    expected_heads = heads.detach().double().requires_grad_()
    out = PackedAttention(attention_blocks(spans), QUERY_HEADS, KV_HEADS, heads.device)(0, heads)
    expected = _defined(expected_heads, spans)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    grad = torch.randn(out.shape, generator=generator)
    out.backward(grad)
    expected.backward(grad.double())
    assert heads.grad is not None
    torch.testing.assert_close(heads.grad.double(), expected_heads.grad, rtol=1e-5, atol=1e-5)


def test_a_prefix_is_multiplied_once_for_groups_of_one_size() -> None:
    blocks = attention_blocks(_spans([(40, [31] * 16), (40, [30] * 16)]))
    parts = PackedAttention(blocks, QUERY_HEADS, KV_HEADS, torch.device("cpu")).backward.parts
    assert [len(own) for own in parts] == [1, 2]
    own, prefixes = parts[1]
    assert (own.products, prefixes.products) == (KV_HEADS * 32, KV_HEADS * 2)
    assert np.unique(prefixes.places.numpy()).size == prefixes.places.numel() == KV_HEADS * 80

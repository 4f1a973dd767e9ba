"""Attention of packed rows: values and gradients against the definition in float64, span by span."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from packed_layouts import LAYOUTS, attend_by_definition, lay_out

from mint.engine.model import packed_attention
from mint.engine.model.packed_attention import PackedAttention
from mint.engine.packing import attention_blocks

QUERY_HEADS, KV_HEADS, SIZE = 4, 2, 8


SINKS = torch.tensor([-3.0, 0.5, 4.0, 60.0])


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("saved", [packed_attention.SAVED_PROBABILITIES, 0])
@pytest.mark.parametrize(
    ("least", "window"), [(1, 0), (packed_attention.MIN_PREFIX_KEYS, 0), (1 << 30, 0), (1, 20), (1 << 30, 70)]
)
def test_values_and_gradients_are_those_of_the_definition(
    name: str, saved: int, least: int, window: int, sinks: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_attention, "SAVED_PROBABILITIES", saved)
    monkeypatch.setattr(packed_attention, "MIN_PREFIX_KEYS", least)
    spans = lay_out(LAYOUTS[name])
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(spans[-1].stop, QUERY_HEADS + 2 * KV_HEADS, SIZE, generator=generator).requires_grad_()
    expected_heads = heads.detach().double().requires_grad_()
    windows = {1: window} if window else {}
    attention = PackedAttention(attention_blocks(spans), QUERY_HEADS, KV_HEADS, heads.device, windows)
    out = attention(1, heads, sinks)
    expected = attend_by_definition(expected_heads, spans, KV_HEADS, window, sinks)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    grad = torch.randn(out.shape, generator=generator)
    out.backward(grad)
    expected.backward(grad.double())
    assert heads.grad is not None
    torch.testing.assert_close(heads.grad.double(), expected_heads.grad, rtol=1e-5, atol=1e-5)


def test_a_prefix_is_multiplied_once_for_groups_of_one_size() -> None:
    blocks = attention_blocks(lay_out([(40, [31] * 16), (40, [30] * 16)]))
    parts = PackedAttention(blocks, QUERY_HEADS, KV_HEADS, torch.device("cpu")).backward.parts
    assert [len(own) for own in parts] == [1, 2]
    own, prefixes = parts[1]
    assert (own.products, prefixes.products) == (KV_HEADS * 32, KV_HEADS * 2)
    assert np.unique(prefixes.places.numpy()).size == prefixes.places.numel() == KV_HEADS * 80

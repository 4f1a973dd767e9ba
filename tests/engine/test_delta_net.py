"""Delta nets against their formulas in float64, token by token, with torch's own autograd."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_models import write_model
from torch import Tensor

from mint.engine.cpu.build import COMPILERS
from mint.engine.cpu.kernels import NativeKernels
from mint.engine.cpu.operations import CpuOperations, NativeOperations
from mint.engine.model.config import DecoderConfig, DeltaNetConfig, read_decoder_config
from mint.engine.model.delta_net import RecurrentStates, empty_states
from mint.engine.model.linear import DenseMatrix
from mint.engine.model.weights import DeltaNetWeights
from mint.engine.packing import Span, StateSpans, state_spans
from mint.errors import InvalidRequestError

EPS = 1e-6
NETS = {
    "two value heads for a key head": (2, 4, 16, 32, 4),
    "one block of 16 columns": (1, 1, 32, 16, 4),
    "three blocks of 16 columns": (2, 2, 16, 48, 2),
    "a long convolution": (1, 2, 16, 64, 6),
}
SPANS = [
    Span(0, 5),
    Span(5, 45),
    Span(45, 46, (5, 45)),
    Span(46, 79, (5, 45)),
    Span(79, 81),
    Span(81, 84, (79, 81)),
    Span(84, 86, (79, 81)),
]
"""Alone; continuations of one prompt; and continuations of a prompt that is shorter than the convolution."""


def _config(heads: str) -> DecoderConfig:
    key_heads, value_heads, key_dim, value_dim, taps = NETS[heads]
    return read_decoder_config(
        {
            "model_type": "qwen3_5_text", "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80,
            "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": 512,
            "rms_norm_eps": EPS, "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads,
            "linear_key_head_dim": key_dim, "linear_value_head_dim": value_dim, "linear_conv_kernel_dim": taps,
        }
    )  # fmt: skip


def _net(config: DecoderConfig) -> DeltaNetConfig:
    assert config.delta_net is not None
    return config.delta_net


def _weights(net: DeltaNetConfig) -> DeltaNetWeights:
    empty = DenseMatrix(torch.zeros(1, 1))
    return DeltaNetWeights(
        inputs=empty,
        taps=torch.randn(net.taps, net.channels) * 0.7,
        decay_rates=torch.rand(net.value_heads) * 2,
        decay_bias=torch.randn(net.value_heads) - 2,
        norm=torch.rand(net.value_dim) + 0.5,
        o=empty,
    )


def _exact(wide: Tensor, net: DeltaNetConfig, weights: DeltaNetWeights) -> Tensor:
    """What a whole sequence reads [L, U] of wide [L, W], all in float64."""
    length = len(wide)
    channels, gate, beta, decay = wide.split(list(net.inputs.values()), dim=-1)
    padded = F.pad(channels, (0, 0, net.taps - 1, 0))
    taps = weights.taps.double()
    mixed = F.silu(torch.stack([(padded[t : t + net.taps] * taps).sum(0) for t in range(length)]))
    query, key, value = mixed.split([net.key_size, net.key_size, net.value_size], dim=-1)
    query, key = (part.view(length, net.key_heads, net.key_dim) for part in (query, key))
    query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    value = value.view(length, net.value_heads, net.value_dim)
    decay = torch.exp(-weights.decay_rates.double() * F.softplus(decay + weights.decay_bias.double()))
    found = []
    for head in range(net.value_heads):
        own = head * net.key_heads // net.value_heads
        state = torch.zeros(net.key_dim, net.value_dim, dtype=torch.float64)
        reads = []
        for t in range(length):
            state = state * decay[t, head]
            step = torch.sigmoid(beta[t, head]) * (value[t, head] - key[t, own] @ state)
            state = state + torch.outer(key[t, own], step)
            reads.append(query[t, own] @ state / net.key_dim**0.5)
        read = torch.stack(reads)
        found.append(read / (read.square().mean(-1, keepdim=True) + EPS).sqrt() * weights.norm.double())
    return torch.stack(found, dim=1).flatten(1) * F.silu(gate)


def _exact_packed(wide: Tensor, net: DeltaNetConfig, weights: DeltaNetWeights) -> Tensor:
    out = torch.zeros(len(wide), net.value_size, dtype=torch.float64)
    for span in SPANS:
        whole = torch.cat([wide[slice(*span.prefix)], wide[span.start : span.stop]])
        out[span.start : span.stop] = _exact(whole, net, weights)[span.prefix_length :]
    return out


@pytest.fixture(params=["torch", "native"])
def operations(request: pytest.FixtureRequest, native_folder: Path) -> CpuOperations:
    if request.param == "torch":
        return CpuOperations(torch.float32)
    if not any(shutil.which(name) for name in COMPILERS):
        pytest.skip("there is no C compiler")
    return NativeOperations(torch.float32, NativeKernels(native_folder))


@pytest.mark.parametrize("heads", NETS)
def test_reads_and_gradients_are_those_of_float64(heads: str, operations: CpuOperations) -> None:
    torch.manual_seed(3)
    config = _config(heads)
    net, weights = _net(config), _weights(_net(config))
    wide = torch.randn(86, sum(net.inputs.values()), requires_grad=True)
    slopes = torch.randn(86, net.value_size)
    rule = operations.delta_rule(state_spans(SPANS), config, None)
    read = rule(0, weights, wide)
    (found,) = torch.autograd.grad(read, wide, slopes)
    exact_wide = wide.detach().double().requires_grad_()
    exact = _exact_packed(exact_wide, net, weights)
    (expected,) = torch.autograd.grad(exact, exact_wide, slopes.double())
    assert (read - exact).abs().max() <= 1e-5 * exact.abs().max()
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    with torch.no_grad():
        assert torch.equal(rule(0, weights, wide), read)


@pytest.mark.parametrize("heads", NETS)
def test_a_sequence_has_the_same_bits_however_it_is_cut(heads: str, operations: CpuOperations) -> None:
    """In one go, in parts, and token by token beside others."""
    torch.manual_seed(4)
    config = _config(heads)
    net, weights = _net(config), _weights(_net(config))
    wide = torch.randn(40, sum(net.inputs.values()))
    with torch.no_grad():
        whole = operations.delta_rule(state_spans([Span(0, 40)]), config, None)(0, weights, wide)
        states = empty_states(net, 3, torch.device("cpu"))
        parts = operations.delta_rule(_spans([(0, 7, -1, 1), (7, 8, 1, 2), (8, 40, 2, 0)]), config, lambda _: states)
        assert torch.equal(parts(0, weights, wide), whole)
        last = RecurrentStates(states.windows[0].clone(), states.heads[0].clone())
        others = torch.randn(40, 2, wide.shape[1])
        for step in range(40):
            loaded = -1 if step == 0 else 1
            own = StateSpans(*(np.array(part) for part in ([0, 1, 2], [1, 2, 3], [2, loaded, -1], [2, 1, -1])),
                             np.arange(4))  # fmt: skip
            rows = torch.stack([others[step, 0], wide[step], others[step, 1]])
            read = operations.delta_rule(own, config, lambda _: states)(0, weights, rows)
            assert torch.equal(read[1], whole[step]), step
        assert torch.equal(states.windows[1], last.windows) and torch.equal(states.heads[1], last.heads)


def _spans(rows: list[tuple[int, int, int, int]]) -> StateSpans:
    """One group of spans: start, stop, and the slots that are loaded and kept."""
    return StateSpans(*np.array(rows, np.int64).T.copy(), np.array([0, len(rows)]))


def test_gradients_have_the_same_bits_for_any_number_of_threads(native_folder: Path) -> None:
    if not any(shutil.which(name) for name in COMPILERS):
        pytest.skip("there is no C compiler")
    torch.manual_seed(5)
    config = _config("two value heads for a key head")
    weights = _weights(_net(config))
    wide = torch.randn(86, sum(_net(config).inputs.values()), requires_grad=True)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        rule = NativeOperations(torch.float32, NativeKernels(native_folder)).delta_rule(
            state_spans(SPANS), config, None
        )
        found.append(torch.autograd.grad(rule(0, weights, wide).square().sum(), wide)[0])
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_a_model_without_full_attention_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path, "tied", family="qwen3_5_text")
    settings = {**model.config.to_dict(), "layer_types": ["linear_attention"] * 2}
    with pytest.raises(InvalidRequestError, match="layer_types"):
        read_decoder_config(settings)

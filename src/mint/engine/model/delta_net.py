"""Gated delta nets (arXiv 2412.06464) over packed rows: what mixes rows in place of attention, from state to state.

A value head has a matrix S [key dimension, value dimension]. Row by row it decays, one value is written at the row's
key, and the row's query reads:

    S = exp(-rate · softplus(a + bias)) · S        u = sigmoid(b) · (value - key @ S)
    S = S + key outer u                            out = norm(query @ S) · silu(z)

Query, key and value are first convolved over the last rows, query and key then divided by their length. Everything is
computed in float32, row by row in order, so a row has the same bits in training, prefill and decoding, wherever its
sequence is cut into spans.

Here is the interface, and the reference in plain torch, which runs spans side by side. Its backward computes the scan
again, `CHUNK` rows at a time.

Letters: T rows · n spans · L rows of the longest · C channels of the convolution · K its rows · N value heads · D their
dimension · F the key dimension · U = N·D · W = C + U + 2·N.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.model.autograd import AutogradFunction
from mint.engine.model.config import ALIGNED, DecoderConfig, DeltaNetConfig
from mint.engine.model.functions import multiply_each
from mint.engine.model.weights import DeltaNetWeights
from mint.engine.packing import StateSpans
from mint.engine.transfers import upload

CHUNK = 32
"""Rows whose states a backward keeps at once."""

LENGTH_EPS = 1e-6
"""Added to the squared length of a query or a key."""


@dataclass(frozen=True)
class RecurrentStates:
    """States of one layer by slot, float32: the last inputs of the convolution, and the matrices of the heads."""

    windows: Tensor  # [slots, K - 1, C]
    heads: Tensor  # [slots, N, F, D]


StatesOfLayers = Callable[[int], RecurrentStates]
"""The states of a layer, by its number."""


class RowFunctions(Protocol):
    """What the reference needs of a device."""

    def activate(self, gate: Tensor) -> Tensor:
        """silu of rows [T, ·]."""
        ...

    def by_rows(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """An elementwise `function` of x [T, ·], with the same bits for a row whatever the other rows are."""
        ...


def empty_states(net: DeltaNetConfig, slots: int, device: torch.device) -> RecurrentStates:
    """Zeros."""
    return RecurrentStates(
        torch.zeros(slots, net.taps - 1, net.channels, device=device),
        torch.zeros(slots, net.value_heads, net.key_dim, net.value_dim, device=device),
    )


@dataclass(frozen=True)
class _Level:
    """Spans that run side by side: their rows [n, L], padded with rows of their own, and the slots that they start from
    and leave their states in (int64; -1: none)."""

    rows: Tensor
    lengths: Tensor  # [n]
    loaded: Tensor  # [n]
    kept: Tensor  # [n]


class PackedDeltaRule:
    """Delta nets of packed rows; callable as the decoder's `DeltaRule`."""

    def __init__(
        self,
        spans: StateSpans,
        config: DecoderConfig,
        operations: RowFunctions,
        device: torch.device,
        states: StatesOfLayers | None,
    ) -> None:
        """Without `states`, spans share those of a forward alone."""
        if config.delta_net is None:
            raise ValueError("the model has no delta nets")
        self.net = config.delta_net
        self.eps = config.rms_norm_eps
        self.operations = operations
        self._spans = spans
        self._states = states
        self._device = device

    def __call__(self, layer: int, weights: DeltaNetWeights, wide: Tensor) -> Tensor:
        """The normed and gated values [T, U] that the heads read from their states, from the input products [T, W]."""
        states = self.own_states() if self._states is None else self._states(layer)
        levels = [_move(self._spans, level, self._device) for level in self._spans.levels()]
        return _Mix.run(wide, weights, self, levels, states)

    def own_states(self) -> RecurrentStates:
        """Zeros, for the slots of one forward."""
        return empty_states(self.net, max(1, self._spans.slots), self._device)


@dataclass(frozen=True)
class _Inputs:
    """What the scan of a level reads: queries and keys [n, L, N, F] of length 1 (queries also divided by √F), values
    [n, L, N, D], decays and betas [n, L, N], output gates [n, L, U]."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    gate: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.query, self.key, self.value, self.decay, self.beta, self.gate

    def rows(self, rows: slice) -> _Inputs:
        return _Inputs(*(part[:, rows] for part in self.tensors()))


class _Mix(AutogradFunction):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        wide: Tensor,
        weights: DeltaNetWeights,
        plan: PackedDeltaRule,
        levels: Sequence[_Level],
        states: RecurrentStates,
    ) -> Tensor:
        """[T, U] from wide [T, W]; the states of spans go to their slots."""
        out = wide.new_empty(len(wide), plan.net.value_size)
        for level in levels:
            _run_level(wide, weights, plan, states, level, out)
        ctx.save_for_backward(wide)
        ctx.weights, ctx.plan, ctx.levels = weights, plan, levels
        return out

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for wide."""
        (wide,) = ctx.saved_tensors
        plan: PackedDeltaRule = ctx.plan
        states, slopes = plan.own_states(), plan.own_states()
        for level in ctx.levels[:-1]:  # those whose states others start from
            _run_level(wide, ctx.weights, plan, states, level, None)
        grad_wide = torch.zeros_like(wide)
        for level in reversed(ctx.levels):
            _level_gradient(wide, grad, ctx.weights, plan, states, slopes, level, grad_wide)
        return grad_wide, None, None, None, None


def _run_level(
    wide: Tensor,
    weights: DeltaNetWeights,
    plan: PackedDeltaRule,
    states: RecurrentStates,
    level: _Level,
    out: Tensor | None,
) -> None:
    """Runs spans side by side, into `out` [T, U], if given."""
    net = plan.net
    window, heads = _load(states, level)
    rows = wide[level.rows]
    inputs, window = _prepare(rows, window, weights, plan, level)
    read, heads = _scan(inputs, heads, net)
    kept = torch.nonzero(level.kept >= 0)[:, 0]
    states.windows[level.kept[kept]] = window[kept]
    states.heads[level.kept[kept]] = heads[kept]
    if out is not None:
        real = _real(level)
        out[level.rows[real]] = _finish(read, inputs.gate, weights, plan)[real]


def _level_gradient(
    wide: Tensor,
    grad: Tensor,
    weights: DeltaNetWeights,
    plan: PackedDeltaRule,
    states: RecurrentStates,
    slopes: RecurrentStates,
    level: _Level,
    grad_wide: Tensor,
) -> None:
    """Adds the gradient of a level's rows to `grad_wide`, and that of the states it started from to `slopes`."""
    real = _real(level)
    kept = torch.nonzero(level.kept >= 0)[:, 0]
    window, heads = _load(states, level)
    window_slope, heads_slope = torch.zeros_like(window), torch.zeros_like(heads)
    window_slope[kept], heads_slope[kept] = slopes.windows[level.kept[kept]], slopes.heads[level.kept[kept]]
    out_slope = grad.new_zeros(*level.rows.shape, grad.shape[1])
    out_slope[real] = grad[level.rows[real]]
    rows = wide[level.rows].detach().requires_grad_()
    window.requires_grad_()
    with torch.enable_grad():
        inputs, window_after = _prepare(rows, window, weights, plan, level)
    leaves = _Inputs(*(part.detach() for part in inputs.tensors()))
    starts = list(range(0, level.rows.shape[1], CHUNK))
    before = [heads]
    for start in starts[:-1]:
        before.append(_scan(leaves.rows(slice(start, start + CHUNK)), before[-1], plan.net)[1])
    parts = []
    for start, own in zip(reversed(starts), reversed(before), strict=True):
        chunk = slice(start, start + CHUNK)
        with torch.enable_grad():
            tracked = _Inputs(*(part.detach().requires_grad_() for part in leaves.rows(chunk).tensors()))
            own = own.detach().requires_grad_()
            read, after = _scan(tracked, own, plan.net)
            out = _finish(read, tracked.gate, weights, plan)
        *found, heads_slope = torch.autograd.grad(
            [out, after], [*tracked.tensors(), own], [out_slope[:, chunk], heads_slope]
        )
        parts.append(found)
    joined = [torch.cat(part, dim=1) for part in zip(*reversed(parts), strict=True)]
    rows_slope, first_slope = torch.autograd.grad(
        [*inputs.tensors(), window_after], [rows, window], [*joined, window_slope]
    )
    grad_wide[level.rows[real]] = rows_slope[real]
    loaded = torch.nonzero(level.loaded >= 0)[:, 0]
    slopes.windows.index_add_(0, level.loaded[loaded], first_slope[loaded])
    slopes.heads.index_add_(0, level.loaded[loaded], heads_slope[loaded])


def _load(states: RecurrentStates, level: _Level) -> tuple[Tensor, Tensor]:
    """The states that spans start from: windows [n, K - 1, C], heads [n, N, F, D]; zeros where there is none."""
    fresh = level.loaded < 0
    slots = level.loaded.clamp(min=0)
    window, heads = states.windows[slots], states.heads[slots]
    window[fresh], heads[fresh] = 0, 0
    return window, heads


def _prepare(
    rows: Tensor, window: Tensor, weights: DeltaNetWeights, plan: PackedDeltaRule, level: _Level
) -> tuple[_Inputs, Tensor]:
    """From rows [n, L, W] behind windows [n, K - 1, C]; and the windows after them."""
    net = plan.net
    operations = plan.operations
    spans, length, _ = rows.shape
    channels, gate, beta, decay = rows.flatten(0, 1).split(list(net.parts), dim=-1)
    extended = torch.cat([window, channels.view(spans, length, -1)], dim=1)
    # Two steps: a fused multiply-add rounds once or twice depending on a number's place.
    mixed = extended[:, :length] * weights.taps[0]
    for tap in range(1, net.taps):
        mixed = mixed + extended[:, tap : tap + length] * weights.taps[tap]
    active = operations.activate(_apart(mixed.flatten(0, 1))).view(spans, length, -1)
    query, key, value = active.split([net.key_size, net.key_size, net.value_size], dim=-1)
    heads = torch.cat([query, key], dim=-1).unflatten(-1, (2 * net.key_heads, net.key_dim))
    lengths = torch.linalg.vector_norm(heads, dim=-1, keepdim=True)
    heads = heads * (lengths.square() + LENGTH_EPS).rsqrt()
    each = net.value_heads // net.key_heads
    query, key = (part.repeat_interleave(each, dim=2) for part in heads.chunk(2, dim=2))
    log_decay = operations.by_rows(F.softplus, _apart(decay + weights.decay_bias)) * -weights.decay_rates
    shape = spans, length, net.value_heads
    real = _real(level)[..., None]
    inputs = _Inputs(
        query=query * net.key_dim**-0.5,
        key=key,
        value=value.unflatten(-1, (net.value_heads, net.value_dim)),
        decay=operations.by_rows(torch.exp, _apart(log_decay)).view(shape).masked_fill(~real, 1.0),
        beta=operations.by_rows(torch.sigmoid, beta).view(shape).masked_fill(~real, 0.0),
        gate=gate.unflatten(0, (spans, length)),
    )
    last = level.lengths[:, None] + torch.arange(net.taps - 1, device=rows.device)
    return inputs, extended.gather(1, last[..., None].expand(-1, -1, net.channels))


def _scan(inputs: _Inputs, heads: Tensor, net: DeltaNetConfig) -> tuple[Tensor, Tensor]:
    """The values [n, L, N, D] that the queries read from the states, and the states after the last row."""
    overlap = (inputs.query * inputs.key).sum(-1, keepdim=True)
    shape = heads.shape
    state = heads.flatten(0, 1)
    found = []
    for row in range(inputs.key.shape[1]):
        query, key, value, decay, beta, own = (
            part[:, row].flatten(0, 1)
            for part in (inputs.query, inputs.key, inputs.value, inputs.decay, inputs.beta, overlap)
        )
        state = state * decay[:, None, None]
        known, read = multiply_each(torch.stack([key, query], dim=1), state).unbind(1)
        written = (value - known) * beta[:, None]
        # As query @ (state + key outer written), without reading the state again.
        found.append(read + own * written)
        state = state + key[:, :, None] * written[:, None]
    return torch.stack(found, dim=1).view(shape[0], shape[1], -1, net.value_dim).transpose(1, 2), state.view(shape)


def _finish(read: Tensor, gate: Tensor, weights: DeltaNetWeights, plan: PackedDeltaRule) -> Tensor:
    """norm(read) · silu(gate) [n, L, U]."""
    mean = torch.linalg.vector_norm(read, dim=-1, keepdim=True).square() / read.shape[-1]
    normed = read * (mean + plan.eps).rsqrt() * weights.norm
    return normed.flatten(2) * plan.operations.activate(gate.flatten(0, 1)).view(gate.shape)


def _apart(x: Tensor) -> Tensor:
    """A copy of x [T, ·] whose rows do not touch: torch then goes row by row, and each row gets the same bits."""
    copy = x.new_empty(len(x), x.shape[1] + ALIGNED)[:, : x.shape[1]]
    return copy.copy_(x)


def _real(level: _Level) -> Tensor:
    """Which of the rows [n, L] are no padding."""
    return torch.arange(level.rows.shape[1], device=level.rows.device) < level.lengths[:, None]


def _move(spans: StateSpans, members: Sequence[int], device: torch.device) -> _Level:
    own = np.asarray(members)
    starts, stops = spans.starts[own], spans.stops[own]
    columns = np.arange(int((stops - starts).max()))
    rows = np.minimum(starts[:, None] + columns, stops[:, None] - 1)
    return _Level(*upload(device, rows, stops - starts, spans.loaded[own], spans.kept[own]))

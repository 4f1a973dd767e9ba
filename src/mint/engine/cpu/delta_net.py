"""Gated delta nets by the native kernels, for training, prefill and decoding alike.

On a CPU with kernels they replace those of `model/delta_net`, whose letters these are.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.cpu.kernels import LANES, NativeKernels
from mint.engine.cpu.threads import Int64
from mint.engine.model.autograd import AutogradFunction
from mint.engine.model.config import DeltaNetConfig
from mint.engine.model.delta_net import RecurrentStates, StatesOfLayers, empty_states
from mint.engine.model.weights import DeltaNetWeights
from mint.engine.packing import StateSpans

_NO_STATES = RecurrentStates(torch.zeros(0), torch.zeros(0))


class _DeltaNet(ctypes.Structure):
    """`DeltaNet` in delta_net.c; reads the arrays that it points to at every call."""

    _fields_ = (
        ("spans", Int64),
        ("groups", Int64),
        ("key_heads", Int64),
        ("value_heads", Int64),
        ("key_dim", Int64),
        ("value_dim", Int64),
        ("taps", Int64),
        ("starts", ctypes.c_void_p),
        ("stops", ctypes.c_void_p),
        ("loaded", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("edges", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("rates", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )

    def __init__(self, spans: StateSpans, net: DeltaNetConfig, weights: DeltaNetWeights) -> None:
        self.references = spans, weights
        super().__init__(
            spans=len(spans.starts),
            groups=len(spans.groups) - 1,
            key_heads=net.key_heads,
            value_heads=net.value_heads,
            key_dim=net.key_dim,
            value_dim=net.value_dim,
            taps=net.taps,
            starts=_address(spans.starts),
            stops=_address(spans.stops),
            loaded=_address(spans.loaded),
            kept=_address(spans.kept),
            edges=_address(spans.groups),
            kernel=weights.taps.data_ptr(),
            rates=weights.decay_rates.data_ptr(),
            bias=weights.decay_bias.data_ptr(),
        )


class NativeDeltaRule:
    """Delta nets of packed rows; callable as the decoder's `DeltaRule`."""

    def __init__(
        self,
        kernels: NativeKernels,
        spans: StateSpans,
        net: DeltaNetConfig,
        eps: float,
        states: StatesOfLayers | None,
    ) -> None:
        """`eps` is that of the norm. Without `states`, spans share those of a forward alone."""
        self.library = kernels.libraries["delta_net"]
        self.spans = spans
        self.net = net
        self.eps = eps
        self.parts = (len(spans.groups) - 1) * net.key_heads
        self.work = int((spans.stops - spans.starts).sum()) * net.value_size * net.key_dim
        self._states = states

    @staticmethod
    def fit(net: DeltaNetConfig) -> bool:
        """Whether the kernels have loops for such widths."""
        return not net.key_dim % LANES and not net.value_dim % LANES

    def __call__(self, layer: int, weights: DeltaNetWeights, wide: Tensor) -> Tensor:
        """The normed and gated values [T, U] that the heads read from their states, from the input products [T, W]."""
        states = self.own_states() if self._states is None else self._states(layer)
        return _Mix.run(wide, weights, self, states)

    def own_states(self) -> RecurrentStates:
        """Zeros, for the slots of one forward."""
        return empty_states(self.net, self.spans.slots, torch.device("cpu")) if self.spans.slots else _NO_STATES

    def gated_norm(self, read: Tensor, wide: Tensor, weights: DeltaNetWeights) -> Tensor:
        """norm(read) · silu(z) [T, U]."""
        out = torch.empty_like(read)
        self.library.gated_norm(
            len(read),
            read.numel(),
            read=read,
            wide=wide,
            weight=weights.norm,
            eps=self.eps,
            heads=self.net.value_heads,
            dim=self.net.value_dim,
            width=wide.shape[1],
            gate_at=self.net.channels,
            out=out,
        )
        return out

    def read(self, wide: Tensor, weights: DeltaNetWeights, states: RecurrentStates) -> Tensor:
        """The values [T, U] that the queries read from the states; writes the last state of each span to its slot."""
        out = wide.new_empty(len(wide), self.net.value_size)
        self.library.delta_forward(
            self.parts,
            self.work,
            net=_DeltaNet(self.spans, self.net, weights),
            wide=wide,
            windows=states.windows,
            heads=states.heads,
            out=out,
        )
        return out


class _Mix(AutogradFunction):
    @staticmethod
    @override
    def forward(
        ctx: Any, wide: Tensor, weights: DeltaNetWeights, plan: NativeDeltaRule, states: RecurrentStates
    ) -> Tensor:
        """[T, U] from wide [T, W]."""
        read = plan.read(wide, weights, states)
        ctx.save_for_backward(wide, read)
        ctx.weights, ctx.plan = weights, plan
        return plan.gated_norm(read, wide, weights)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for wide."""
        wide, read = ctx.saved_tensors
        plan: NativeDeltaRule = ctx.plan
        weights: DeltaNetWeights = ctx.weights
        grad_wide, grad_read = torch.zeros_like(wide), torch.empty_like(read)
        plan.library.gated_norm_backward(
            len(read),
            read.numel(),
            grad=grad.contiguous(),
            read=read,
            wide=wide,
            weight=weights.norm,
            eps=plan.eps,
            heads=plan.net.value_heads,
            dim=plan.net.value_dim,
            width=wide.shape[1],
            gate_at=plan.net.channels,
            read_grad=grad_read,
            wide_grad=grad_wide,
        )
        states, slopes = plan.own_states(), plan.own_states()
        plan.library.delta_backward(
            plan.parts,
            4 * plan.work,
            net=_DeltaNet(plan.spans, plan.net, weights),
            wide=wide,
            grad=grad_read,
            windows=states.windows,
            heads=states.heads,
            window_grads=slopes.windows,
            head_grads=slopes.heads,
            out=grad_wide,
        )
        return grad_wide, None, None, None


def _address(array: np.ndarray) -> int:
    if array.dtype != np.int64 or not array.flags.c_contiguous:
        raise AssertionError("kernels read contiguous arrays of int64")
    return array.ctypes.data

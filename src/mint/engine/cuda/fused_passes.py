"""RMS norm and SwiGLU of a training step as Triton kernels: one pass over memory for each, forward and backward.

Torch's own operations read and write hidden states in float32 several times: five passes for a norm's gradient. Liger
Kernel (Hsu et al. 2024, arXiv:2410.10989) fuses the same ones. The weights of norms are frozen, so they have no
gradient. Sums are in float32, and a row is computed alone. Needs Triton, as `cuda/kernels.py` does.

Letters: T rows · E hidden size · I inner width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024
"""Of a SwiGLU in one program."""


class FusedPasses:
    """As the operations of these names in `model/operations.py`, for the activation `silu`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`x / rms(x) · weight` (+ residual) [T, E], and 1 / rms(x) [T, 1]."""
        x = x.contiguous()
        out, inverse = torch.empty_like(x), torch.empty(len(x), 1, device=x.device)
        width = x.shape[1]
        adds = residual is not None
        added = x if residual is None else residual.contiguous()
        _norm[(len(x),)](x, weight, added, out, inverse, eps, width, adds, triton.next_power_of_2(width))
        return out, inverse

    def rms_norm_backward(
        self, grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        """The gradient for x [T, E] from that of the norm (+ residual); `inverse` [T, 1] as `rms_norm` gave it."""
        grad, x = grad.contiguous(), x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[1]
        adds = residual is not None
        added = x if residual is None else residual.contiguous()
        _norm_gradient[(len(x),)](grad, x, inverse, weight, added, out, width, adds, triton.next_power_of_2(width))
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) · up` [T, I] of gate_up [T, 2·I]."""
        gate_up = gate_up.contiguous()
        count, inner = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(count, inner, device=gate_up.device)
        _swiglu[(count, triton.cdiv(inner, COLUMNS))](gate_up, out, inner, COLUMNS)
        return out

    def swiglu_backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        """The gradient for gate_up [T, 2·I] from grad [T, I]."""
        grad, gate_up = grad.contiguous(), gate_up.contiguous()
        count, inner = grad.shape
        out = torch.empty_like(gate_up)
        _swiglu_gradient[(count, triton.cdiv(inner, COLUMNS))](grad, gate_up, out, inner, COLUMNS)
        return out


@triton.jit
def _norm(x, weight, residual, out, inverse, eps, width, ADDS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, WIDTH)
    real = columns < width
    own = tl.load(x + row + columns, mask=real, other=0.0)
    scale = tl.rsqrt(tl.sum(own * own) / width + eps)
    found = own * scale * tl.load(weight + columns, mask=real, other=0.0)
    if ADDS:
        found += tl.load(residual + row + columns, mask=real, other=0.0)
    tl.store(out + row + columns, found, mask=real)
    tl.store(inverse + tl.program_id(0), scale)


@triton.jit
def _norm_gradient(grad, x, inverse, weight, residual, out, width, ADDS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, WIDTH)
    real = columns < width
    own = tl.load(x + row + columns, mask=real, other=0.0)
    scaled = tl.load(grad + row + columns, mask=real, other=0.0) * tl.load(weight + columns, mask=real, other=0.0)
    scale = tl.load(inverse + tl.program_id(0))
    mean = tl.sum(scaled * own) / width
    found = scaled * scale - own * (mean * scale * scale * scale)
    if ADDS:
        found += tl.load(residual + row + columns, mask=real, other=0.0)
    tl.store(out + row + columns, found, mask=real)


@triton.jit
def _swiglu(gate_up, out, inner, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < inner
    gate = tl.load(gate_up + row * (2 * inner) + columns, mask=real, other=0.0)
    up = tl.load(gate_up + row * (2 * inner) + inner + columns, mask=real, other=0.0)
    tl.store(out + row * inner + columns, gate / (1.0 + tl.exp(-gate)) * up, mask=real)


@triton.jit
def _swiglu_gradient(grad, gate_up, out, inner, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < inner
    own = tl.load(grad + row * inner + columns, mask=real, other=0.0)
    gate = tl.load(gate_up + row * (2 * inner) + columns, mask=real, other=0.0)
    up = tl.load(gate_up + row * (2 * inner) + inner + columns, mask=real, other=0.0)
    share = 1.0 / (1.0 + tl.exp(-gate))
    active = gate * share
    slope = share + active * (1.0 - share)
    tl.store(out + row * (2 * inner) + columns, own * up * slope, mask=real)
    tl.store(out + row * (2 * inner) + inner + columns, own * active, mask=real)

"""RMS norm, SwiGLU, and the heads of attention (bias, norms, rotation) as Triton kernels of training and prefill: one
pass over memory for each, forward and backward.

Torch's own operations read and write hidden states in float32 several times: five passes for a norm's gradient, and
as many for a rotation. Liger
Kernel (Hsu et al. 2024, arXiv:2410.10989) fuses the same ones. The weights of norms are frozen, so they have no
gradient. Sums are in float32, and a row is computed alone. Needs Triton, as `cuda/kernels.py` does.

Letters: T rows · E hidden size · I inner width · H all heads · R rotated heads, the first ones · D head dimension.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024
"""Of a SwiGLU in one program."""

HEADS = 16
"""Of a row in one program."""


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

    def finish_heads(
        self,
        qkv: Tensor,
        bias: Tensor | None,
        norms: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        *,
        eps: float,
        rotated_heads: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:
        """Heads [T, H, D] in `dtype` of qkv float32 [T, H, D], to which the bias [H·D] is added in place: the first R
        normed with `norms` [R, D] and rotated by cos and sin [T, 1, D / 2]. And 1 / rms of these [T, R, 1], if normed.
        """
        count, heads, dim = qkv.shape
        out = torch.empty(qkv.shape, dtype=dtype, device=qkv.device)
        inverse = None if norms is None else torch.empty(count, rotated_heads, 1, device=qkv.device)
        _finish_heads[(count, triton.cdiv(heads, HEADS))](
            qkv=qkv,
            bias=qkv if bias is None else bias,
            norms=qkv if norms is None else norms,
            cos=cos.contiguous(),
            sin=sin.contiguous(),
            out=out,
            inverse=qkv if inverse is None else inverse,
            eps=eps,
            heads=heads,
            rotated=rotated_heads,
            DIM=dim,
            BIASED=bias is not None,
            NORMED=norms is not None,
            HEADS=HEADS,
            HALF=triton.next_power_of_2(dim // 2),
        )
        return out, inverse

    def finish_heads_backward(
        self,
        grad: Tensor,
        qkv: Tensor | None,
        inverse: Tensor | None,
        norms: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        *,
        rotated_heads: int,
    ) -> Tensor:
        """The gradient for qkv float32 [T, H, D] from grad [T, H, D]; `inverse` as `finish_heads` gave it.
        Without `norms` qkv and `inverse` may be missing."""
        grad = grad.contiguous()
        count, heads, dim = grad.shape
        out = torch.empty(grad.shape, device=grad.device)
        _finish_heads_gradient[(count, triton.cdiv(heads, HEADS))](
            grad=grad,
            qkv=grad if qkv is None else qkv.contiguous(),
            inverse=grad if inverse is None else inverse,
            norms=grad if norms is None else norms,
            cos=cos.contiguous(),
            sin=sin.contiguous(),
            out=out,
            heads=heads,
            rotated=rotated_heads,
            DIM=dim,
            NORMED=norms is not None,
            HEADS=HEADS,
            HALF=triton.next_power_of_2(dim // 2),
        )
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


@triton.jit
def _finish_heads(
    qkv,
    bias,
    norms,
    cos,
    sin,
    out,
    inverse,
    eps,
    heads,
    rotated,
    DIM: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, half = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    within = half < DIM // 2
    mask = (head < heads)[:, None] & within[None, :]
    turned = head < rotated
    inside = head[:, None] * DIM + half[None, :]
    place = row * heads * DIM + inside
    first = tl.load(qkv + place, mask=mask, other=0.0)
    second = tl.load(qkv + place + DIM // 2, mask=mask, other=0.0)
    if BIASED:
        first += tl.load(bias + inside, mask=mask, other=0.0)
        second += tl.load(bias + inside + DIM // 2, mask=mask, other=0.0)
        tl.store(qkv + place, first, mask=mask)
        tl.store(qkv + place + DIM // 2, second, mask=mask)
    left, right = first, second
    if NORMED:
        known = turned[:, None] & within[None, :]
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + eps)
        left = first * scale[:, None] * tl.load(norms + inside, mask=known, other=0.0)
        right = second * scale[:, None] * tl.load(norms + inside + DIM // 2, mask=known, other=0.0)
        tl.store(inverse + row * rotated + head, scale, mask=turned)
    cosine = tl.load(cos + row * (DIM // 2) + half, mask=within, other=0.0)[None, :]
    sine = tl.load(sin + row * (DIM // 2) + half, mask=within, other=0.0)[None, :]
    kind = out.dtype.element_ty
    tl.store(out + place, tl.where(turned[:, None], left * cosine - right * sine, first).to(kind), mask=mask)
    tl.store(
        out + place + DIM // 2, tl.where(turned[:, None], right * cosine + left * sine, second).to(kind), mask=mask
    )


@triton.jit
def _finish_heads_gradient(
    grad,
    qkv,
    inverse,
    norms,
    cos,
    sin,
    out,
    heads,
    rotated,
    DIM: tl.constexpr,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, half = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    within = half < DIM // 2
    mask = (head < heads)[:, None] & within[None, :]
    turned = head < rotated
    inside = head[:, None] * DIM + half[None, :]
    place = row * heads * DIM + inside
    first = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(grad + place + DIM // 2, mask=mask, other=0.0).to(tl.float32)
    cosine = tl.load(cos + row * (DIM // 2) + half, mask=within, other=0.0)[None, :]
    sine = tl.load(sin + row * (DIM // 2) + half, mask=within, other=0.0)[None, :]
    left = first * cosine + second * sine  # the transpose rotates back
    right = second * cosine - first * sine
    if NORMED:
        known = turned[:, None] & within[None, :]
        left *= tl.load(norms + inside, mask=known, other=0.0)
        right *= tl.load(norms + inside + DIM // 2, mask=known, other=0.0)
        own = tl.load(qkv + place, mask=known, other=0.0)
        other = tl.load(qkv + place + DIM // 2, mask=known, other=0.0)
        scale = tl.load(inverse + row * rotated + head, mask=turned, other=0.0)[:, None]
        mean = ((tl.sum(left * own, 1) + tl.sum(right * other, 1)) / DIM)[:, None] * scale * scale * scale
        left = left * scale - own * mean
        right = right * scale - other * mean
    tl.store(out + place, tl.where(turned[:, None], left, first), mask=mask)
    tl.store(out + place + DIM // 2, tl.where(turned[:, None], right, second), mask=mask)

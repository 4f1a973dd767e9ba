"""The two blocks of a layer around its attention, each one step of autograd with a backward written by hand.

A block keeps its input and one wide product for the backward and computes the rest again; what is kept is in the
dtype of the base's matrices, as the products of the backward are. Knows nothing of sequences, losses or loras' names.

Letters: T rows · E hidden size · H all heads (query, key, value) · D head dimension · I the MLP's inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.cpu.kernels import NativeKernels
from mint.engine.model.functions import inverse_rms, norm_gradient, rotate, silu, swiglu, swiglu_gradient
from mint.engine.model.lora_linear import SiteProduct
from mint.engine.model.weights import LayerWeights

CACHED_ENTRIES, MIN_CHUNK = 1 << 18, 768
"""An MLP takes so many rows at once that its wide product has about so many entries (1 MB), but at least so many rows,
for each chunk reads the weights again."""

Multiply = Callable[[Tensor, Tensor | None], Tensor]
"""(rows [T, inputs], residual) → residual + the product of a site [T, outputs]."""


@dataclass(frozen=True)
class Geometry:
    """What all layers share in one forward; cos and sin [T, 1, D / 2] turn the first `rotated` heads, and `kernels`
    compute what is between the products, if there are any."""

    dtype: torch.dtype
    eps: float
    rotated: int
    head_dim: int
    cos: Tensor
    sin: Tensor
    kernels: NativeKernels | None = None


def project_heads(
    x: Tensor, layer: LayerWeights, multiply: Multiply, geometry: Geometry
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor | None]]:
    """Normed and rotated heads [T, H, D] in the base's dtype from x [T, E]; and 1 / rms of x, the product [T, H, D],
    and 1 / rms of its heads, where they are normed."""
    normed, inverse = _norm(x, layer.input_norm, geometry)
    qkv = multiply(normed, None)
    if geometry.kernels is not None:
        qkv = qkv.view(len(x), -1, geometry.head_dim)
        heads, head_inverse = geometry.kernels.finish_heads(
            *(qkv, layer.qkv_bias, layer.head_norms, geometry.cos, geometry.sin),
            eps=geometry.eps, rotated=geometry.rotated, dtype=geometry.dtype,
        )  # fmt: skip
        return heads, (inverse, qkv, head_inverse)
    if layer.qkv_bias is not None:
        qkv.add_(layer.qkv_bias)
    qkv = qkv.view(len(x), -1, geometry.head_dim)
    rotated, head_inverse = qkv[:, : geometry.rotated], None
    heads = torch.empty(qkv.shape, dtype=torch.float32, device=x.device)
    heads[:, geometry.rotated :] = qkv[:, geometry.rotated :]
    if layer.head_norms is not None:
        head_inverse = inverse_rms(rotated, geometry.eps)
        rotated = (rotated * head_inverse).mul_(layer.head_norms)
    rotate(rotated, geometry.cos, geometry.sin, heads[:, : geometry.rotated])
    return heads.to(geometry.dtype), (inverse, qkv, head_inverse)


def apply_mlp(
    x: Tensor, layer: LayerWeights, gate_up: Multiply, down: Multiply, geometry: Geometry
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """x + MLP(norm(x)) [T, E]; and 1 / rms of x, and the product [T, 2·I] within."""
    normed, inverse = _norm(x, layer.post_norm, geometry)
    wide = gate_up(normed, None)
    inner = swiglu(wide) if geometry.kernels is None else geometry.kernels.swiglu(wide)
    return down(inner, x), (inverse, wide)


def _norm(x: Tensor, weight: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """`x / rms(x) · weight` [T, E], and 1 / rms(x) [T, 1]."""
    if geometry.kernels is not None:
        return geometry.kernels.rms_norm(x, weight, geometry.eps)
    inverse = inverse_rms(x, geometry.eps)
    return (x * inverse).mul_(weight), inverse


def _norm_again(x: Tensor, inverse: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """`_norm` where 1 / rms(x) is known."""
    if geometry.kernels is not None:
        return geometry.kernels.rms_norm_again(x, inverse, weight)
    return (x * inverse).mul_(weight)


def _norm_backward(
    grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, geometry: Geometry, residual: Tensor | None = None
) -> Tensor:
    """The gradient for x through `_norm`, plus `residual`; overwrites `grad`."""
    if geometry.kernels is not None:
        return geometry.kernels.rms_norm_backward(grad, x, inverse, weight, residual)
    out = norm_gradient(grad.mul_(weight), x, inverse)
    return out if residual is None else out.add_(residual)


class Norm(torch.autograd.Function):
    """`x / rms(x) · weight` of rows [T, E]."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
        """[T, E] from x [T, E]."""
        normed, inverse = _norm(x, weight, geometry)
        ctx.save_for_backward(x, inverse, weight)
        ctx.geometry = geometry
        return normed

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient for x."""
        grad = grad.contiguous() if ctx.geometry.kernels is not None else grad.clone()
        return _norm_backward(grad, *ctx.saved_tensors, ctx.geometry), None, None


class AttentionInputs(torch.autograd.Function):
    """`project_heads` of rows that share one lora."""

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, layer: LayerWeights, product: SiteProduct, geometry: Geometry, *parameters: Tensor
    ) -> Tensor:
        """[T, H, D] from x [T, E]; `parameters` are those of `product`, named for autograd."""
        heads, (inverse, qkv, head_inverse) = project_heads(x, layer, product.product, geometry)
        ctx.save_for_backward(x, inverse, qkv.to(geometry.dtype), head_inverse)
        ctx.layer, ctx.product, ctx.geometry = layer, product, geometry
        return heads

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x and the parameters."""
        x, inverse, qkv, head_inverse = ctx.saved_tensors
        layer, product, geometry = ctx.layer, ctx.product, ctx.geometry
        grad_qkv = _unrotate(grad, qkv.float(), head_inverse, layer, geometry)
        normed = _norm_again(x, inverse, layer.input_norm, geometry)
        grad_normed, grads = product.gradient(grad_qkv.flatten(1), normed, for_input=ctx.needs_input_grad[0])
        grad_x = None
        if grad_normed is not None:
            grad_x = _norm_backward(grad_normed, x, inverse, layer.input_norm, geometry)
        return grad_x, None, None, None, *grads


def _unrotate(
    grad: Tensor, qkv: Tensor, head_inverse: Tensor | None, layer: LayerWeights, geometry: Geometry
) -> Tensor:
    """The gradient for the product qkv [T, H, D] from that for the finished heads."""
    if geometry.kernels is not None:
        return geometry.kernels.finish_heads_backward(
            *(grad.contiguous(), qkv, head_inverse, layer.head_norms, geometry.cos, geometry.sin),
            rotated=geometry.rotated,
        )
    out = torch.empty(grad.shape, dtype=torch.float32, device=grad.device)
    out[:, geometry.rotated :] = grad[:, geometry.rotated :]
    turned = out[:, : geometry.rotated]
    rotate(grad[:, : geometry.rotated].float(), geometry.cos, -geometry.sin, turned)  # its transpose turns back
    if head_inverse is not None and layer.head_norms is not None:
        norm_gradient(turned.mul_(layer.head_norms), qkv[:, : geometry.rotated], head_inverse)
    return out


class Mlp(torch.autograd.Function):
    """`apply_mlp` of rows that share one lora."""

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, layer: LayerWeights, gate_up: SiteProduct, down: SiteProduct, geometry: Geometry,
        *parameters: Tensor,
    ) -> Tensor:  # fmt: skip
        """[T, E] from x [T, E]; `parameters` are those of `gate_up`, then of `down`, named for autograd."""
        outs, kept = [], []
        for rows in x.tensor_split(_chunks(x, gate_up)):
            out, (inverse, wide) = apply_mlp(rows, layer, gate_up.product, down.product, geometry)
            outs.append(out)
            kept += [inverse, wide.to(geometry.dtype)]
        ctx.save_for_backward(x, *kept)
        ctx.layer, ctx.gate_up, ctx.down, ctx.geometry = layer, gate_up, down, geometry
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients for x and the parameters."""
        x, *kept = ctx.saved_tensors
        count = len(kept) // 2
        parts = zip(x.tensor_split(count), grad.tensor_split(count), kept[::2], kept[1::2], strict=True)
        grad_xs, sums = [], []
        for rows, own, inverse, wide in parts:
            grad_x, grads = _mlp_gradient(ctx, own, rows, inverse, wide.float())
            grad_xs.append(grad_x)
            sums = grads if not sums else [total.add_(part) for total, part in zip(sums, grads, strict=True)]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_xs[0] if count == 1 else torch.cat(grad_xs)
        return grad_x, None, None, None, None, *sums


def _mlp_gradient(
    ctx: Any, grad: Tensor, x: Tensor, inverse: Tensor, wide: Tensor
) -> tuple[Tensor | None, list[Tensor]]:
    """Gradients for some rows of x, and their part of the parameters'."""
    geometry: Geometry = ctx.geometry
    if geometry.kernels is not None:
        grad_inner, down_grads = ctx.down.gradient(grad, geometry.kernels.swiglu(wide))
        grad_wide = geometry.kernels.swiglu_backward(grad_inner, wide)
    else:
        gate, up = wide.chunk(2, dim=-1)
        silu_gate = silu(gate)
        grad_inner, down_grads = ctx.down.gradient(grad, silu_gate * up)
        grad_wide = swiglu_gradient(grad_inner, wide, silu_gate)
    normed = _norm_again(x, inverse, ctx.layer.post_norm, geometry)
    grad_normed, wide_grads = ctx.gate_up.gradient(grad_wide, normed, for_input=ctx.needs_input_grad[0])
    grad_x = None
    if grad_normed is not None:
        grad_x = _norm_backward(grad_normed, x, inverse, ctx.layer.post_norm, geometry, residual=grad)
    return grad_x, [*wide_grads, *down_grads]


def _chunks(x: Tensor, wide: SiteProduct) -> int:
    """In how many parts the rows of x go through an MLP."""
    if x.is_cuda:
        return 1
    return max(1, round(len(x) / max(MIN_CHUNK, CACHED_ENTRIES // wide.weight.outputs)))

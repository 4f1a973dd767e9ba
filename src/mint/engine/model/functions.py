"""Mathematics of a decoder in plain torch: norms, SwiGLU, rotation and its tables, softmax by rows, products. No
gradients are recorded here.

Letters: T rows (tokens) · I inputs · H heads · D head dimension · R rows of logits · V vocabulary ·
n products · M rows and W columns of a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from mint.engine.model.config import (
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    Activation,
    DecoderConfig,
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / √(mean of x² + eps) over the last dimension, which stays with size 1."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # one pass; squares first would write them out
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def norm_gradient(scaled: Tensor, x: Tensor, inverse: Tensor) -> Tensor:
    """The gradient through `x · inverse`, where `scaled` is that for the normalised x; overwrites `scaled`."""
    mean = (scaled * x).mean(-1, keepdim=True)
    return scaled.mul_(inverse).addcmul_(x, mean.mul_(inverse.pow(3)), value=-1)


def head_inverse_rms(
    heads: Tensor, eps: float, joint: int, inverse: Callable[[Tensor, float], Tensor] = inverse_rms
) -> Tensor:
    """`inverse` of heads [T, H, D], [T, H, 1]; the first `joint` heads have one together, and the others; 0: each its
    own."""
    if not joint:
        return inverse(heads, eps)
    runs = heads[:, :joint], heads[:, joint:]
    return torch.cat([inverse(run.flatten(1), eps)[:, None].expand(-1, run.shape[1], 1) for run in runs], dim=1)


def head_norm_gradient(scaled: Tensor, heads: Tensor, inverse: Tensor, joint: int) -> None:
    """`norm_gradient` of heads [T, H, D] that were normed with `head_inverse_rms`; its result overwrites `scaled`."""
    if not joint:
        norm_gradient(scaled, heads, inverse)
        return
    for run in (slice(0, joint), slice(joint, None)):
        found = norm_gradient(scaled[:, run].flatten(1), heads[:, run].flatten(1), inverse[:, run][:, 0])
        scaled[:, run] = found.view_as(scaled[:, run])


def split_halves(gate_up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Views of gate and up [T, I] in gate_up [T, 2·I]."""
    if activation == "clamped_swiglu":
        return gate_up[:, ::2], gate_up[:, 1::2]
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


def activate(gate: Tensor, activation: Activation) -> Tensor:
    """`activation` of each number, as far as it depends on the gate alone."""
    if activation == "silu":
        return F.silu(gate)
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh")
    clamped = gate.clamp(max=SWIGLU_LIMIT)
    # As columns of a wider matrix: torch then computes row by row, so that a number gets the same bits in each batch.
    scaled = torch.empty_strided(gate.shape, (gate.shape[1] + 1, 1), dtype=gate.dtype, device=gate.device)
    return torch.sigmoid(torch.mul(clamped, SWIGLU_ALPHA, out=scaled)).mul_(clamped)


def gated(up: Tensor, activation: Activation) -> Tensor:
    """The factor of the activated gate: `up`, in a clamped SwiGLU clamped and plus 1."""
    return up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT).add_(1) if activation == "clamped_swiglu" else up


def swiglu_gradient(grad: Tensor, gate_up: Tensor, active_gate: Tensor, activation: Activation) -> Tensor:
    """The gradient for gate_up [T, 2·I] from grad [T, I] and `activation(gate)`; overwrites `grad`."""
    gate, up = split_halves(gate_up, activation)
    out = torch.empty_like(gate_up)
    grad_gate, grad_up = split_halves(out, activation)
    torch.mul(grad, active_gate, out=grad_up)
    if activation == "clamped_swiglu":
        share = torch.sigmoid(gate.clamp(max=SWIGLU_LIMIT) * SWIGLU_ALPHA)
        slope = share + SWIGLU_ALPHA * active_gate * (1 - share)  # of the activated gate
        torch.mul(grad.mul_(gated(up, activation)), slope.masked_fill_(gate > SWIGLU_LIMIT, 0), out=grad_gate)
        grad_up.masked_fill_(up.abs() > SWIGLU_LIMIT, 0)
    elif activation == "silu":
        torch.ops.aten.silu_backward.grad_input(grad.mul_(up), gate, grad_input=grad_gate)
    else:
        torch.ops.aten.gelu_backward.grad_input(grad.mul_(up), gate, approximate="tanh", grad_input=grad_gate)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Rotates the pairs (x[i], x[i + P]) of [T, H, D], as Hugging Face lays them out, into `out`, by cos and sin
    [T, 1, P]. What lies behind the 2·P rotated numbers of a head is copied."""
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
        x, out = x[..., :width], out[..., :width]
    first, second = x.chunk(2, dim=-1)
    torch.mul(x, torch.cat([cos, cos], dim=-1), out=out)  # in one go, for passes over half heads are slow
    out_first, out_second = out.chunk(2, dim=-1)
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)


def rope_tables(config: DecoderConfig, rope: Rope | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, rotary_dim / 2] in float32, computed as Hugging Face does, times `scales.query_key`; None
    rotates nothing."""
    magnitude = config.scales.query_key
    if rope is None:
        shape = config.max_position_embeddings, config.rotary_dim // 2
        return torch.full(shape, magnitude, device=device), torch.zeros(shape, device=device)
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    frequencies = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if isinstance(scaling, Llama3Scaling):
        frequencies = _scale_llama3(frequencies, scaling)
    elif isinstance(scaling, LinearScaling):
        frequencies = frequencies / scaling.factor
    elif isinstance(scaling, YarnScaling):
        frequencies = _scale_yarn(frequencies, scaling, rope.theta, config.rotary_dim)
        magnitude *= scaling.attention_factor
    angles = torch.arange(config.max_position_embeddings, dtype=torch.float32)[:, None] * frequencies
    return (angles.cos() * magnitude).to(device), (angles.sin() * magnitude).to(device)


def _scale_llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Frequencies [rotary_dim / 2] for a context that is `factor` times as long as the original one."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 0 for fewer than `low` turns in the original context
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _scale_yarn(frequencies: Tensor, scaling: YarnScaling, theta: float, dim: int) -> Tensor:
    """Frequencies [rotary_dim / 2] by YaRN: a ramp over the pairs from those that stay to those divided by `factor`."""
    low, high = (_pair_of(turns, scaling, theta, dim) for turns in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    divided = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies * (1 - divided) + frequencies / scaling.factor * divided


def _pair_of(turns: float, scaling: YarnScaling, theta: float, dim: int) -> float:
    """The pair, as a fraction, that turns so many times in the original context."""
    ratio = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
    return dim * math.log(ratio) / (2 * math.log(theta))


def exponentials(logits: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`exp(logits - max)` [R, V], in `out` if given, and the logsumexp [R] of logits float32 [R, V]: the same bits for
    a row, whatever the other rows are. Sampler and trainer share it."""
    best = logits.amax(1, keepdim=True)
    weights = torch.sub(logits, best, out=out).exp_()
    # The sum of a lone row would be split over threads, and added in another order.
    total = weights.sum(1) if len(weights) > 1 else weights.expand(2, -1).sum(1)[:1]
    return weights, total.log_().add_(best.squeeze(1))


def multiply_each(rows: Tensor, others: Tensor) -> Tensor:
    """The products of rows [n, M, ·] with others [n, ·, W], one by one."""
    if len(rows) == 1:  # a lone product would be split over threads, and summed in another order
        return torch.bmm(rows.expand(2, -1, -1), others.expand(2, -1, -1))[:1]
    return torch.bmm(rows, others)


def row_blocks(count: int, size: int) -> Iterator[slice]:
    """Runs of `size` to twice as many rows; a lone row only where it is the only one."""
    for start in range(0, max(1, count - size + 1), size):
        yield slice(start, start + size if count - start >= 2 * size else count)


def first_rows(rows: Tensor, count: int) -> Tensor:
    """The first `count` of `rows`; where there are no others, the tensor itself, because the backward of a slice copies
    the gradient."""
    return rows if len(rows) == count else rows[:count]


def pad_rows(rows: Tensor, least: int) -> Tensor:
    """`rows` with at least `least` along the first dimension; the added ones are zero."""
    missing = least - rows.shape[0]
    return rows if missing <= 0 else torch.nn.functional.pad(rows, (*(0, 0) * (rows.dim() - 1), 0, missing))

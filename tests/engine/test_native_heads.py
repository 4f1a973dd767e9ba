"""What leads to the heads of a layer by one kernel in each direction: the bits of its operations in turn.

Those operations are held against float64 in `test_native.py`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mint.engine.cpu.build import COMPILERS
from mint.engine.cpu.kernels import NativeKernels
from mint.engine.cpu.operations import NativeOperations
from mint.engine.lora import SiteLora, SiteWeights
from mint.engine.model.layer_parts import ForwardContext, GatedOrder, HeadsInTurn
from mint.engine.model.linear import Linear
from mint.engine.model.lora_linear import MergedLinear, SeparateLinear
from mint.engine.model.operations import HeadSettings, TrainedHeads
from mint.engine.model.weights import AttentionWeights

pytestmark = pytest.mark.skipif(not any(shutil.which(name) for name in COMPILERS), reason="there is no C compiler")

EPS, DIM, HIDDEN = 1e-6, 32, 64
QUERIES, KEYS = 4, 2
ROTATED, HEADS = QUERIES + KEYS, QUERIES + 2 * KEYS


@pytest.fixture(scope="module")
def kernels(native_folder: Path) -> NativeKernels:
    return NativeKernels(native_folder)


KINDS: list[dict[str, Any]] = [
    {"rows": 2528},
    {"rows": 1},
    {"rows": 109, "rank": 5},
    {"rows": 433, "rank": 0},
    {"rows": 300, "lora": "merged"},
    {"rows": 300, "biased": True, "head_norms": False, "pairs": 16},
    {"rows": 217, "joint": True},
    {"rows": 217, "norm": False, "pairs": 16},
    {"rows": 2528, "dtype": torch.bfloat16},
    {"rows": 217, "dtype": torch.bfloat16, "norm": False, "rank": 24},
    {"rows": 300, "dtype": torch.bfloat16, "biased": True, "joint": True},
    {"rows": 109, "dtype": torch.bfloat16, "rank": 0, "head_norms": False},
]


def _problem(
    kernels: NativeKernels,
    *,
    rows: int,
    rank: int = 8,
    lora: str = "beside",
    norm: bool = True,
    biased: bool = False,
    head_norms: bool = True,
    joint: bool = False,
    pairs: int = DIM // 2,
    dtype: torch.dtype = torch.float32,
) -> tuple[TrainedHeads, HeadsInTurn, Tensor, Tensor]:
    """The kernel, the operations in turn, x [T, E] and a gradient [T, H, D]."""
    operations = NativeOperations(dtype, kernels)
    generator = torch.Generator().manual_seed(rows)
    linear = _linear(operations, rank, lora, rows, generator)
    bias = torch.randn(HEADS * DIM, generator=generator) if biased else None
    norms = torch.rand(ROTATED, DIM, generator=generator) + 0.5 if head_norms else None
    weights = AttentionWeights(cast(Any, None), bias, norms, None, cast(Any, None))
    angles = torch.randn(rows, 1, pairs, generator=generator)
    tables = torch.ones(1), torch.zeros(1)
    context = ForwardContext(
        operations, EPS, ROTATED, QUERIES if joint else 0, DIM, angles.cos(), angles.sin(), GatedOrder(*tables)
    )
    weight = torch.rand(HIDDEN, generator=generator) + 0.5 if norm else None
    settings = HeadSettings(bias, norms, context.cos, context.sin, EPS, DIM, ROTATED, context.joint_heads)
    kernel = operations.heads(linear, weight, settings)
    if kernel is None:
        pytest.skip("this processor has no vectors of 16 numbers")
    x = torch.randn(rows, HIDDEN, generator=generator)
    grad = torch.randn(rows, HEADS, DIM, generator=generator).to(dtype)
    return kernel, HeadsInTurn(weight, weights, linear, context), x, grad


def _linear(operations: NativeOperations, rank: int, kind: str, rows: int, generator: torch.Generator) -> Linear:
    """The query/key/value product with its lora: none for rank 0."""
    weight = (torch.randn(HEADS * DIM, HIDDEN, generator=generator) / HIDDEN**0.5).to(operations.dtype)
    matrix = operations.matrix(weight)
    if not rank:
        return SeparateLinear(operations, matrix, ())
    lora = SiteWeights(
        torch.randn(3 * rank, HIDDEN, generator=generator) / HIDDEN**0.5,
        tuple(torch.randn(heads * DIM, rank, generator=generator) / 10 for heads in (QUERIES, KEYS, KEYS)),
    )
    if kind == "merged":
        return MergedLinear(operations, matrix, lora, 2.0)
    return SeparateLinear(operations, matrix, [SiteLora(slice(0, rows), lora, 2.0)])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_one_kernel_gives_the_bits_of_the_operations_one_after_the_other(
    kernels: NativeKernels, kind: dict[str, Any], threads: int
) -> None:
    torch.set_num_threads(threads)
    kernel, in_turn, x, grad = _problem(kernels, **kind)
    heads, saved = kernel.forward(x)
    expected, saved_in_turn = in_turn.forward(x)
    assert torch.equal(heads, expected)
    for own, other in zip(saved[:3], saved_in_turn, strict=True):
        assert (own is None) == (other is None)
        assert own is None or other is None or torch.equal(own, other.view_as(own))
    for for_input in (True, False):
        grad_x, grads = kernel.backward(grad, x, saved, for_input=for_input)
        other_x, others = in_turn.backward(grad, x, saved_in_turn, for_input=for_input)
        assert (grad_x is None) == (other_x is None) == (not for_input)
        assert grad_x is None or other_x is None or torch.equal(grad_x, other_x)
        assert len(grads) == len(others) == (0 if kind.get("rank") == 0 else 4)
        for own, other in zip(grads, others, strict=True):
            assert torch.equal(own, other)

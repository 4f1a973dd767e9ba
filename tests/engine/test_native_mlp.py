"""An MLP by one kernel in each direction: the numbers of float64, and the bits of its operations in turn."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mint.engine.cpu.build import COMPILERS
from mint.engine.cpu.kernels import NativeKernels
from mint.engine.cpu.operations import NativeOperations
from mint.engine.lora import SiteLora, SiteWeights
from mint.engine.model.layer_parts import ForwardContext, GatedOrder, MlpInParts
from mint.engine.model.linear import Linear
from mint.engine.model.lora_linear import MergedLinear, SeparateLinear
from mint.engine.model.operations import TrainedMlp
from mint.engine.model.weights import LayerWeights

pytestmark = pytest.mark.skipif(not any(shutil.which(name) for name in COMPILERS), reason="there is no C compiler")

EPS = 1e-6
HIDDEN, INNER = 64, 96


@pytest.fixture(scope="module")
def kernels(native_folder: Path) -> NativeKernels:
    return NativeKernels(native_folder)


@dataclass(frozen=True)
class _Problem:
    """An MLP with loras, by two ways to compute it, and its numbers."""

    kernel: TrainedMlp
    in_parts: MlpInParts
    gate_up: Tensor  # [2·I, E], with the lora where it is merged
    down: Tensor  # [E, I], the same
    norm: Tensor
    loras: list[SiteWeights]
    x: Tensor
    grad: Tensor
    beside: bool  # whether loras are added to the products
    rounds: bool  # whether the wide product is kept in bfloat16


def _linear(
    operations: NativeOperations,
    outputs: list[int],
    inputs: int,
    rank: int,
    generator: torch.Generator,
    *,
    rows: int,
    beside: bool,
) -> tuple[Linear, Tensor, list[SiteWeights]]:
    """A linear, its matrix, and its lora: none for rank 0."""
    weight = (torch.randn(sum(outputs), inputs, generator=generator) / inputs**0.5).to(operations.dtype)
    if not rank:
        return SeparateLinear(operations, operations.matrix(weight), ()), weight, []
    lora = SiteWeights(
        torch.randn(rank * len(outputs), inputs, generator=generator) / inputs**0.5,
        tuple(torch.randn(own, rank, generator=generator) / 10 for own in outputs),
    )
    matrix = operations.matrix(weight)
    if beside:
        return SeparateLinear(operations, matrix, [SiteLora(slice(0, rows), lora, 2.0)]), weight, [lora]
    return MergedLinear(operations, matrix, lora, 2.0), weight, [lora]


def _problem(
    kernels: NativeKernels,
    *,
    rows: int,
    ranks: tuple[int, int],
    inner: int = INNER,
    adds: bool = True,
    beside: bool = False,
    dtype: torch.dtype = torch.float32,
) -> _Problem:
    operations = NativeOperations(dtype, kernels)
    generator = torch.Generator().manual_seed(rows)
    gate_up, wide, first = _linear(operations, [inner, inner], HIDDEN, ranks[0], generator, rows=rows, beside=beside)
    down, narrow, second = _linear(operations, [HIDDEN], inner, ranks[1], generator, rows=rows, beside=beside)
    norm = torch.rand(HIDDEN, generator=generator) + 0.5
    x, grad = (torch.randn(rows, HIDDEN, generator=generator) for _ in range(2))
    kernel = operations.mlp(gate_up, down, norm, eps=EPS, adds=adds, rows=rows)
    if kernel is None:
        pytest.skip("this processor has no vectors of 16 numbers")
    nothing = cast(Any, None)
    layer = LayerWeights(None, None, nothing, None, norm, None if adds else norm, nothing)
    tables = torch.ones(1), torch.zeros(1)
    context = ForwardContext(operations, EPS, 0, 0, 16, *tables, GatedOrder(*tables))
    return _Problem(
        kernel,
        MlpInParts(layer, gate_up, down, context),
        wide,
        narrow,
        norm,
        [*first, *second],
        x,
        grad,
        beside,
        dtype == torch.bfloat16,
    )


KINDS: list[dict[str, Any]] = [
    {"rows": 2528, "ranks": (16, 16)},
    {"rows": 1, "ranks": (4, 4)},
    {"rows": 109, "ranks": (24, 8)},
    {"rows": 433, "ranks": (8, 0)},
    {"rows": 217, "ranks": (0, 8)},
    {"rows": 217, "ranks": (0, 0)},
    {"rows": 300, "ranks": (5, 5)},
    {"rows": 300, "ranks": (8, 8), "adds": False},
    {"rows": 2528, "ranks": (16, 16), "beside": True},
    {"rows": 433, "ranks": (5, 24), "beside": True},
    {"rows": 217, "ranks": (8, 0), "beside": True},
    {"rows": 217, "ranks": (0, 8), "beside": True, "adds": False},
]
HALVES: list[dict[str, Any]] = [
    kind | {"beside": True, "dtype": torch.bfloat16}
    for kind in KINDS
    if kind.get("beside", False) or kind["rows"] < 433
]
IN_PIECES = [
    kind | {"inner": inner}
    for kind in HALVES
    for inner in (256, 384)
    if kind["rows"] in (1, 300, 433) or kind["ranks"] == (0, 0)
]
"""Wide enough to pass from one product to the other in pieces."""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", [*KINDS, *HALVES, *IN_PIECES], ids=str)
def test_one_kernel_gives_the_bits_of_the_operations_one_after_the_other(
    kernels: NativeKernels, kind: dict[str, Any], threads: int
) -> None:
    torch.set_num_threads(threads)
    problem = _problem(kernels, **kind)
    out, saved = problem.kernel.forward(problem.x)
    expected, saved_in_parts = problem.in_parts.forward(problem.x)
    assert torch.equal(out, expected)
    wide = saved[1]
    assert wide is not None and torch.equal(
        wide, torch.cat([part for part in saved_in_parts[1::2] if part is not None])
    )
    for for_input in (True, False):
        grad_x, grads = problem.kernel.backward(problem.grad, problem.x, saved, for_input=for_input)
        other_x, others = problem.in_parts.backward(
            problem.grad.clone(), problem.x, saved_in_parts, for_input=for_input
        )
        assert (grad_x is None) == (other_x is None) == (not for_input)
        assert grad_x is None or other_x is None or torch.equal(grad_x, other_x)
        assert len(grads) == len(others) == sum(1 + len(lora.bs) for lora in problem.loras)
        if problem.rounds and kind["ranks"][1]:
            others[-1] = _gradient_of_unrounded(problem)
        for own, other in zip(grads, others, strict=True):
            assert torch.equal(own, other)


def _gradient_of_unrounded(problem: _Problem) -> Tensor:
    """The gradient of b of the lora at `down` from the inner values of the forward, as the kernel keeps them: the
    operations in turn compute them again from the rounded product."""
    operations, gate_up = problem.in_parts.context.operations, problem.in_parts.gate_up
    parts = operations.mlp_parts(len(problem.x), gate_up.outputs)
    found = []
    for x, grad in zip(problem.x.tensor_split(parts), problem.grad.tensor_split(parts), strict=True):
        inner = operations.swiglu(gate_up.product(operations.rms_norm(x, problem.norm, EPS)[0]))
        found.append(operations.lora_gradient(grad, inner, problem.loras[-1], 2.0, None)[1])
    total, *rest = found
    for part in rest:
        total += part
    return total


@pytest.mark.parametrize("kind", [kind for kind in KINDS if all(kind["ranks"]) and kind.get("adds", True)], ids=str)
def test_results_and_gradients_are_those_of_float64(kernels: NativeKernels, kind: dict[str, Any]) -> None:
    problem = _problem(kernels, **kind)
    out, saved = problem.kernel.forward(problem.x)
    grad_x, grads = problem.kernel.backward(problem.grad, problem.x, saved, for_input=True)
    x = problem.x.double().requires_grad_()
    trained = [[own.double().requires_grad_() for own in (lora.a, *lora.bs)] for lora in problem.loras]
    gates, downs = (
        _product(weight, parts, merged=not problem.beside)
        for weight, parts in zip((problem.gate_up, problem.down), trained, strict=True)
    )
    normed = x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS) * problem.norm.double()
    gate, up = (normed @ gates.t()).chunk(2, dim=1)
    active = torch.nn.functional.silu(gate)
    result = x + (active * up) @ downs.t()
    torch.testing.assert_close(out.double(), result.detach(), rtol=1e-5, atol=1e-5)
    result.backward(problem.grad.double())
    flat = [own for parts in trained for own in parts]
    assert grad_x is not None and x.grad is not None
    torch.testing.assert_close(grad_x.double(), x.grad, rtol=1e-4, atol=1e-4)
    for own, exact in zip(grads, flat, strict=True):
        assert exact.grad is not None
        torch.testing.assert_close(own.double(), exact.grad, rtol=1e-4, atol=1e-4 * float(exact.grad.abs().max()))


def _product(weight: Tensor, parts: list[Tensor], *, merged: bool) -> Tensor:
    """The matrix with its lora, as a function of the lora's matrices `a` and bs, with scale 2. If the lora is `merged`,
    `weight` has it already, and only what a change of it would add is added here."""
    a, *bs = parts
    rank = len(a) // len(bs)
    added = torch.cat([2.0 * b @ a[rank * part : rank * (part + 1)] for part, b in enumerate(bs)])
    return weight.double() + (added - added.detach() if merged else added)

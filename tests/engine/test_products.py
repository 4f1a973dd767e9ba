"""Products with frozen matrices: against float64, the same bits whatever other rows are in the batch, and what they
cost in memory."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from mint.engine.cpu.onednn import PACKED_ENTRIES, PackedMatrix, cpu_matrix, cpu_unembedding, dense_gradient, has_onednn
from mint.engine.drawing.draw import choose, draw
from mint.engine.model.functions import exponentials
from mint.engine.model.linear import Matrix, min_rows

SHAPES = [(96, 60), (192, 512), (640, 512), (512, 3072)]  # outputs, inputs: the last two in oneDNN's layout
PRECISION = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}


def _rows(count: int, width: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 1, (count, width)).astype(np.float32))


def _weight(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return (_rows(outputs, inputs, 1) / inputs**0.5).to(dtype)


def _deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_and_gradients_equal_those_in_float64(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = _weight(outputs, inputs, dtype)
    matrix, exact = cpu_matrix(weight), weight.double()
    for count in (2, 17, 200):
        x, grad, residual = _rows(count, inputs, 2), _rows(count, outputs, 3), _rows(count, outputs, 4)
        product, gradient = x.double() @ exact.t(), grad.double() @ exact
        assert _deviation(matrix.product(x), product) < PRECISION[dtype]
        assert _deviation(matrix.product(x, residual.clone()), product + residual) < PRECISION[dtype]
        assert _deviation(matrix.gradient(grad), gradient) < PRECISION[dtype]
        assert matrix.product(x).dtype == matrix.gradient(grad).dtype == torch.float32


ROWS_BY_AVX2 = """
import torch
from mint.engine.cpu import onednn
onednn._HAS_AVX512 = False
matrix = onednn.HalfPrecisionUnembedding(torch.randn(512, 576).to(torch.bfloat16))
x = torch.randn(100, 576)
whole = matrix.product(x)
assert torch.allclose(whole, x @ matrix.weight.float().t(), atol=0.1)
print([rows for rows in range(1, 100) if not torch.equal(matrix.product(x[:rows]), whole[:rows])])
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="FBGEMM has AVX2 on x86-64 alone")
def test_a_row_of_an_unembedding_in_half_precision_has_the_same_bits_on_processors_without_avx512() -> None:
    environment = os.environ | {"FBGEMM_ENABLE_INSTRUCTIONS": "AVX2"}
    found = subprocess.run(
        [sys.executable, "-c", ROWS_BY_AVX2], env=environment, capture_output=True, text=True, check=False
    )
    assert found.stdout.strip() == "[]", found.stdout + found.stderr


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [cpu_matrix, cpu_unembedding])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_rows_product_does_not_depend_on_the_other_rows(
    outputs: int, inputs: int, kind: Callable[[torch.Tensor], Matrix], dtype: torch.dtype, threads: int
) -> None:
    torch.set_num_threads(threads)
    matrix = kind(_weight(outputs, inputs, dtype))
    x, residual = _rows(600, inputs, 2), _rows(600, outputs, 3)
    plain, added = matrix.product(x), matrix.product(x, residual.clone())
    for count in (matrix.min_rows, 3, 5, 16, 17, 31, 64, 129, 511):
        if count < matrix.min_rows:
            continue
        for start in (0, 7, 600 - count):
            own = slice(start, start + count)
            assert torch.equal(matrix.product(x[own]), plain[own]), f"{count} rows from {start}"
            assert torch.equal(matrix.product(x[own], residual[own].clone()), added[own]), f"{count} rows from {start}"


def test_large_matrices_need_fewer_rows_than_small_ones() -> None:
    assert cpu_matrix(_weight(512, 512, torch.float32)).min_rows == 2
    assert cpu_matrix(_weight(64, 64, torch.float32)).min_rows == min_rows() >= 16


def test_a_packed_matrix_holds_the_same_numbers_in_the_same_memory() -> None:
    weight = _weight(1024, PACKED_ENTRIES // 1024, torch.bfloat16)
    if not has_onednn(weight):
        pytest.skip("oneDNN does not multiply bfloat16 on this processor")
    matrix = PackedMatrix(weight)
    assert torch.equal(matrix.dense(), weight)
    assert torch.ops.mkldnn._nbytes(matrix.packed) == weight.nbytes


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_logits_of_a_bfloat16_unembedding_have_float32_precision(size: float) -> None:
    # From huge to vanishing: magnitudes over 2^20 within one matrix.
    spread = torch.logspace(0, -6, 512)[None, :]
    weight = (_rows(300, 512, 1) * spread * size).bfloat16()
    x = _rows(33, 512, 2)
    assert _deviation(cpu_unembedding(weight).product(x), x.double() @ weight.double().t()) < 3e-6  # bfloat16: 4e-3


def test_an_unembedding_of_zeros_gives_zeros() -> None:
    assert not cpu_unembedding(torch.zeros(64, 32, dtype=torch.bfloat16)).product(_rows(4, 32, 0)).any()


@pytest.mark.parametrize("width", [7, 64, 331, 5000])
def test_the_normaliser_is_torchs_logsumexp_to_the_bit(width: int) -> None:
    logits = 5 * _rows(9, width, 5)
    weights, normaliser = exponentials(logits)
    assert torch.equal(normaliser, logits.logsumexp(1))
    np.testing.assert_allclose(
        (weights / weights.sum(1, keepdim=True)).numpy(), torch.softmax(logits.double(), 1).numpy(), atol=1e-6
    )


@pytest.mark.parametrize("heat", [1.0, 0.7])
def test_drawing_with_logprobs_gives_the_tokens_of_drawing_alone(heat: float) -> None:
    rng = np.random.default_rng(0)
    logits, uniforms = 3 * _rows(50, 331, 6), rng.random(50)
    temperature, top_k, top_p = np.where(np.arange(50) == 7, heat, 1.0), np.full(50, -1), np.ones(50)
    tokens, logprobs, _ = draw(logits, uniforms, temperature, top_k, top_p)
    assert torch.equal(tokens, choose(logits, uniforms, temperature, top_k, top_p))
    expected = torch.log_softmax(logits.double(), 1).gather(1, tokens[:, None]).squeeze(1)
    np.testing.assert_allclose(logprobs.numpy(), expected.numpy(), atol=1e-5)


def test_drawing_in_blocks_of_rows_changes_no_bit() -> None:
    rng = np.random.default_rng(0)
    logits, uniforms = 3 * _rows(23, 331, 6), rng.random(23)
    rules = np.ones(23), np.full(23, -1), np.where(np.arange(23) % 3 == 0, 0.9, 1.0)
    tokens, logprobs, _ = draw(logits, uniforms, *rules)
    for count in (23, 9, 5, 4, 2, 1):
        found = draw(logits[:count], uniforms[:count], *(rule[:count] for rule in rules), rows_at_once=4)
        assert torch.equal(found[0], tokens[:count]) and torch.equal(found[1], logprobs[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 75, 192])
@pytest.mark.parametrize("outputs", [96, 97, 98, 1001])
def test_a_gradient_does_not_read_what_lies_behind_its_rows(outputs: int, rows: int, dtype: torch.dtype) -> None:
    weight, memory = _weight(outputs, 64, dtype), torch.full((rows, 2 * outputs), torch.nan, dtype=dtype)
    grad = memory[:, :outputs]
    grad.copy_(_rows(rows, outputs, 4))
    exact = grad.double() @ weight.double()
    found = dense_gradient(weight, grad)
    assert float((found - exact).abs().max()) <= (1e-5 if dtype == torch.float32 else 2e-2) * float(exact.abs().max())


@pytest.mark.parametrize("outputs", [80, 100, 144, 336])
def test_a_row_of_a_gradient_that_is_not_finite_stays_alone(outputs: int) -> None:
    grad = _rows(40, outputs, 5)
    grad[20] = torch.nan
    found = dense_gradient(_weight(outputs, 64, torch.bfloat16), grad)
    assert (~found.isfinite()).any(1).nonzero().tolist() == [[20]]


@pytest.mark.parametrize("multiplied_before", [False, True])
def test_the_engine_knows_whether_torch_sums_a_row_in_one_order(multiplied_before: bool) -> None:
    """What is asked for comes too late after the process has multiplied; then the measurement tells."""
    script = f"""
import logging, torch
from mint.engine.devices import Device
from mint.engine.instruction_sets import sum_in_one_order
logging.basicConfig(level="WARNING")
torch.set_num_threads(1)
{multiplied_before} and torch.ones(4, 4) @ torch.ones(4, 4)
sum_in_one_order()
print(Device("cpu", None, gpu_kernels=False).is_batch_invariant)
x, weight = torch.randn(40, 208), torch.randn(64, 208)
whole = x @ weight.T
print(all(torch.equal(x[:rows] @ weight.T, whole[:rows]) for rows in range(4, 40)))
"""
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    made = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    promised, seen = made.stdout.split()
    assert promised == seen, made.stderr
    assert ("MKL_CBWR" in made.stderr) == (promised == "False")
    assert promised == "True" or multiplied_before

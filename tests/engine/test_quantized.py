"""Quantized bases: the formats against a search through all codes, and products, training and sampling with the numbers
of the matrices that the codes stand for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from engine_data import CROSS_ENTROPY, LORA, datum, job, random_data, take_gradient, train
from safetensors.torch import load_file, save_file
from small_models import write_model, write_other_model

from mint.engine.cpu.build import COMPILERS
from mint.engine.cpu.kernels import NativeKernels
from mint.engine.cpu.panels import NativeProducts, panel_matrix
from mint.engine.quantized.number_formats import NF4_VALUES, Quantization, QuantizedWeight, keep_mxfp4, quantize
from mint.engine.quantized.quantized_matrix import QuantizedMatrix
from mint.engine.quantized.quantized_panels import QuantizedPanels
from mint.engine.torch_engine import TorchEngine
from mint.errors import InvalidRequestError

KINDS: tuple[Quantization, ...] = get_args(Quantization)
ROUNDED: tuple[Quantization, ...] = tuple(kind for kind in KINDS if kind != "mxfp4")
"""Those to which mint rounds matrices; MXFP4 is read from files alone (test_quantized_folders.py)."""
BLOCKS = {"nf4": 64, "int8": None, "fp8": 128}
SHAPES = [(48, 64), (112, 128), (64, 576), (320, 1536)]
NEEDS_COMPILER = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C compiler")
WIDE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_attention_heads": 4, "vocab_size": 128,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {"qwen3": WIDE, "qwen3_moe": WIDE | {"moe_intermediate_size": 64}}
"""Widths that the kernels and all formats are made for."""


def _values(kind: Quantization) -> np.ndarray:
    """All values of a code, the largest of which is 1."""
    if kind == "nf4":
        return np.array(NF4_VALUES)
    if kind == "int8":
        return np.arange(-127, 128) / 127
    exponents, fractions = np.meshgrid(np.arange(16), np.arange(8))
    positive = np.where(exponents == 0, fractions * 2.0**-9, (1 + fractions / 8) * 2.0 ** (exponents - 7)).ravel()
    positive = positive[positive <= 448]  # the code above it is not a number
    return np.concatenate([-positive, positive]) / 448


def _weight(outputs: int, inputs: int) -> torch.Tensor:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs))
    weight[1] = 0
    weight[2, :7] *= 1e-6
    return weight


def _mxfp4(outputs: int, inputs: int) -> QuantizedWeight:
    """Any codes, with scales from 1/16 to 2."""
    generator = torch.Generator().manual_seed(inputs)
    codes = torch.randint(256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(-4, 2, (outputs, inputs // 32), generator=generator).float().exp2()
    found = keep_mxfp4(codes, scales)
    assert found is not None
    return found


def _quantized(outputs: int, inputs: int, kind: Quantization) -> QuantizedWeight:
    if kind == "mxfp4":
        return _mxfp4(outputs, inputs)
    found = quantize(_weight(outputs, inputs), kind)
    assert found is not None and (found.outputs, found.inputs) == (outputs, inputs)
    return found


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_each_number_becomes_the_nearest_that_a_code_can_stand_for(
    outputs: int, inputs: int, kind: Quantization
) -> None:
    weight, widened = _weight(outputs, inputs).double().numpy(), _quantized(outputs, inputs, kind).widen().numpy()
    block = BLOCKS[kind] if BLOCKS[kind] is not None and inputs % BLOCKS[kind] == 0 else inputs
    values = _values(kind)
    for row, found in zip(weight[:40].reshape(-1, block), widened[:40].reshape(-1, block), strict=True):
        scale = np.abs(row).max()
        nearest = np.abs(row[:, None] - values * scale).min(1)
        assert np.abs(np.abs(row - found) - nearest).max() <= 1e-6 * scale


@pytest.mark.parametrize("kind", ROUNDED)
def test_what_a_code_stands_for_is_quantized_to_itself(kind: Quantization) -> None:
    widened = _quantized(64, 576, kind).widen()
    again = quantize(widened, kind)
    assert again is not None
    torch.testing.assert_close(again.widen(), widened, rtol=2e-7, atol=0)


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
@pytest.mark.parametrize("largest", [1e-45, 1e-37, 1e-33, 1e-29])
def test_blocks_of_tiny_numbers_become_tiny_numbers(largest: float, kind: Quantization) -> None:
    weight = torch.zeros(4, 128)
    weight[0, 0], weight[1, 5] = largest, -largest
    weight[3] = 1
    found = quantize(weight, kind)
    assert found is not None
    assert float((found.widen() - weight).abs().max()) <= max(largest / 100, 1e-32)
    assert found.widen().isfinite().all() and torch.equal(found.widen()[3], weight[3])


def test_widths_that_do_not_fit_are_left_alone() -> None:
    assert quantize(torch.ones(4, 96), "nf4") is None
    assert quantize(torch.ones(4, 6), "int8") is None


@pytest.mark.parametrize(("kind", "bits"), [("nf4", 4.5), ("int8", 8.1), ("fp8", 8.25), ("mxfp4", 5)])
def test_a_number_takes_so_many_bits(kind: Quantization, bits: float) -> None:
    assert 8 * _quantized(320, 1536, kind).size_bytes / (320 * 1536) <= bits


def _kernel_numbers(weight: QuantizedWeight, dtype: torch.dtype) -> np.ndarray:
    """What a product of the kernels multiplies with, float64 [O, I]: in bfloat16, the table of NF4 is rounded to it."""
    widened = weight.widen().double()
    if dtype == torch.float32 or weight.kind != "nf4":
        return widened.numpy()
    scales = weight.scales.double().repeat_interleave(weight.block, 1)
    codes = (widened / scales.where(scales != 0, 1)).float()  # the numbers of the table, up to rounding
    return (codes.bfloat16().double() * scales).numpy()


def _rounded_rows(x: torch.Tensor, kind: Quantization, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Rows as the kernels multiply them, and how far each of their numbers may be from that: float64 [T, I]."""
    if dtype == torch.float32 or kind != "int8":
        return x.to(dtype).double().numpy(), np.zeros(x.shape)
    largest = [part.abs().amax(1, keepdim=True).expand_as(part) for part in x.split(128, 1)]
    return x.double().numpy(), torch.cat(largest, 1).double().numpy() / 32639 / 2


@NEEDS_COMPILER
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_kernels_multiply_with_the_numbers_of_the_codes(
    outputs: int, inputs: int, kind: Quantization, dtype: torch.dtype, threads: int, native_folder: Path
) -> None:
    torch.set_num_threads(threads)
    kernels = NativeKernels(native_folder)
    weight = _quantized(outputs, inputs, kind)
    if panel_matrix(NativeProducts(kernels), weight.widen().to(dtype)) is None:
        pytest.skip("this processor has no vectors of 16 numbers, or does not multiply bfloat16")
    assert QuantizedPanels.fit(kernels, weight, dtype)
    matrix = QuantizedPanels(kernels, weight, dtype)
    assert torch.equal(matrix.dense(), weight.widen().to(dtype))
    generator = torch.Generator().manual_seed(inputs)
    x, residual = (torch.randn(333, size, generator=generator) for size in (inputs, outputs))
    x[3, 5] = 1000  # beside numbers of about 1
    x[4] = 0
    x[5] *= 1e-37  # products with it are subnormal
    found = matrix.product(x, residual)
    for rows in (1, 2, 3, 4, 5, 8, 9, 64):  # the same bits, however many rows there are
        assert torch.equal(matrix.product(x[:rows], residual[:rows]), found[:rows])
        assert torch.equal(matrix.product(x[7 : 7 + rows]), matrix.product(x)[7 : 7 + rows])
    alone = [matrix.product(x[row : row + 1]) for row in range(9)]
    assert torch.equal(torch.cat(alone), matrix.product(x)[:9])
    numbers = _kernel_numbers(weight, dtype)
    rows, errors = _rounded_rows(x, kind, dtype)
    sizes = np.abs(rows) @ np.abs(numbers).T + np.abs(residual.numpy())
    assert (
        np.abs(found.numpy() - rows @ numbers.T - residual.numpy()) <= errors @ np.abs(numbers).T + 2e-6 * sizes
    ).all()


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_gradients_are_multiplied_with_the_widened_matrix(
    outputs: int, inputs: int, kind: Quantization, dtype: torch.dtype, native_folder: Path
) -> None:
    kernels = NativeKernels(native_folder)
    weight = _quantized(outputs, inputs, kind)
    if not QuantizedPanels.fit(kernels, weight, dtype):
        pytest.skip("this processor has no vectors of 16 numbers, or does not multiply bfloat16")
    matrix = QuantizedPanels(kernels, weight, dtype)
    grad = torch.randn(333, outputs, generator=torch.Generator().manual_seed(inputs))
    widened, rounded = matrix.dense().double().numpy(), grad.to(dtype).double().numpy()
    sizes = np.abs(rounded) @ np.abs(widened)
    precision = 2e-6 if dtype == torch.float32 or outputs % 32 == 0 else 4e-3  # oneDNN rounds results to bfloat16
    assert (np.abs(matrix.gradient(grad).numpy() - rounded @ widened) <= precision * sizes).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_multiplies_with_the_widened_matrix(kind: Quantization, dtype: torch.dtype) -> None:
    weight = _quantized(112, 128, kind)
    matrix, widened = QuantizedMatrix(weight, dtype), weight.widen().to(dtype).double()
    x, grad = torch.randn(7, 128), torch.randn(7, 112)
    rtol, atol = (1e-5, 5e-5) if dtype == torch.float32 else (1e-2, 0.1)  # results are rounded to bfloat16
    torch.testing.assert_close(matrix.product(x).double(), x.to(dtype).double() @ widened.T, rtol=rtol, atol=atol)
    torch.testing.assert_close(matrix.gradient(grad).double(), grad.to(dtype).double() @ widened, rtol=rtol, atol=atol)


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_no_number_that_is_not_finite_gets_lost(
    number: float, kind: Quantization, dtype: torch.dtype, native_folder: Path
) -> None:
    kernels = NativeKernels(native_folder)
    weight = _quantized(64, 576, kind)
    if not QuantizedPanels.fit(kernels, weight, dtype):
        pytest.skip("this processor has no vectors of 16 numbers, or does not multiply bfloat16")
    x = torch.ones(2, 576)
    x[0, 130] = number
    found = QuantizedPanels(kernels, weight, dtype).product(x)
    others = weight.widen()[:, 130] != 0
    assert not found[0, others].isfinite().any() and found[1].isfinite().all()


def _engine(
    folder: Path, kind: Quantization | None, native: Path | None, dtype: Literal["float32", "bfloat16"] = "float32"
) -> TorchEngine:
    engine = TorchEngine(dtype=dtype, threads=2, device="cpu", quantize=kind, native=native)
    engine.load_base("base", str(folder))
    return engine


def _write_widened(source: Path, target: Path, kind: Quantization) -> None:
    """The model with the numbers that the codes of its layers' matrices stand for; routers are as they were."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        is_quantized = name.endswith("_proj.weight") or (name == "lm_head.weight" and kind == "int8")
        found = quantize(tensor, kind) if is_quantized else None
        if found is not None:
            tensors[name] = found.widen()
    save_file(tensors, target / "model.safetensors")


@pytest.mark.parametrize(
    "native",
    [pytest.param(True, marks=NEEDS_COMPILER, id="native"), pytest.param(False, marks=pytest.mark.slow, id="torch")],
)
@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantized_base_trains_and_samples_as_the_model_of_its_numbers(
    family: str, kind: Quantization, native: bool, native_folder: Path, tmp_path: Path
) -> None:
    folder, widened = tmp_path / "model", tmp_path / "widened"
    write_model(folder, "untied", family=family, **FAMILIES[family])
    _write_widened(folder, widened, kind)
    kernels = native_folder if native else None
    engine, reference = _engine(folder, kind, kernels), _engine(widened, None, kernels)
    for each in (engine, reference):
        each.create_model("m", "base", LORA)
    train(reference, "m")
    engine.write_state("m", reference.read_state("m"))
    data = random_data(3)
    ours, theirs = (each.forward_backward("m", data, CROSS_ENTROPY) for each in (engine, reference))
    for own, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert np.abs(own - other).max() <= 1e-4  # logits of about 10, summed in another order
    own_gradient, gradient = take_gradient(engine, "m"), take_gradient(reference, "m")
    for name, expected in gradient.items():
        assert np.abs(own_gradient[name] - expected).max() <= 1e-4 * max(np.abs(expected).max(), 1e-3), name
    plain = _engine(folder, None, kernels)
    plain.create_model("m", "base", LORA)
    unquantized = plain.forward("m", data, CROSS_ENTROPY).logprobs[0]
    assert np.abs(unquantized - ours.logprobs[0]).max() > 1e-3  # it is quantized indeed


@pytest.mark.parametrize("native", [pytest.param(True, marks=NEEDS_COMPILER), False], ids=["native", "torch"])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("family", FAMILIES)
def test_sampler_and_trainer_of_a_quantized_base_have_the_same_bits(
    family: str,
    kind: Quantization,
    dtype: Literal["float32", "bfloat16"],
    native: bool,
    native_folder: Path,
    tmp_path: Path,
) -> None:
    write_model(tmp_path, "tied", family=family, **FAMILIES[family])
    engine = _engine(tmp_path, kind, native_folder if native else None, dtype)
    engine.create_model("m", "base", LORA)
    train(engine, "m", steps=1)
    engine.publish("m", "w")
    prompt = np.random.default_rng(3).integers(20, 90, 21)
    for sample in engine.sample([job(prompt, weights_id="w", num_samples=5, max_tokens=9)])[0].samples:
        whole = np.concatenate([prompt, sample.tokens])
        trained = engine.forward("m", [datum(whole, prompt=len(prompt))], CROSS_ENTROPY).logprobs[0]
        assert np.array_equal(trained[len(prompt) - 1 :], sample.logprobs)


def test_the_settings_say_so_and_a_family_of_transformers_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "own", "tied", **WIDE)
    info = TorchEngine(device="cpu", quantize="nf4").load_base("base", str(tmp_path / "own"))
    assert info.settings["quantization"] == "nf4"
    write_other_model(tmp_path / "other", "glm4")
    with pytest.raises(InvalidRequestError, match="MINT_QUANTIZE"):
        TorchEngine(device="cpu", quantize="nf4").load_base("base", str(tmp_path / "other"))

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
from mint.engine.quantized.number_formats import NF4_VALUES, Quantization, QuantizedWeight, quantize
from mint.engine.quantized.quantized_matrix import QuantizedMatrix
from mint.engine.quantized.quantized_panels import QuantizedPanels
from mint.engine.torch_engine import TorchEngine
from mint.errors import InvalidRequestError

KINDS: tuple[Quantization, ...] = get_args(Quantization)
BLOCKS = {"nf4": 64, "int8": None, "fp8": 128}
SHAPES = [(48, 64), (112, 128), (64, 576), (320, 1536)]
NEEDS_COMPILER = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no C compiler")
_SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_attention_heads": 4}
WIDE = {"qwen3": _SHAPE, "qwen3_moe": {**_SHAPE, "moe_intermediate_size": 64}}
"""A dense model and a mixture of experts, with widths that every format quantizes."""
BASES: list[tuple[str, Quantization]] = [*(("qwen3", kind) for kind in KINDS), ("qwen3_moe", "nf4")]


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


def _quantized(outputs: int, inputs: int, kind: Quantization) -> QuantizedWeight:
    found = quantize(_weight(outputs, inputs), kind)
    assert found is not None and (found.outputs, found.inputs) == (outputs, inputs)
    return found


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_code_stands_for_is_quantized_to_itself(kind: Quantization) -> None:
    widened = _quantized(64, 576, kind).widen()
    again = quantize(widened, kind)
    assert again is not None
    torch.testing.assert_close(again.widen(), widened, rtol=2e-7, atol=0)


def test_widths_that_do_not_fit_are_left_alone() -> None:
    assert quantize(torch.ones(4, 96), "nf4") is None
    assert quantize(torch.ones(4, 6), "int8") is None


@pytest.mark.parametrize(("kind", "bits"), [("nf4", 4.5), ("int8", 8.1), ("fp8", 8.25)])
def test_a_number_takes_so_many_bits(kind: Quantization, bits: float) -> None:
    assert 8 * _quantized(320, 1536, kind).size_bytes / (320 * 1536) <= bits


@NEEDS_COMPILER
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_kernels_give_the_bits_of_the_widened_matrix(
    outputs: int, inputs: int, kind: Quantization, dtype: torch.dtype, threads: int, native_folder: Path
) -> None:
    torch.set_num_threads(threads)
    kernels = NativeKernels(native_folder)
    products = NativeProducts(kernels)
    weight = _quantized(outputs, inputs, kind)
    dense = panel_matrix(products, weight.widen().to(dtype))
    if dense is None:
        pytest.skip("this processor has no vectors of 16 numbers, or does not multiply bfloat16")
    assert QuantizedPanels.fit(products, weight, dtype)
    matrix = QuantizedPanels(kernels, products, weight, dtype)
    assert torch.equal(matrix.dense(), weight.widen().to(dtype))
    for rows in (1, 2, 5, 6, 7, 64, 333):
        generator = torch.Generator().manual_seed(rows)
        x, residual, grad = (torch.randn(rows, size, generator=generator) for size in (inputs, outputs, outputs))
        assert torch.equal(matrix.product(x), dense.product(x))
        assert torch.equal(matrix.product(x, residual), dense.product(x, residual))
        assert torch.equal(matrix.gradient(grad), dense.gradient(grad))
        plain = QuantizedMatrix(weight, dtype).product(x, residual.clone())
        rtol, atol = (1e-5, 5e-7 * inputs) if dtype == torch.float32 else (1e-2, 0.1)  # plain: rounded to bfloat16
        torch.testing.assert_close(plain, dense.product(x, residual), rtol=rtol, atol=atol)


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
        found = quantize(tensor, kind) if name.endswith("_proj.weight") else None
        if found is not None:
            tensors[name] = found.widen()
    save_file(tensors, target / "model.safetensors")


@pytest.mark.parametrize("native", [pytest.param(True, marks=NEEDS_COMPILER), False], ids=["native", "torch"])
@pytest.mark.parametrize(("family", "kind"), BASES)
def test_a_quantized_base_trains_and_samples_as_the_model_of_its_numbers(
    family: str, kind: Quantization, native: bool, native_folder: Path, tmp_path: Path
) -> None:
    folder, widened = tmp_path / "model", tmp_path / "widened"
    write_model(folder, "untied", family=family, **WIDE[family])
    _write_widened(folder, widened, kind)
    kernels = native_folder if native else None
    engine, reference = _engine(folder, kind, kernels), _engine(widened, None, kernels)
    for each in (engine, reference):
        each.create_model("m", "base", LORA)
        train(each, "m")
    data = random_data(3)
    ours, theirs = (each.forward_backward("m", data, CROSS_ENTROPY) for each in (engine, reference))
    for own, other in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert np.abs(own - other).max() <= 2e-5
    own_gradient, gradient = take_gradient(engine, "m"), take_gradient(reference, "m")
    for name, expected in gradient.items():
        assert np.abs(own_gradient[name] - expected).max() <= 1e-4 * max(np.abs(expected).max(), 1e-3), name
    plain = _engine(folder, None, kernels)
    plain.create_model("m", "base", LORA)
    unquantized = plain.forward("m", data, CROSS_ENTROPY).logprobs[0]
    assert np.abs(unquantized - ours.logprobs[0]).max() > 1e-3  # it is quantized indeed


@pytest.mark.parametrize("native", [pytest.param(True, marks=NEEDS_COMPILER), False], ids=["native", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "kind"), BASES)
def test_sampler_and_trainer_of_a_quantized_base_have_the_same_bits(
    family: str,
    kind: Quantization,
    dtype: Literal["float32", "bfloat16"],
    native: bool,
    native_folder: Path,
    tmp_path: Path,
) -> None:
    write_model(tmp_path, "tied", family=family, **WIDE[family])
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
    write_model(tmp_path / "own", "tied", **WIDE["qwen3"])
    info = TorchEngine(device="cpu", quantize="nf4").load_base("base", str(tmp_path / "own"))
    assert info.settings["quantization"] == "nf4"
    write_other_model(tmp_path / "other", "glm4")
    with pytest.raises(InvalidRequestError, match="MINT_QUANTIZE"):
        TorchEngine(device="cpu", quantize="nf4").load_base("base", str(tmp_path / "other"))

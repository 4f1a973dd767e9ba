"""Products with quantized matrices against torchao and bitsandbytes, by CPU time, all sides in turns in one process.

    pip install --no-deps --target SITE torchao==0.18.0 bitsandbytes==0.50.2
    PYTHONPATH=SITE python -m benchmarks.compare.quantized_products [--rows 1] [--layers 28]

The four matrices of each layer of the shape `qwen3-0.6b`, rows in bfloat16. A side is left out where its package is
missing. Reported are the CPU time of the rows through all layers, the memory of the weights, and the error: the largest
difference from a product in float64 with the weights before they were quantized, in parts of the largest number.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mint.engine.cpu.kernels import NativeKernels
from mint.engine.cpu.panels import NativeProducts, panel_matrix
from mint.engine.quantized.number_formats import Quantization, quantize
from mint.engine.quantized.quantized_panels import QuantizedPanels

SHAPES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))
KINDS: tuple[Quantization, ...] = ("int8", "fp8", "nf4")
Product = Callable[[Tensor], Tensor]


@dataclass
class Side:
    """One way to multiply: its products in order, and the memory of their weights."""

    products: Sequence[Product]
    size_bytes: int


def mint_sides(weights: Sequence[Tensor], folder: Path) -> dict[str, Side]:
    """mint's kernels, compiled into `folder`.

    Raises:
        RuntimeError: this processor does not multiply bfloat16.
    """
    kernels = NativeKernels(folder)
    products = NativeProducts(kernels)
    plain = [panel_matrix(products, weight) for weight in weights]
    found = [matrix for matrix in plain if matrix is not None]
    if len(found) < len(plain):
        raise RuntimeError("this processor does not multiply bfloat16")
    sides = {"mint bfloat16": Side([matrix.product for matrix in found], sum(matrix.size_bytes for matrix in found))}
    for kind in KINDS:
        codes = [quantize(weight, kind) for weight in weights]
        own = [QuantizedPanels(kernels, code, torch.bfloat16) for code in codes if code is not None]
        sides[f"mint {kind}"] = Side([matrix.product for matrix in own], sum(matrix.size_bytes for matrix in own))
    return sides


def torch_side(weights: Sequence[Tensor]) -> Side:
    """oneDNN by torch."""
    products = [lambda x, weight=weight: F.linear(x, weight) for weight in weights]
    return Side(products, sum(weight.nbytes for weight in weights))


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return layer


def torchao_side(weights: Sequence[Tensor]) -> Side:
    """`Int8WeightOnlyConfig` of torchao, one scale for each output."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # ty: ignore[import-not-found]

    model = nn.ModuleList(_linear(weight) for weight in weights)
    quantize_(model, Int8WeightOnlyConfig())
    return Side(list(model), sum(weight.numel() + 4 * len(weight) for weight in weights))


def bitsandbytes_side(weights: Sequence[Tensor]) -> Side:
    """`Linear4bit` of bitsandbytes: NF4 in blocks of 64."""
    import bitsandbytes as bnb  # ty: ignore[import-not-found]

    layers = []
    for weight in weights:
        layer = bnb.nn.Linear4bit(weight.shape[1], weight.shape[0], bias=False, quant_type="nf4",
                                  compute_dtype=torch.bfloat16, compress_statistics=False)  # fmt: skip
        layer.weight = bnb.nn.Params4bit(weight.clone(), requires_grad=False, quant_type="nf4", blocksize=64,
                                         compress_statistics=False)  # fmt: skip
        layers.append(layer.to("cpu").eval())
    return Side(layers, sum(weight.numel() // 2 + weight.numel() // 64 * 4 for weight in weights))


def main() -> None:
    """Reads the options, runs all sides in turns, prints a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(shape, generator=generator).mul_(0.02).bfloat16() for _ in range(options.layers) for shape in SHAPES
    ]
    rows = {inputs: torch.randn(options.rows, inputs, generator=generator).bfloat16() for _, inputs in SHAPES}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        sides = {"torch bfloat16": torch_side(weights), **mint_sides(weights, Path(folder))}
        for name, make in (("torchao int8", torchao_side), ("bitsandbytes nf4", bitsandbytes_side)):
            try:
                sides[name] = make(weights)
            except ImportError as error:
                print(f"{name} is left out: {error}")
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(options.repeats + 1):  # the first one warms up
            for name in list(sides) if repeat % 2 else list(sides)[::-1]:
                start = time.process_time()
                for product, weight in zip(sides[name].products, weights, strict=True):
                    product(rows[weight.shape[1]])
                if repeat:
                    seconds[name].append(time.process_time() - start)
        for name, side in sides.items():
            errors = []
            for product, weight in list(zip(side.products, weights, strict=True))[: len(SHAPES)]:
                exact = rows[weight.shape[1]].double() @ weight.double().t()
                errors.append(float((product(rows[weight.shape[1]]).double() - exact).abs().max() / exact.abs().max()))
            middle = 1e3 * statistics.median(seconds[name])
            print(f"{name:18s} {middle:8.1f} CPU ms  {side.size_bytes / 1e6:6.0f} MB  error {max(errors):.1e}")


if __name__ == "__main__":
    main()

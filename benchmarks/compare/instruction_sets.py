"""mint's kernels in C compiled for several sets of instructions, by CPU time, all sets in turns in one process.

    python -m benchmarks.compare.instruction_sets [--sets avx512-bf16 avx512 avx2] [--repeats 3] [--only 'nf4']

Operations of training and decoding on one thread, at widths of 512 and 1,536 and heads of 64. Reported are the smallest
CPU time of each operation and its ratio to the first set's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from mint.config import read_settings
from mint.engine.cpu.attention import DecodedRows, NativePackedAttention, attend_pages
from mint.engine.cpu.build import NativeBuild
from mint.engine.cpu.kernels import NativeKernels
from mint.engine.cpu.operations import NativeOperations
from mint.engine.instruction_sets import sets_of_processor
from mint.engine.lora import SiteLora, SiteWeights
from mint.engine.packing import Span, attention_blocks
from mint.engine.quantized.number_formats import Quantization, quantize

Run = Callable[[], object]
INPUTS, OUTPUTS, RANK, ROWS = 512, 1536, 16, 128
KINDS: tuple[Quantization, ...] = ("nf4", "int8", "fp8")
LEAST_S = 0.02


def operations_of(name: str) -> dict[str, Run]:
    """What is timed, by the kernels of a set."""
    kernels = NativeKernels(NativeBuild(read_settings().kernels_dir, instructions=name))
    found: dict[str, Run] = {}
    for dtype, type_name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        operations = NativeOperations(dtype, kernels)
        matrix = operations.matrix(torch.randn(OUTPUTS, INPUTS).to(dtype))
        for rows in (1, 8, ROWS):
            found[f"product {type_name}, {rows} rows"] = partial(matrix.product, torch.randn(rows, INPUTS))
        heads = torch.randn(256, 16, 64).to(dtype)
        attention = NativePackedAttention(kernels, attention_blocks([Span(0, 256)]), 8, 4, {})
        found[f"attention {type_name}"] = partial(attention, 0, heads)
        found[f"attention {type_name}, with gradient"] = partial(_backward, attention, heads)
        for kind in KINDS:
            weight = quantize(torch.randn(OUTPUTS, INPUTS), kind)
            assert weight is not None, "the widths fit all formats"
            quantized = operations.quantized_matrix(weight)
            for rows in (1, 8, ROWS):
                found[f"{kind} {type_name}, {rows} rows"] = partial(quantized.product, torch.randn(rows, INPUTS))
            found[f"{kind} {type_name}, gradient"] = partial(quantized.gradient, torch.randn(ROWS, OUTPUTS))
    operations = NativeOperations(torch.float32, kernels)
    lora = SiteWeights(torch.randn(RANK, INPUTS), (torch.randn(OUTPUTS, RANK),))
    for rows in (1, 8, ROWS):
        own = torch.zeros(rows, OUTPUTS), torch.randn(rows, INPUTS)
        found[f"lora, {rows} rows"] = partial(operations.add_loras, *own, [SiteLora(slice(0, rows), lora, 1.0)])
    wide, narrow = torch.randn(ROWS, OUTPUTS), torch.randn(ROWS, INPUTS)
    found["lora's gradient"] = partial(operations.lora_gradient, wide, narrow, lora, 1.0, torch.zeros(ROWS, INPUTS))
    pages, table = torch.randn(2, 9, 4, 64, 64), np.tile(np.arange(8), (8, 1))
    decoded = DecodedRows(8, 4, 1, 64, table, np.full(8, 500))
    found["decoding attention"] = partial(
        attend_pages, kernels, decoded, torch.randn(8, 16, 64), pages[0], pages[1], 0, None
    )
    found["swiglu"] = partial(operations.swiglu, torch.randn(ROWS, 2 * OUTPUTS))
    found["swiglu's gradient"] = partial(operations.swiglu_backward, wide, torch.randn(ROWS, 2 * OUTPUTS))
    found["norm"] = partial(operations.rms_norm, narrow, torch.ones(INPUTS), 1e-6)
    return found


def _backward(attention: NativePackedAttention, heads: torch.Tensor) -> None:
    own = heads.clone().requires_grad_()
    out = attention(0, own)
    out.backward(torch.ones_like(out))


def seconds(run: Run) -> float:
    """CPU time of one call."""
    run()
    count = 1
    while True:
        start = time.thread_time()
        for _ in range(count):
            run()
        taken = time.thread_time() - start
        if taken > LEAST_S:
            return taken / count
        count *= 3


def main() -> None:
    """Prints a line for each operation."""
    parser = argparse.ArgumentParser(description=__doc__)
    own = [known.name for known in sets_of_processor() if known.name != "portable"]
    parser.add_argument("--sets", nargs="+", default=own, help="by default all that this processor has")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="operations whose names begin so")
    given = parser.parse_args()
    torch.set_num_threads(1)
    sets = {name: operations_of(name) for name in given.sets}
    for operation in filter(lambda name: name.startswith(given.only), sets[given.sets[0]]):
        best = dict.fromkeys(sets, float("inf"))
        for _ in range(given.repeats):
            for name, runs in sets.items():
                best[name] = min(best[name], seconds(runs[operation]))
        first = best[given.sets[0]]
        figures = (f"{name} {1e6 * taken:.1f} us ({taken / first:.2f})" for name, taken in best.items())
        print(f"{operation:36}", *figures, flush=True)


if __name__ == "__main__":
    main()

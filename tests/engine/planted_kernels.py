"""mint's Triton kernels with a planted fault each, for the self-check: the fault is one change of their source."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import mint.engine.cuda
import mint.engine.quantized
from mint.engine.cuda.fast_paths import (
    EDGE_INPUTS,
    Shapes,
    company_paths,
    fused_paths,
    invariant_paths,
    quantized_paths,
    step_kernel_paths,
)
from mint.engine.cuda.self_check import FastPath
from mint.engine.packing import Span

SOURCE = Path(mint.engine.cuda.__file__).with_name("kernels.py")
INVARIANT_SOURCE = SOURCE.with_name("invariant_kernels.py")
FUSED_SOURCE = SOURCE.with_name("fused_passes.py")
WIDENING_SOURCE = Path(mint.engine.quantized.__file__).with_name("triton_widening.py")
SHAPES = Shapes(80, 88, 4, 2, 24, 2, 1e-6, True, True, "float32", "cpu")
"""No width is a power of two, so that every mask has an edge."""

SPANS = {"20 rows with a shared prefix": [Span(0, 8), Span(8, 14, (0, 8)), Span(14, 20)]}
"""Interpreted, each row takes long."""

SHORT, LONG = (1, 17), (1, 6)
"""Rows: past the edge of a tile; with every length of a row, and padding."""


@dataclass(frozen=True)
class Fault:
    """The first `right` of the source after `place` becomes `wrong`; `words` are of the fault that must be found."""

    kernel: str
    place: str
    right: str
    wrong: str
    words: str = "differs by"
    source: Path = SOURCE


FAULTS = {
    "wrong mask of columns": Fault(
        "norm", "def _norm(", "real = columns < width", "real = columns < width - 1", "not finite"
    ),
    "mean over the padded width": Fault("norm", "def _norm(", "(own * own) / width", "(own * own) / WIDTH"),
    "wrong stride": Fault(
        "heads", "def _heads(", "(FIRST_PAGE + position // PAGE_POSITIONS)", "(2 + position // PAGE_POSITIONS)"
    ),
    "rotation the wrong way": Fault(
        "heads", "def _heads(", "before * cosine - second * sine", "before * cosine + second * sine"
    ),
    "keys of another head": Fault("heads", "def _heads(", "+ (kv % SIDE) * DIM", "+ (kv % 1) * DIM"),
    "padding is written": Fault("heads", "def _heads(", "used = used & real", "used = real"),
    "the lora of another tile": Fault("shrink", "def _shrink(", "slots + tl.program_id(0) * ROWS", "slots"),
    # It reads what lies in front of the loras, which may be anything.
    "no lora is a lora": Fault("add", "def _lora_tile(", "slot >= 0, RANK, 0", "slot >= 0, RANK, RANK", "result 0"),
    "another part of the lora": Fault("heads", "def _lora_tile(", "part * RANK + ranks", "ranks"),
    "missing accumulation": Fault("attend", "def _attend(", "mixed * shrunk[:, None] + tl.dot", "tl.dot"),
    "total not scaled": Fault("attend", "def _attend(", "total * shrunk + tl.sum", "total + tl.sum"),
    "a key too many": Fault("attend", "def _attend(", "keys_of_page < length", "keys_of_page <= length"),
    "nan at an edge": Fault(
        "attend",
        "def _attend(",
        "tl.load(values + start + inside, mask=loaded, other=0.0)",
        "tl.load(values + start + inside, mask=loaded, other=float('nan'))",
        "not finite",
    ),
    "a split too many": Fault(
        "attend",
        "def _merge(",
        "(SPLIT_PAGES * PAGE_POSITIONS) < length",
        "(SPLIT_PAGES * PAGE_POSITIONS) <= length",
        "not finite",
    ),
    "hangs": Fault("attend", "def _merge(", "split += 1", "split += 0", "did not end within"),
    "raises": Fault("attend", "def attend(", "WIDTH=_padded(dim)", "WIDTH=dim", "it raised"),
    "sigmoid the wrong way": Fault("swiglu", "def _swiglu(", "tl.exp(-gate)", "tl.exp(gate)"),
    "rows written behind the last": Fault(
        "swiglu", "def _swiglu(", "real, within = rows < count", "real, within = rows <= count", "result 2 differs"
    ),
    "missing residual": Fault("add", "def _add(", "total += tl.load(product", "total = tl.load(product"),
    "no sum over the inputs": Fault(
        "product", "def _product(", "tl.dot(left, right, total,", "tl.dot(left, right,", source=INVARIANT_SOURCE
    ),
    "a product that sums by the number of rows": Fault(
        "product in company",
        "def product(",
        "INPUTS=INPUTS_AT_ONCE",
        "INPUTS=INPUTS_AT_ONCE if count > 1 else 16",
        source=INVARIANT_SOURCE,
    ),
    "keys of the next sequence": Fault(
        "attention", "def _attend_packed(", "position < length", "position <= length", source=INVARIANT_SOURCE
    ),
    "keys in blocks by the number of rows": Fault(
        "attention in company",
        "def attend_packed(",
        "KEYS=KEYS_AT_ONCE",
        "KEYS=KEYS_AT_ONCE if count > 66 else 16",
        source=INVARIANT_SOURCE,
    ),
    "rotation of the gradient the wrong way": Fault(
        "heads' gradient",
        "def _finish_heads_gradient(",
        "first * cosine + second * sine",
        "first * cosine - second * sine",
        source=FUSED_SOURCE,
    ),
    "values rotated, too": Fault(
        "heads,", "def _finish_heads(", "turned = head < rotated", "turned = head <= rotated", source=FUSED_SOURCE
    ),
    "a norm's gradient without its mean": Fault(
        "norm's gradient", "def _norm_gradient(", " - own * (mean", " - 0.9 * own * (mean", source=FUSED_SOURCE
    ),
    "codes in the wrong order": Fault(
        "mxfp4", "def _widen(", "(columns % EACH) * BITS", "(EACH - 1 - columns % EACH) * BITS", source=WIDENING_SOURCE
    ),
    "codes without their sign": Fault(
        "int8", "def _widen(", "(1 << BITS) - 1", "(1 << (BITS - 1)) - 1", source=WIDENING_SOURCE
    ),
    "the scale of another block": Fault(
        "nf4", "def _widen(", "columns // block", "columns * 0", source=WIDENING_SOURCE
    ),
    "numbers written behind a row": Fault(
        "fp8", "def _widen(", "real = columns < width", "real = columns < width + 1", "result", source=WIDENING_SOURCE
    ),
    "columns left out": Fault(
        "add", "def _tiles(", "triton.cdiv(columns, COLUMNS_AT_ONCE)", "columns // COLUMNS_AT_ONCE", "not finite"
    ),
}


def paths(names: list[str]) -> Iterator[FastPath]:
    """The kernels as they are, and those with the faults of these names, each under the name of its fault."""
    for dtype in ("float32", "float16"):
        sound = _load(INVARIANT_SOURCE.read_text(), "sound").InvariantKernels()
        fused = _load(FUSED_SOURCE.read_text(), "sound_passes").FusedPasses()
        widen = _load(WIDENING_SOURCE.read_text(), "sound_widening").widen_matrix
        for path in (
            *_all_paths(replace(SHAPES, dtype=dtype), sound, LONG),
            *fused_paths(replace(SHAPES, dtype=dtype), fused, SHORT),
            *quantized_paths(replace(SHAPES, dtype=dtype), widen),
        ):
            yield replace(path, name=f"sound in {dtype}")
    for name in names:
        fault = FAULTS[name]
        made = _load(_plant(fault), name.replace(" ", "_"))
        if fault.source == FUSED_SOURCE:
            for path in fused_paths(SHAPES, made.FusedPasses(), SHORT):
                if path.case.startswith(fault.kernel):
                    yield replace(path, name=name)
            continue
        if fault.source == WIDENING_SOURCE:
            for path in quantized_paths(SHAPES, made.widen_matrix):
                if path.case == f"{fault.kernel}, {EDGE_INPUTS} inputs":
                    yield replace(path, name=name)
            continue
        kernels = made.TritonKernels() if fault.source == SOURCE else made.InvariantKernels()
        for path in _all_paths(SHAPES, kernels, LONG if fault.kernel == "attend" else SHORT):
            if path.case.startswith(fault.kernel):
                yield replace(path, name=name)


def _all_paths(shapes: Shapes, kernels: Any, counts: tuple[int, ...]) -> Iterator[FastPath]:
    yield from step_kernel_paths(shapes, kernels, counts)
    if hasattr(kernels, "product"):
        from mint.engine.cuda.fused_passes import FusedPasses  # imports Triton

        yield from invariant_paths(shapes, kernels, counts, SPANS)
        yield from company_paths(shapes, kernels, kernels, FusedPasses())


def _plant(fault: Fault) -> str:
    before, place, after = fault.source.read_text().partition(fault.place)
    if fault.right not in after:
        raise ValueError(f"{fault.right!r} is not in the kernels after {fault.place!r}: plant the fault anew")
    return before + place + after.replace(fault.right, fault.wrong, 1)


def _load(source: str, name: str) -> ModuleType:
    """Triton reads the source of a kernel from its file."""
    file = Path(tempfile.mkdtemp()) / f"{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

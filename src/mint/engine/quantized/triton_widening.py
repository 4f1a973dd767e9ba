"""Widens a quantized matrix on a GPU, as a Triton kernel: codes and scales are read once, the matrix is written once.

The numbers are those of `QuantizedWeight.widen`, rounded to the dtype of the products. Needs Triton, which CUDA builds
of torch bring with them. Letters: I inputs · O outputs.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from mint.engine.quantized.number_formats import WORD_BITS, Quantization, QuantizedWeight, code_values

INPUTS_AT_ONCE = 1024


def widen_matrix(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """The matrix [O, I] that the codes stand for, in `dtype`. Nothing is read back, so it can be captured in a graph
    once it has run for this format and device."""
    codes, scales = weight.codes, weight.scales
    out = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=codes.device)
    each = weight.codes_per_word
    _widen[(weight.outputs, triton.cdiv(weight.inputs, INPUTS_AT_ONCE))](
        codes=codes,
        scales=scales,
        values=_values_on(codes.device, weight.kind),
        out=out,
        width=weight.inputs,
        block=weight.block,
        code_row=codes.stride(0),
        scale_row=scales.stride(0),
        EACH=each,
        BITS=WORD_BITS // each,
        INPUTS=INPUTS_AT_ONCE,
    )
    return out


@lru_cache
def _values_on(device: torch.device, kind: Quantization) -> Tensor:
    """The values of all codes, on the device."""
    return code_values(kind).to(device)


@triton.jit
def _widen(
    codes,
    scales,
    values,
    out,
    width,
    block,
    code_row,
    scale_row,
    EACH: tl.constexpr,
    BITS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """A part of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    real = columns < width
    words = tl.load(codes + row * code_row + columns // EACH, mask=real, other=0)
    code = (words >> ((columns % EACH) * BITS)) & ((1 << BITS) - 1)
    scale = tl.load(scales + row * scale_row + columns // block, mask=real, other=0.0)
    number = tl.load(values + code, mask=real, other=0.0) * scale
    tl.store(out + row * width + columns, number.to(out.dtype.element_ty), mask=real)

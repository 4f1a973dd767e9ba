"""Matrices with 4 or 8 bits for each number: NF4, MXFP4, int8 and FP8. Letters: I inputs · O outputs.

Sources: NF4 is from QLoRA (arXiv 2305.14314), in blocks of 64 inputs as bitsandbytes has them. int8 has one scale for
each output, as in LLM.int8 (arXiv 2208.07339), without its outliers. FP8 is E4M3 (arXiv 2209.05433). MXFP4 (OCP
Microscaling Formats 1.0) is E2M1 with a power of two for 32 inputs. Only files hold it; nothing is rounded to it here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

Quantization = Literal["nf4", "int8", "fp8", "mxfp4"]

NF4_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of a normal distribution, scaled to 1: the values of a code."""

E2M1_VALUES = (*(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), *(-0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0))
"""The values of a code of MXFP4, the highest bit of which is the sign."""

TABLES: dict[Quantization, tuple[float, ...]] = {"nf4": NF4_VALUES, "mxfp4": E2M1_VALUES}
"""By format with codes of 4 bits, the values of the codes."""

NF4_BLOCK, FP8_BLOCK = 64, 128
INT8_LARGEST, FP8_LARGEST = 127, 448.0

_LEAST_SCALED = 2.0**-100
"""A block whose largest number is smaller has the scale of one with this number."""
WORD_BITS = 32

ENTRIES_AT_ONCE = 1 << 22
"""Numbers that are quantized at once: what it takes meanwhile is several times their size."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [O, I]. A word holds the codes of 8 or 4 inputs in order, the first one in its lowest bits."""

    kind: Quantization
    codes: Tensor  # int32 [O, words]
    scales: Tensor  # float32 [O, blocks]

    @property
    def codes_per_word(self) -> int:
        """8 or 4."""
        return codes_per_word(self.kind)

    @property
    def outputs(self) -> int:
        """O."""
        return len(self.codes)

    @property
    def inputs(self) -> int:
        """I."""
        return self.codes.shape[1] * self.codes_per_word

    @property
    def block(self) -> int:
        """Inputs with one scale."""
        return self.inputs // self.scales.shape[1]

    @property
    def size_bytes(self) -> int:
        """The memory of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def widen(self) -> Tensor:
        """The matrix that the codes stand for, float32 [O, I]."""
        if self.kind in TABLES:
            fours = self.codes.view(torch.int16).flatten().int().bitwise_and_(0xFFFF)
            values = _values_of_four(self.kind, self.codes.device).index_select(0, fours)
        else:
            values = _byte_values(self.kind, self.codes.view(torch.uint8))
        return values.view(self.outputs, -1, self.block).mul_(self.scales[:, :, None]).view(self.outputs, self.inputs)


def codes_per_word(kind: Quantization) -> int:
    """Codes in a word of 32 bits."""
    return 8 if kind in TABLES else 4


def code_values(kind: Quantization) -> Tensor:
    """The values of all codes, without a scale: float32 [16 or 256]."""
    return torch.tensor(TABLES[kind]) if kind in TABLES else _byte_values(kind, torch.arange(256, dtype=torch.uint8))


@lru_cache
def _values_of_four(kind: Quantization, device: torch.device) -> Tensor:
    """The values of four codes of 4 bits, float32 [65536, 4], the first one in the lowest bits: looking up four at a
    time takes a sixth of the time."""
    values = code_values(kind)
    return torch.cartesian_prod(values, values, values, values).flip(1).contiguous().to(device)


def _byte_values(kind: Quantization, codes: Tensor) -> Tensor:
    """The values of codes of 8 bits, float32; the codes are `torch.uint8`."""
    return codes.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn).float()


def quantize(weight: Tensor, kind: Quantization) -> QuantizedWeight | None:
    """The nearest codes to a matrix [O, I], which is scaled so that the largest number of a block has the largest code.

    None where I does not fit: NF4 needs a multiple of 64, int8 and FP8 of 4. None for MXFP4.
    """
    inputs = weight.shape[1]
    block = _block(inputs, kind)
    if block is None:
        return None
    at_once = max(1, ENTRIES_AT_ONCE // inputs)
    parts = [_quantize_rows(rows, kind, block) for rows in weight.contiguous().split(at_once)]
    codes, scales = (torch.cat(own) for own in zip(*parts, strict=True))
    return QuantizedWeight(kind, codes, scales)


def quantized_bytes(outputs: int, inputs: int, kind: Quantization) -> int | None:
    """`size_bytes` of what `quantize` makes of a matrix [outputs, inputs]; None where it makes nothing."""
    block = _block(inputs, kind)
    return None if block is None else outputs * 4 * (inputs // codes_per_word(kind) + inputs // block)


def _block(inputs: int, kind: Quantization) -> int | None:
    """Inputs with one scale; None where so many inputs do not fit, or nothing is quantized to `kind`."""
    if kind == "mxfp4":
        return None
    block = {"nf4": NF4_BLOCK, "int8": inputs, "fp8": inputs if inputs % FP8_BLOCK else FP8_BLOCK}[kind]
    return None if inputs % block or inputs % codes_per_word(kind) else block


def _quantize_rows(weight: Tensor, kind: Quantization, block: int) -> tuple[Tensor, Tensor]:
    """Codes and scales."""
    outputs, inputs = weight.shape
    blocks = weight.float().view(outputs, -1, block)
    largest = blocks.abs().amax(-1, keepdim=True)
    largest = largest.clamp(min=_LEAST_SCALED).where(largest != 0, largest)  # so that no quotient is infinite
    divisor = torch.where(largest == 0, torch.ones_like(largest), largest)
    if kind == "nf4":
        scales = largest
        codes = _nearest_nf4(blocks / divisor)
    elif kind == "int8":
        scales = largest / INT8_LARGEST
        codes = (blocks * (INT8_LARGEST / divisor)).round_().to(torch.int8).view(torch.uint8)
    else:
        scales = largest / FP8_LARGEST
        codes = (blocks * (FP8_LARGEST / divisor)).to(torch.float8_e4m3fn).view(torch.uint8)
    return _pack(codes.view(outputs, inputs), kind), scales.view(outputs, -1)


def keep_fp8(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> QuantizedWeight | None:
    """A matrix of FP8 codes `torch.float8_e4m3fn` [O, I], contiguous, as it is, with a scale for each `block` of
    outputs and inputs. No code is copied.

    None where the blocks of a row differ in width, or I is not a multiple of 4.
    """
    outputs, inputs = codes.shape
    rows, columns = block
    if (columns < inputs and inputs % columns) or inputs % codes_per_word("fp8"):
        return None
    return QuantizedWeight("fp8", _pack(codes.view(torch.uint8), "fp8"), scales.repeat_interleave(rows, 0)[:outputs])


def keep_mxfp4(codes: Tensor, scales: Tensor) -> QuantizedWeight | None:
    """A matrix of MXFP4 codes as it is: bytes [O, I / 2] with two of them, the first one in the lower bits, and scales,
    float32 [O, I / 32]. No number is copied.

    None where the bytes do not lie in words of 4.
    """
    if codes.shape[1] % 4 or not codes.is_contiguous():
        return None
    return QuantizedWeight("mxfp4", codes.view(torch.int32), scales)


def join_outputs(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Matrices of one kind one below the other; None where their blocks differ."""
    if len({part.block for part in parts}) > 1:
        return None
    codes, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales"))
    return QuantizedWeight(parts[0].kind, codes, scales)


def _nearest_nf4(numbers: Tensor) -> Tensor:
    """The codes of the nearest values of NF4, `torch.uint8`. Counting the limits below a number takes a third of the
    time of `torch.bucketize`."""
    codes = torch.zeros_like(numbers, dtype=torch.uint8)
    values = torch.tensor(NF4_VALUES)
    for limit in ((values[1:] + values[:-1]) / 2).tolist():
        codes += numbers > limit
    return codes


def _pack(codes: Tensor, kind: Quantization) -> Tensor:
    """Words, int32 [O, I / codes in a word], of codes `torch.uint8` [O, I]."""
    if codes_per_word(kind) == WORD_BITS // 8:
        return codes.view(torch.int32)
    return (codes[:, 1::2] << 4).bitwise_or_(codes[:, ::2]).view(torch.int32)

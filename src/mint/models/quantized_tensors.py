"""The tensors of a base model that was published in FP8 or MXFP4, as the floating point tensors that they stand for.

Their numbers are computed in float32 when they are read, in which each product of a code's value and its scale is
rounded at most once. Letters: O outputs · I inputs · N experts.

Formats: FP8 (E4M3) with a scale for a block of a matrix, as DeepSeek-V3 (arXiv 2412.19437, section 3.3) and Qwen3-FP8
have it, and as compressed-tensors writes it (`float-quantized`); MXFP4 (OCP Microscaling Formats 1.0: E2M1 numbers,
32 of which have an E8M0 scale) as GPT-OSS has its experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from mint.errors import InvalidRequestError
from mint.models.tensor_files import StoredTensor

METHODS = "'fp8', 'mxfp4', or 'compressed-tensors' with format 'float-quantized'"

_UNQUANTIZED = (
    "Take the model as it was before quantization, in bfloat16: MINT_QUANTIZE=nf4 quantizes it when it is loaded"
)
"""The remedy where the quantization is not read."""

_ACTIVATION_SCALES = (".activation_scale", ".input_scale", ".q_scale", ".k_scale", ".v_scale")
"""Scales that round activations, queries, keys and values in other engines. Here these keep their precision."""

_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each code of 4 bits."""

_MXFP4_BLOCK = 32


@dataclass(frozen=True)
class Fp8Tensor(StoredTensor):
    """A matrix [O, I] of E4M3 codes, with a scale for each `block` of outputs and inputs. `read` gives float32."""

    scales: StoredTensor
    block: tuple[int, int]

    def read(self, part: int | slice | None = None) -> Any:
        codes, scales = self.read_codes()
        rows, columns = self.block
        scales = scales.repeat_interleave(rows, 0)[: self.shape[0]]
        chosen = slice(None) if part is None else part
        return codes[chosen].float() * scales[chosen].repeat_interleave(columns, -1)[..., : self.shape[1]]

    def read_codes(self) -> tuple[Any, Any]:
        """The codes, `torch.float8_e4m3fn` [O, I], and the scales, float32 [blocks of outputs, blocks of inputs]."""
        grid = (-(-size // each) for size, each in zip(self.shape, self.block, strict=True))
        return super().read(), self.scales.read().float().view(*grid)


@dataclass(frozen=True)
class Mxfp4Tensor(StoredTensor):
    """Matrices of experts [N, I, O], stored as bytes [N, O, I / 32, 16] of two codes, the first one in the lower bits,
    and `scales` [N, O, I / 32]. `read` gives float32."""

    scales: StoredTensor

    def read(self, part: int | slice | None = None) -> Any:
        stored, exponents = super().read(part), self.scales.read(part)
        codes = (stored.unsqueeze(-1) >> stored.new_tensor((0, 4))).bitwise_and_(15)
        doubled = stored.char().new_tensor(_E2M1_DOUBLED).index_select(0, codes.flatten().int())
        halves = _powers_of_two(exponents, 128)
        numbers = doubled.float().view(*exponents.shape, _MXFP4_BLOCK).mul_(halves.unsqueeze(-1))
        return numbers.flatten(-2).transpose(-1, -2).contiguous()

    @property
    def kept_bytes(self) -> int:
        """The memory of what `read_codes` gives for all experts: 5 bits for each number."""
        return prod(self.shape) // 2 + 4 * prod(self.scales.shape)

    def read_codes(self, part: int) -> tuple[Any, Any]:
        """Of one expert the bytes with two codes [O, I / 2], and the scales, float32 [O, I / 32]."""
        return super().read(part).flatten(-2), _powers_of_two(self.scales.read(part), 127)


def dequantized(tensors: Mapping[str, StoredTensor], quantization: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The tensors of a model whose config.json has this `quantization_config`; nothing is read yet.

    Raises:
        InvalidRequestError: the method is not supported, or a tensor has no scales that fit it.
    """
    method = quantization.get("quant_method")
    if method == "fp8":
        return _with_scales(tensors, "weight_scale_inv", quantization.get("weight_block_size"))
    if method == "compressed-tensors":
        if quantization.get("format") != "float-quantized":
            raise _unsupported("format", quantization.get("format"))
        if quantization.get("transform_config"):  # rotations of activations, which the weights alone do not undo
            raise _unsupported("transform_config", quantization["transform_config"])
        return _with_scales(tensors, "weight_scale", _block_structure(quantization))
    if method == "mxfp4":
        return _with_exponents(tensors)
    raise _unsupported("quant_method", method)


def _block_structure(quantization: Mapping[str, Any]) -> object:
    """The block of the first group of layers that has one; None: a scale for each output, or for each matrix."""
    groups = quantization.get("config_groups") or {}
    try:
        blocks = [(group.get("weights") or {}).get("block_structure") for group in groups.values()]
    except AttributeError:  # not an object of objects
        raise _unsupported("config_groups", groups) from None
    return next((block for block in blocks if block), None)


def _with_scales(tensors: Mapping[str, StoredTensor], scale: str, blocks: object) -> dict[str, StoredTensor]:
    """Joins each FP8 matrix with its scales, which are named `scale` in place of `weight`."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if name.endswith((f".{scale}", *_ACTIVATION_SCALES)):
            continue
        if tensor.dtype != "F8_E4M3":
            found[name] = tensor
            continue
        scales = tensors.get(f"{name.removesuffix('weight')}{scale}")
        if scales is None:
            raise _unfit(name, f"has no {scale}")
        block = _block(tensor, scales, blocks)
        found[name] = Fp8Tensor("F32", tensor.shape, tensor.name, tensor.file, tensor.path, scales, block)
    return found


def _powers_of_two(exponents: Any, bias: int) -> Any:
    """2^(exponent - bias) in float32, from bytes of which 255 is not a number."""
    # in float64, in which none of them is subnormal
    return (exponents.double() - bias).exp2().float().masked_fill_(exponents == 255, float("nan"))


def _with_exponents(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Joins each `X_blocks` with its `X_scales`, as X."""
    found: dict[str, StoredTensor] = {}
    used = {f"{name.removesuffix('_blocks')}_scales" for name in tensors if name.endswith("_blocks")}
    for name, tensor in tensors.items():
        stem = name.removesuffix("_blocks")
        if stem == name:
            if name not in used:
                found[name] = tensor
            continue
        scales = tensors.get(f"{stem}_scales")
        if scales is None or len(scales.shape) != 3 or {tensor.dtype, scales.dtype} != {"U8"}:
            raise _unfit(name, f"has no {stem}_scales of 3 dimensions, both of bytes")
        experts, outputs, blocks = scales.shape
        if tensor.shape != (experts, outputs, blocks, _MXFP4_BLOCK // 2):
            raise _unfit(name, f"is {list(tensor.shape)} with scales {list(scales.shape)}")
        shape = (experts, blocks * _MXFP4_BLOCK, outputs)
        found[stem] = Mxfp4Tensor("F32", shape, tensor.name, tensor.file, tensor.path, scales)
    return found


def _block(tensor: StoredTensor, scales: StoredTensor, blocks: object) -> tuple[int, int]:
    """The outputs and inputs that have one scale."""
    if len(tensor.shape) != 2:
        raise _unfit(tensor.name, f"has {len(tensor.shape)} dimensions; FP8 is supported for matrices")
    block = (1, tensor.shape[1]) if prod(scales.shape) > 1 else tensor.shape
    if isinstance(blocks, list | tuple) and len(blocks) == 2 and all(type(size) is int and size > 0 for size in blocks):
        block = tuple(blocks)
    elif blocks is not None:
        raise _unsupported("weight_block_size", blocks)
    if prod(scales.shape) != prod(-(-size // each) for size, each in zip(tensor.shape, block, strict=True)):
        problem = f"is {list(tensor.shape)} with scales {list(scales.shape)}, which are not those of blocks {block}"
        raise _unfit(tensor.name, problem)
    return block


def _unsupported(key: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"is a quantization that mint does not read; supported are {METHODS}",
        field=f"config.json quantization_config.{key}",
        value=repr(value),
        remedy=_UNQUANTIZED,
    )


def _unfit(name: str, problem: str) -> InvalidRequestError:
    remedy = f"Give the folder as it was published. If it is that, mint does not read its quantization. {_UNQUANTIZED}"
    return InvalidRequestError(f"tensor {name} {problem}", field="base_model", remedy=remedy)

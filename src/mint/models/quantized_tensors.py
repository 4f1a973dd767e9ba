"""The tensors of a base model that was published in FP8 or MXFP4, as the floating point tensors that they stand for.

Their numbers are computed in float32 when they are read, in which each product of a code's value and its scale is
rounded at most once. Letters: O outputs · I inputs · N experts.

Formats: FP8 (E4M3) with a scale for a block of a matrix, as DeepSeek-V3 (arXiv 2412.19437, section 3.3) and Qwen3-FP8
have it, and as compressed-tensors writes it (`float-quantized`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from mint.errors import InvalidRequestError
from mint.models.tensor_files import StoredTensor

METHODS = "'fp8', or 'compressed-tensors' with format 'float-quantized'"

_ACTIVATION_SCALES = (".activation_scale", ".input_scale")
"""Scales that round activations in other engines. Here activations keep their precision."""


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
        return _with_scales(tensors, "weight_scale", _block_structure(quantization))
    raise _unsupported("quant_method", method)


def _block_structure(quantization: Mapping[str, Any]) -> object:
    """The block of the first group of layers that has one; None: a scale for each output, or for each matrix."""
    groups = (quantization.get("config_groups") or {}).values()
    blocks = ((group.get("weights") or {}).get("block_structure") for group in groups)
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
        remedy="Take the model as it was before quantization, in bfloat16: MINT_QUANTIZE=nf4 quantizes it when it is "
        "loaded",
    )


def _unfit(name: str, problem: str) -> InvalidRequestError:
    remedy = "Give an unmodified folder of Hugging Face"
    return InvalidRequestError(f"tensor {name} {problem}", field="base_model", remedy=remedy)

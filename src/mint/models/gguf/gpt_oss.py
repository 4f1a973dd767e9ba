"""Reads GGUF files of GPT-OSS, whose experts transformers does not read: its published configuration and tensors.

llama.cpp's converter writes gate and up of the experts by themselves, which alternate in the published tensors. It
packs the codes of MXFP4 in another order: byte k of a block of 32 has the codes of elements k and k + 16, where the
published ones have those of 2k and 2k + 1. Both are undone here; no code is rounded. Experts in other formats, and all
other tensors, become float32, in which every quantised value is exact.

Sources: `convert_hf_to_gguf.py` of https://github.com/ggml-org/llama.cpp, and the names in the `gguf` package.

Letters: N experts · E hidden size · I inner size of an expert · O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mint.errors import InvalidRequestError
from mint.models.gguf.header import GgufHeader
from mint.models.tensor_files import LaterArray

ARCHITECTURE = "gpt-oss"

QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
"""The `quantization_config` where the experts are in MXFP4, as it is published."""

EXPERTS = "_exps.weight"
"""How the names of the experts' matrices end in a file."""

_BLOCK = 32
"""Numbers that share an exponent. A block has 17 bytes in a GGUF file: the exponent, and 16 with two codes each."""

_BLOCK_BYTES = 17

_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "expert_feed_forward_length",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "sliding_window": "attention.sliding_window",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
"""Settings of config.json, and their keys below the architecture's name."""

_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}

_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
} | {
    f"self_attn.{own}_proj.{part}": f"attn_{theirs}.{part}"
    for own, theirs in {"q": "q", "k": "k", "v": "v", "o": "output"}.items()
    for part in ("weight", "bias")
}
"""Tensors of a layer that are stored alike, by their names in both."""

_OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def read_config(header: GgufHeader) -> dict[str, Any]:
    """The content of config.json, but for the tokens' number and the quantization.

    Raises:
        InvalidRequestError: the file lacks a key, or scales positions in a way that is not read.
    """
    sizes = {name: header.setting(key) for name, key in _SIZES.items()}
    sizes["rope_theta"] = float(sizes["rope_theta"])
    tokens = {name: header.token_id(kind) for name, kind in _TOKENS.items()}
    scaling = header.rope_scaling()
    if scaling.get("rope_type") == "yarn":  # the published model does not round the ends of the ramp
        scaling = {"beta_fast": 32.0, "beta_slow": 1.0, **scaling, "truncate": False}
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "dtype": "float32",
        **sizes,
        **{name: token for name, token in tokens.items() if token is not None},
        "rope_scaling": scaling or None,
        "attention_bias": True,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
    }


def stored_bytes(numbers: int) -> int:
    """The bytes of so many numbers in MXFP4, with their exponents."""
    return numbers // _BLOCK * _BLOCK_BYTES


def has_mxfp4(tensors: Mapping[str, Any]) -> bool:
    """Whether all experts among the tensors of a file, by name, are in MXFP4."""
    kinds = {tensor.tensor_type.name for name, tensor in tensors.items() if name.endswith(EXPERTS)}
    return kinds == {"MXFP4"}


def published_tensors(tensors: Mapping[str, Any], layers: int) -> dict[str, LaterArray]:
    """The tensors of the published model from those of a file, by name; each is made when it is written.

    Raises:
        InvalidRequestError: the file lacks one, or has others.
    """
    left = dict(tensors)

    def take(name: str) -> Any:
        if name not in left:
            remedy = "Give a complete file, or a Hugging Face folder"
            raise InvalidRequestError("is not among the tensors of the file", field=name, remedy=remedy)
        return left.pop(name)

    found = {own: _float32(take(theirs)) for own, theirs in _OUTSIDE.items()}
    if "output.weight" in left:
        found["lm_head.weight"] = _float32(take("output.weight"))
    is_mxfp4 = has_mxfp4(tensors)
    for layer in range(layers):
        prefix, stored = f"model.layers.{layer}.", f"blk.{layer}."
        found |= {prefix + own: _float32(take(stored + theirs)) for own, theirs in _LAYER.items()}
        experts = f"{prefix}mlp.experts."
        gate, up, down = (take(f"{stored}ffn_{part}_exps.weight") for part in ("gate", "up", "down"))
        biases = [take(f"{stored}ffn_{part}_exps.bias") for part in ("gate", "up")]
        found[f"{experts}gate_up_proj_bias"] = _alternating(*map(_float32, biases))
        if is_mxfp4:
            for part, blocks in (
                ("gate_up_proj", _alternating(_blocks(gate), _blocks(up))),
                ("down_proj", _blocks(down)),
            ):
                found[f"{experts}{part}_blocks"] = _changed(blocks, (*blocks.shape[:3], _BLOCK // 2), _codes)
                found[f"{experts}{part}_scales"] = _changed(blocks, blocks.shape[:3], lambda all_: all_[..., 0])
        else:
            found[f"{experts}gate_up_proj"] = _turned(_alternating(_float32(gate), _float32(up)))
            found[f"{experts}down_proj"] = _turned(_float32(down))
    if left:
        remedy = "Give the Hugging Face folder of this model"
        raise InvalidRequestError("is no tensor of GPT-OSS", field=min(left), remedy=remedy)
    return found


def _float32(tensor: Any) -> LaterArray:
    """A tensor of a file, dequantised."""
    from gguf.quants import dequantize  # deferred: it takes a part of a second

    shape = tuple(int(size) for size in reversed(tensor.shape))

    def make() -> np.ndarray:
        numbers = dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float32, copy=False)
        if not np.isfinite(numbers).all():
            raise _not_finite(tensor)
        return numbers

    return LaterArray(np.dtype(np.float32), shape, make)


def _blocks(tensor: Any) -> LaterArray:
    """The blocks of an MXFP4 tensor of experts, uint8 [N, O, I / 32, 17]."""
    inputs, outputs, experts = map(int, tensor.shape)
    shape = (experts, outputs, inputs // _BLOCK, _BLOCK_BYTES)

    def make() -> np.ndarray:
        blocks = np.asarray(tensor.data).reshape(shape)
        if (blocks[..., 0] == 255).any():
            raise _not_finite(tensor)
        return blocks

    return LaterArray(np.dtype(np.uint8), shape, make)


def _not_finite(tensor: Any) -> InvalidRequestError:
    remedy = "Give an undamaged file"
    return InvalidRequestError("has numbers that are not finite", field=tensor.name, remedy=remedy)


def _codes(blocks: np.ndarray) -> np.ndarray:
    """From blocks [..., 17] the bytes [..., 16] in the published order."""
    stored = blocks[..., 1:]
    codes = np.concatenate([stored & 15, stored >> 4], axis=-1)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def _changed(source: LaterArray, shape: tuple[int, ...], change: Callable[[np.ndarray], np.ndarray]) -> LaterArray:
    return LaterArray(source.dtype, shape, lambda: np.ascontiguousarray(change(source.make())))


def _alternating(gate: LaterArray, up: LaterArray) -> LaterArray:
    """Two arrays [N, O, ...] as one [N, 2 O, ...], whose outputs are theirs in turns."""
    experts, outputs, *rest = gate.shape
    shape = (experts, 2 * outputs, *rest)
    return LaterArray(gate.dtype, shape, lambda: np.stack([gate.make(), up.make()], axis=2).reshape(shape))


def _turned(matrices: LaterArray) -> LaterArray:
    """Matrices [N, O, I] as [N, I, O], as the published tensors have them where they are not quantized."""
    experts, outputs, inputs = matrices.shape
    return _changed(matrices, (experts, inputs, outputs), lambda all_: all_.swapaxes(1, 2))

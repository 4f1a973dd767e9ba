"""The shape of a decoder, read from a Hugging Face config.json; whatever mint does not compute is refused here.

Knows the families and their options; knows nothing of weights or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mint.errors import InvalidRequestError

ALIGNED = 4
"""Widths are multiples of this: 16 bytes in float32."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and constants of a Qwen3 dense decoder, named as in config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together (the values' is the same)."""
        return self.num_key_value_heads * self.head_dim


def read_decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that `config` (config.json) describes.

    Raises:
        InvalidRequestError: another family, an option that mint does not compute, or a missing or senseless size.
    """
    _expect(config, "model_type", "qwen3")
    _expect(config, "hidden_act", "silu", default="silu")
    _expect(config, "attention_bias", False, default=False)
    _expect(config, "use_sliding_window", False, default=False)
    for option in ("rope_scaling", "quantization_config"):
        if config.get(option):
            raise _unsupported(option, config[option], "only without")
    if set(config.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        raise _unsupported("layer_types", config["layer_types"], "only full_attention")
    heads = _size(config, "num_attention_heads")
    key_value_heads = _size(config, "num_key_value_heads", default=heads)
    if heads % key_value_heads:
        raise _unsupported("num_key_value_heads", key_value_heads, f"a divisor of the {heads} query heads")
    head_dim = _size(config, "head_dim", default=_size(config, "hidden_size") // heads)
    sizes = {key: _size(config, key) for key in ("hidden_size", "intermediate_size")}
    for key, size in {**sizes, "head_dim": head_dim}.items():
        # Unaligned rows get other bits from BLAS in other places of a batch (measured with widths 18 and 77).
        if size % ALIGNED:
            raise _unsupported(key, size, f"a multiple of {ALIGNED}")
    return DecoderConfig(
        vocab_size=_size(config, "vocab_size"),
        hidden_size=sizes["hidden_size"],
        intermediate_size=sizes["intermediate_size"],
        num_hidden_layers=_size(config, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=_size(config, "max_position_embeddings"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Top-level in older files; under `rope_parameters` as transformers 5 writes them."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise _unsupported("rope_parameters.rope_type", rope["rope_type"], "only 'default'")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _unsupported("rope_parameters.partial_rotary_factor", rope["partial_rotary_factor"], "only 1.0")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if not isinstance(theta, int | float) or theta <= 0:
        raise _unsupported("rope_theta", theta, "a positive number")
    return float(theta)


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    size = config.get(key)
    size = default if size is None else size
    if not isinstance(size, int) or size < 1:
        raise _unsupported(key, size, "a positive whole number")
    return size


def _expect(config: Mapping[str, Any], key: str, wanted: object, default: object = None) -> None:
    found = config.get(key, default)
    if found != wanted:
        raise _unsupported(key, found, f"only {wanted!r}")


def _unsupported(key: str, value: object, supported: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"mint computes Qwen3 dense models; supported here is {supported}",
        field=f"config.json {key}",
        value=repr(value),
        remedy="Choose a base model of that kind",
    )

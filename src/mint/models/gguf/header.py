"""Reads what transformers passes over in the header of a GGUF file: parts, layers, scaling of positions.

Knows the keys of the format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and no model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from mint.errors import InvalidRequestError

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The settings of Llama 3.1, 3.2 and 3.3. A file has the factor of each frequency in their place."""

_SCALING_KEYS = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""Keys below `rope.scaling`, and how Hugging Face calls them."""

_TOKEN_LIST = "tokenizer.ggml.tokens"
_TOKEN_IDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "unknown"))
"""The keys of tokens that transformers looks up in the list."""

_WRITE_IT_TWICE = ("falcon", "bloom")
"""Architectures whose files have an unembedding that is the embedding once more."""


_SETTINGS = {
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_epsilon": ("norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
"""Keys below the architecture's name → how Hugging Face calls them in one family or another."""

_WINDOWS = ("phi3", "starcoder2")
"""Architectures whose window transformers does not read."""

_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""The layers of the largest model of an architecture, whose logits of attention are scaled in another way."""

_TWO_WIDTHS = ("gemma4",)
"""Architectures whose layers have heads of two widths, which transformers reads."""


class GgufHeader:
    """The fields and the tensors of one file, read by the `gguf` package."""

    def __init__(self, reader: Any) -> None:
        """`reader`: a `gguf.GGUFReader`."""
        self._fields = {name: field.contents() for name, field in reader.fields.items() if not _is_list(field)}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        tokens = reader.fields.get(_TOKEN_LIST)
        self._token_count = 0 if tokens is None else len(tokens.data)
        self.architecture = str(self._fields.get("general.architecture", ""))

    @property
    def parameters(self) -> int:
        """The numbers of all tensors, but those that say how positions are scaled. An embedding that is also the
        unembedding counts once, also where it is written twice."""
        left_out = ("output.weight",) if self.architecture in _WRITE_IT_TWICE else ()
        counted = [own for name, own in self._tensors.items() if not name.startswith("rope_f") and name not in left_out]
        return sum(int(own.n_elements) for own in counted)

    def corrected(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of `config`, which transformers has made of this file, that the file says otherwise.

        transformers reads some keys of some architectures only, and takes its defaults for the others: the base of
        StarCoder 2's rotations, Phi 3's window, the width of Qwen3's heads, the sizes of experts.
        """
        found = {
            name: self._fields[key]
            for key, names in self._said().items()
            for name in names
            if name in config and isinstance(self._fields.get(key), int | float)
        }
        if self.query_pre_attn_scalar is not None:
            found["query_pre_attn_scalar"] = self.query_pre_attn_scalar
        rope = config.get("rope_parameters")
        if isinstance(rope, dict) and "rope_theta" in rope:  # not where layers have rotations of their own
            found["rope_parameters"] = {**rope, **self._rotations(rope, found.get("head_dim", config.get("head_dim")))}
        return {name: value for name, value in found.items() if value != config.get(name)}

    def _said(self) -> dict[str, tuple[str, ...]]:
        """The keys of this architecture, and how Hugging Face calls them."""
        keys = dict(_SETTINGS)
        if self.architecture in _WINDOWS:
            keys["attention.sliding_window"] = ("sliding_window",)
        if self.architecture in _TWO_WIDTHS:
            del keys["attention.key_length"]
        return {f"{self.architecture}.{key}": names for key, names in keys.items()}

    def _rotations(self, rope: Mapping[str, Any], head_dim: object) -> dict[str, float]:
        """The base of the rotations, and the share of a head that is rotated."""
        found = {}
        base = self._fields.get(f"{self.architecture}.rope.freq_base")
        if isinstance(base, int | float):
            found["rope_theta"] = float(base)
        rotated = self._number("rope.dimension_count")
        width = head_dim if isinstance(head_dim, int) else self._head_dim
        if "partial_rotary_factor" in rope and rotated is not None and width is not None:
            found["partial_rotary_factor"] = rotated / width
        return found

    @property
    def _head_dim(self) -> int | None:
        """The width of a head where a file does not say it."""
        hidden, heads = self._number("embedding_length"), self._number("attention.head_count")
        return None if hidden is None or heads is None or heads < 1 else hidden // heads

    @property
    def query_pre_attn_scalar(self) -> int | None:
        """Gemma 2 and 3 divide attention's logits by the square root of this number, which a file does not say; None
        of other architectures.

        It is the width of a head, but in the models of 27B, where it is hidden size / heads: the rule of llama.cpp
        (https://github.com/ggml-org/llama.cpp, `f_attention_scale`), which knows them by their layers, too.
        """
        layers_of_27b = _LAYERS_OF_27B.get(self.architecture)
        if layers_of_27b is None:
            return None
        is_27b = self._number("block_count") == layers_of_27b
        return self._head_dim if is_27b else self._number("attention.key_length")

    def _number(self, key: str) -> int | None:
        found = self._fields.get(f"{self.architecture}.{key}")
        return found if isinstance(found, int) else None

    def setting(self, key: str) -> Any:
        """The number at `key` below the architecture's name.

        Raises:
            InvalidRequestError: there is none.
        """
        found = self._fields.get(f"{self.architecture}.{key}")
        if not isinstance(found, int | float):
            raise InvalidRequestError(
                "is no number", field=f"{self.architecture}.{key}", value=found, remedy="Give an undamaged file"
            )
        return found

    def token_id(self, kind: str) -> int | None:
        """The id of a special token, such as `eos`; None if the file names none."""
        found = self._fields.get(f"tokenizer.ggml.{kind}_token_id")
        return found if isinstance(found, int) else None

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The tensors by name, as the `gguf` package reads them."""
        return self._tensors

    def require_whole(self) -> None:
        """Checks that the tensors of all layers are in this file.

        Raises:
            InvalidRequestError: it is a part of a split file, or says another number of layers than it has.
        """
        parts = self._fields.get("split.count", 1)
        if parts > 1:
            raise InvalidRequestError(
                "is one part of a split file",
                field="split.count",
                value=parts,
                remedy="Merge the parts with `llama-gguf-split --merge FIRST_PART WHOLE.gguf`",
            )
        layers = self._fields.get(f"{self.architecture}.block_count")
        numbers = {int(found[1]) for name in self._tensors if (found := re.match(r"blk\.(\d+)\.", name))}
        if layers is not None and (len(numbers) != layers or max(numbers, default=-1) != layers - 1):
            raise InvalidRequestError(
                f"is not the number of layers in the file, which has tensors of {len(numbers)}",
                field=f"{self.architecture}.block_count",
                value=layers,
                remedy="Give a complete file",
            )

    def require_known_tokens(self) -> None:
        """Checks that the tokens that begin and end a text, and stand for unknown ones, are in the list of tokens.

        Raises:
            InvalidRequestError: one is not.
        """
        for key in _TOKEN_IDS:
            token = self._fields.get(key)
            if token is not None and token >= self._token_count:
                raise InvalidRequestError(
                    f"is not among the {self._token_count} tokens of the file",
                    field=key,
                    value=token,
                    remedy="Give an undamaged file",
                )

    def rope_scaling(self) -> dict[str, Any]:
        """The scaling of positions as Hugging Face writes it; empty without one.

        Raises:
            InvalidRequestError: it is none that could be read exactly.
        """
        prefix = f"{self.architecture}.rope.scaling."
        given = {name.removeprefix(prefix): value for name, value in self._fields.items() if name.startswith(prefix)}
        kind = given.pop("type", "none")
        given.pop("finetuned", None)  # whether the model was trained with the scaling: it changes no number
        long, freqs = self._tensors.get("rope_factors_long.weight"), self._tensors.get("rope_freqs.weight")
        if kind not in ("none", "linear", "yarn") or long is not None:
            raise _unknown_scaling(f"{prefix}type", kind if long is None else "longrope")
        scaling: dict[str, Any] = {}
        if kind != "none":
            unknown = sorted(given.keys() - _SCALING_KEYS)
            if unknown:
                raise _unknown_scaling(prefix + unknown[0], given[unknown[0]])
            scaling = {"rope_type": kind} | {_SCALING_KEYS[name]: value for name, value in given.items()}
        if freqs is None:
            return scaling
        found = self._llama3_scaling(np.array(freqs.data, np.float64).reshape(-1))
        if scaling and found:
            raise _unknown_scaling("rope_freqs.weight", f"beside a scaling of type {kind}")
        return scaling or found

    def _llama3_scaling(self, factors: np.ndarray) -> dict[str, Any]:
        """Llama 3's scaling from the `factors` [pairs] by which each frequency is divided."""
        if (factors == 1).all():
            return {}
        base = self._fields.get(f"{self.architecture}.rope.freq_base", 10_000.0)
        exponents = np.arange(len(factors)) / len(factors)
        turns = LLAMA3["original_max_position_embeddings"] * base**-exponents / (2 * np.pi)
        low, high, factor = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"], float(factors.max())
        kept = np.clip((turns - low) / (high - low), 0, 1)
        if not np.allclose(factors, 1 / (kept + (1 - kept) / factor), rtol=1e-3):
            raise _unknown_scaling("rope_freqs.weight", f"{len(factors)} factors that are not Llama 3's")
        return {"rope_type": "llama3", "factor": factor} | LLAMA3


def _is_list(field: Any) -> bool:
    """Whether a field has many values, such as the tokens."""
    return len(field.data) != 1


def _unknown_scaling(field: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(
        "is a scaling of positions that mint does not read from GGUF files",
        field=field,
        value=value,
        remedy="Give the Hugging Face folder of this model",
    )

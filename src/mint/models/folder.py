"""A Hugging Face model folder: its configuration and its tensors, read lazily.

Knows the file layout (config.json, generation_config.json, one safetensors file or an index with shards), that weights
may be quantized and of which dtype they say to be, which tokens end a text, and how long one may be; knows nothing of
what else the configuration means, of torch, or of tokenizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mint.errors import CheckpointError, InvalidRequestError
from mint.models.gguf.layout import read_layout
from mint.models.quantized_tensors import dequantized
from mint.models.registry import INDEX_FILE, gguf_file, resolve, shard_names
from mint.models.tensor_files import StoredTensor, open_tensors

_TEXT_MODELS = {"qwen3_5": "Qwen3_5ForCausalLM", "qwen3_5_moe": "Qwen3_5MoeForCausalLM"}
"""Models of text and images, by the `model_type` of config.json, whose text model is read alone: its architecture."""

_LANGUAGE_MODEL, _IMAGES = "model.language_model.", "model.visual."
"""How tensors of the text model begin there, and those for images."""

_FURTHER_TOKENS = "mtp."
"""How tensors begin that predict further tokens, in published files of Qwen3-Next and Qwen3.5. No decoder reads them,
and that of transformers has none."""


_LAST_TOKEN = 2**31 - 1
"""The largest token id that tokenizers and kernels can hold."""

MOST_POSITIONS = 1 << 24
"""A longer context is an error of the file. What is made for each position would take gigabytes."""

MOST_LAYERS = 1 << 12
"""More is an error of the file, too: what is made for each layer would take minutes and gigabytes."""

_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

_LENGTH_KEYS = ("max_position_embeddings", "n_positions")
"""How configurations call the longest sequence; that of GPT-2 has the second name."""

_LENGTH_REMEDY = "Write the longest sequence, in tokens, that the model was made for"

_DTYPE = re.compile(r"auto|half|float|double|bfloat16|float(16|32|64)|float[48]_\w+|u?int\d{1,2}", re.ASCII)
"""Names of torch's dtypes."""


class ModelFolder:
    """An open folder. `config` is the content of config.json but for `quantization`, its `quantization_config`, which
    is None where the weights are as the configuration says.

    Of Qwen3.5 with images, configuration and tensors are those of the text model, by the names that it has alone.
    """

    def __init__(self, path: Path) -> None:
        """Reads the configuration files.

        Raises:
            InvalidRequestError: config.json is missing or is not a JSON object, its quantization_config is none, its
                longest sequence, dtype or number of layers is impossible, or its end tokens are no tokens of the model.
        """
        self.path = path
        self.config = _read_json(path / "config.json")
        self.quantization: dict[str, Any] | None = self.config.pop("quantization_config", None)
        if not isinstance(self.quantization, dict | None):
            raise InvalidRequestError(
                "has a quantization_config that is not an object",
                field="base_model",
                value=str(path / "config.json"),
                remedy="Give the config.json that belongs to the weights, as it was published",
            )
        architecture = _TEXT_MODELS.get(str(self.config.get("model_type")))
        self._has_images = architecture is not None and "text_config" in self.config
        if self._has_images:
            self.config = _text_config(self.config, architecture)
        for part in _parts(self.config):
            _require_length(path, part)
            _require_few_layers(path, part)
            _require_dtype(path, part)
        generation = path / "generation_config.json"
        self._generation = _read_json(generation) if generation.is_file() else {}
        self._eos_token_ids = self._read_ends()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids of the tokens that end a text, from generation_config.json, else from config.json."""
        return self._eos_token_ids

    @property
    def context_length(self) -> int | None:
        """The longest sequence, in tokens; None if the configuration does not say."""
        return self.config.get("max_position_embeddings")

    def _read_ends(self) -> tuple[int, ...]:
        """The end tokens of generation_config.json, else of config.json; those of both files are checked."""
        of_config = _end_tokens(self.path / "config.json", self.config)
        generation = self.path / "generation_config.json"
        if "eos_token_id" in self._generation:
            file, ends = generation, _end_tokens(generation, self._generation)
        else:
            file, ends = self.path / "config.json", of_config
        sizes = [part["vocab_size"] for part in _parts(self.config) if type(part.get("vocab_size")) is int]
        # One of several may lie beyond, because it is never sampled; without any within, no text would ever end.
        if ends and sizes and min(ends) >= max(sizes):
            raise _refused(
                file,
                f"has the eos_token_id {_shown(ends)}, and the model has {max(sizes)} tokens",
                "Write the id of the token that ends a text, or null for none",
            )
        return ends

    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors of the decoder by name, as floating point numbers, also where they are quantized; nothing is read
        yet.

        Raises:
            CheckpointError: a file is missing or damaged.
            InvalidRequestError: they are quantized by another method than those in `quantized_tensors`, or the index of
            several files is damaged.
        """
        stored = self._stored_tensors()
        stored = {name: tensor for name, tensor in stored.items() if not name.startswith(_FURTHER_TOKENS)}
        found = stored if self.quantization is None else dequantized(stored, self.quantization)
        if not self._has_images:
            return found
        return {
            name.replace(_LANGUAGE_MODEL, "model.", 1): tensor
            for name, tensor in found.items()
            if not name.startswith(_IMAGES)
        }

    def weight_files(self) -> list[Path]:
        """The files with the tensors; they need not be there.

        Raises:
            InvalidRequestError: the index of several files is damaged.
        """
        one_file = "model.safetensors"
        is_divided = not (self.path / one_file).is_file() and (self.path / INDEX_FILE).is_file()
        return [self.path / name for name in (shard_names(self.path) if is_divided else [one_file])]

    def _stored_tensors(self) -> dict[str, StoredTensor]:
        found: dict[str, StoredTensor] = {}
        for path in self.weight_files():
            try:
                found |= open_tensors(path)
            except CheckpointError as error:
                raise CheckpointError(error.message, remedy="Copy or download the model again") from error
        return found


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The configuration, and that of its text model where it has one of its own."""
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]


def _require_length(path: Path, config: dict[str, Any]) -> None:
    for key in _LENGTH_KEYS:
        length = config.get(key)
        if length is not None and (type(length) is not int or length < 1):
            raise _refused(path / "config.json", f"has the {key} {length!r}, which is no length", _LENGTH_REMEDY)
        if length is not None and length > MOST_POSITIONS:
            problem = f"has the {key} {length}; mint computes contexts of at most {MOST_POSITIONS} tokens"
            raise _refused(path / "config.json", problem, _LENGTH_REMEDY)


def _require_few_layers(path: Path, config: dict[str, Any]) -> None:
    for key in _LAYER_KEYS:
        layers = config.get(key)
        if type(layers) is int and layers > MOST_LAYERS:
            problem = f"has the {key} {layers}; mint computes at most {MOST_LAYERS} layers"
            raise _refused(path / "config.json", problem, "Write the number of layers that the weights have")


def _require_dtype(path: Path, config: dict[str, Any]) -> None:
    for key in ("torch_dtype", "dtype"):
        given = config.get(key)
        names = given.values() if isinstance(given, dict) else [given]  # one for each part of a model
        for name in names:
            if name is not None and not (isinstance(name, str) and _DTYPE.fullmatch(name.removeprefix("torch."))):
                raise _refused(
                    path / "config.json",
                    f"has the {key} {name!r}, which is no dtype of torch",
                    "Write that of the weights, such as bfloat16, float16 or float32",
                )


def _end_tokens(file: Path, content: dict[str, Any]) -> tuple[int, ...]:
    found = content.get("eos_token_id")
    ends = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(token) is int and 0 <= token <= _LAST_TOKEN for token in ends):
        raise _refused(
            file, f"has the eos_token_id {found!r}", "Write a token id, a list of token ids, or null for none"
        )
    return tuple(ends)


def _shown(ends: tuple[int, ...]) -> str:
    return str(ends[0]) if len(ends) == 1 else str(list(ends))


def _refused(file: Path, problem: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(problem, field="base_model", value=str(file), remedy=remedy)


def context_length(name: str, aliases: Mapping[str, str]) -> int | None:
    """The longest sequence of a base model by its name, as `registry.resolve` finds it; None if its files do not say.
    Of a GGUF file the header is read, and nothing is converted.

    Raises:
        UnknownBaseModelError, InvalidRequestError: as `registry.resolve` and `ModelFolder`.
    """
    file = gguf_file(name, aliases)
    if file is None:
        return ModelFolder(resolve(name, aliases)).context_length
    try:
        return read_layout(file).context_length
    except (OSError, ValueError) as error:
        problem = f"cannot be read as a GGUF model: {error}"
        raise _refused(file, problem, "Copy or download the file again") from error


def _text_config(config: dict[str, Any], architecture: str | None) -> dict[str, Any]:
    """The configuration of the text model alone."""
    shared = {key: config[key] for key in ("tie_word_embeddings", "dtype") if key in config}
    return {**shared, **config["text_config"], "architectures": [architecture]}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"cannot be read: {error}",
            field="base_model",
            value=str(path),
            remedy="Give a complete Hugging Face folder",
        ) from error
    if not isinstance(content, dict):
        raise InvalidRequestError(
            "is not a JSON object", field="base_model", value=str(path), remedy="Give a complete Hugging Face folder"
        )
    return content

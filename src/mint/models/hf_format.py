"""A base model with a lora merged into it, as a Hugging Face folder that needs neither mint nor PEFT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mint.errors import CheckpointError
from mint.models.expert_layers import LayersOfTensor, layers_of
from mint.models.folder import ModelFolder
from mint.models.gguf.folder import NOTE
from mint.models.peft_files import CONFIG_FILE
from mint.models.peft_format import UNEMBED, module_names
from mint.models.tensor_files import WRITTEN, LaterArray, StoredTensor, write_file, write_later_tensors

_COPIED = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".bpe"}
"""The suffixes of tokenizer, chat template and generation settings; other files are weights or documents."""

_TEMPLATES = "additional_chat_templates"
"""The folder of chat templates beside the first."""

_WRITTEN = {"config.json", "model.safetensors.index.json", CONFIG_FILE, NOTE}
"""Files that an export has its own of, or needs none of. With the configuration of an adapter, it would be taken for
one."""

_INTEGERS = {code: dtype for dtype, code in WRITTEN.items() if dtype.kind != "f"}
"""The tensors that are no weights, such as the masks in old files of GPT-2."""

_AS_PEFT = "Export with --format peft"
"""The remedy if the lora is not one of this base."""


def holds_layers(base: ModelFolder, weights: Mapping[str, np.ndarray]) -> bool:
    """Whether the files of `base` have each layer of a lora by its name, with a matrix [outputs, inputs] of its shape,
    so that `write_merged` can merge it.

    Raises:
        CheckpointError: a file is missing or damaged.
        InvalidRequestError: the tensors are quantized by a method that mint does not read.
    """
    tensors = _tensors_to_merge(base, base.config, weights)
    if tensors is None:
        return False
    found: set[str] = set()
    for name, tensor in tensors.items():
        layers = layers_of(name, tensor.shape, base.config)
        outputs, inputs = _widths(tensor.shape, layers)
        found |= {layer for layer in layers.names if _fits(weights, layer, layers.part[1] * outputs, inputs)}
    return found >= {*module_names(weights)}


def write_merged(
    folder: Path,
    base: Path,
    weights: Mapping[str, np.ndarray],
    *,
    scale: float,
    dtype: Literal["float32", "float16"] = "float32",
) -> None:
    """Writes `base` + `scale · B @ A` to `folder`. Not in bfloat16: rounding to it would lose most of a small lora.

    A lora on the unembedding of a tied model unties it: the embedding does not change, and config.json says so.

    Raises:
        CheckpointError: the lora has a layer that the base lacks, or other shapes; or a weight is too large for
            float16.
    """
    source = ModelFolder(base)
    config = dict(source.config)
    if _leaves_out_the_tie(source, weights):
        config["tie_word_embeddings"] = True
    tensors = _tensors_to_merge(source, config, weights)
    if tensors is None:
        raise CheckpointError(f"the embedding of {base} is not called model.embed_tokens", remedy=_AS_PEFT)
    if _unties(config, weights):
        config["tie_word_embeddings"] = False
    layers = {name: layers_of(name, tensor.shape, config) for name, tensor in tensors.items()}
    known = {name for found in layers.values() for name in found.names}
    unknown = [module for module in module_names(weights) if module not in known]
    if unknown:
        raise CheckpointError(f"the base model in {base} has no layer {unknown[0]}", remedy=_AS_PEFT)
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    merged = {
        name: LaterArray(
            _INTEGERS.get(tensor.dtype, np.dtype(dtype)),
            tensor.shape,
            partial(_merged, name, tensor, layers[name], weights, scale, dtype),
        )
        for name, tensor in tensors.items()
    }
    write_later_tensors(folder / "model.safetensors", merged, {"format": "pt"})
    copy_companions(base, folder)
    write_file(folder / "config.json", [json.dumps(config, indent=2).encode()])


def copy_companions(base: Path, folder: Path) -> None:
    """Copies tokenizer, chat template and generation settings of `base` to an export."""
    for path in base.iterdir():
        if path.suffix in _COPIED and path.name not in _WRITTEN and path.is_file():
            shutil.copyfile(path, folder / path.name)
    if (base / _TEMPLATES).is_dir():
        shutil.copytree(base / _TEMPLATES, folder / _TEMPLATES, copy_function=shutil.copyfile)


def make_gguf_ready(folder: Path, base: Path) -> None:
    """Brings the merged model in `folder`, in float16, into the form that llama.cpp's convert_hf_to_gguf.py reads.

    That is with the architecture's name, and with generation settings that name the end tokens. The steps of float16
    are eight times finer than those of bfloat16.

    Raises:
        CheckpointError: the base does not name its architecture.
    """
    source = ModelFolder(base)
    config = json.loads((folder / "config.json").read_text())
    if not config.get("architectures"):
        raise CheckpointError(
            f"{base / 'config.json'} names no architecture, and llama.cpp chooses its converter by that",
            remedy="Write the name of the model's class into its list `architectures`",
        )
    # converters older than transformers 5 read the older key
    write_file(folder / "config.json", [json.dumps({**config, "torch_dtype": "float16"}, indent=2).encode()])
    if not (folder / "generation_config.json").is_file():
        ends = {"eos_token_id": list(source.eos_token_ids)} if source.eos_token_ids else {}
        write_file(folder / "generation_config.json", [json.dumps(ends, indent=2).encode()])


def require_float16(name: str, largest: float) -> None:
    """Checks that float16 has the `largest` magnitude of a tensor.

    Raises:
        CheckpointError: it has not.
    """
    if largest > float(np.finfo(np.float16).max):
        raise CheckpointError(f"{name} reaches {largest:g}, too large for float16", remedy="Export with --format hf")


def _unties(config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> bool:
    return "lm_head.lora_A.weight" in weights and bool(config.get("tie_word_embeddings", False))


def _leaves_out_the_tie(base: ModelFolder, weights: Mapping[str, np.ndarray]) -> bool:
    """Whether config.json does not say that the unembedding is the embedding, as that of Gemma 3, whose files have no
    output layer. Only `write_merged` may conclude this: of other families the file may call that layer otherwise."""
    return (
        "tie_word_embeddings" not in base.config
        and f"{UNEMBED}.lora_A.weight" in weights
        and f"{UNEMBED}.weight" not in base.tensors()
    )


def _tensors_to_merge(
    base: ModelFolder, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]
) -> dict[str, StoredTensor] | None:
    """The tensors of the files; with an output layer if the lora trains that of a tied model. None where none of them
    is known to be its matrix."""
    tensors = base.tensors()
    if _unties(config, weights):
        # transformers takes the output layer of the file, if there is one
        own = tensors.get("lm_head.weight", tensors.get("model.embed_tokens.weight"))
        if own is None:
            return None
        tensors["lm_head.weight"] = own
    return tensors


def _widths(shape: Sequence[int], layers: LayersOfTensor) -> tuple[int, int]:
    """Outputs and inputs of each matrix in a tensor; zeros if it has none."""
    matrix = tuple(shape[1:] if layers.is_stacked else shape)
    if len(matrix) != 2:
        return 0, 0
    return (matrix[1], matrix[0]) if layers.inputs_first else (matrix[0], matrix[1])


def _fits(weights: Mapping[str, np.ndarray], layer: str, outputs: int, inputs: int) -> bool:
    a, b = weights.get(f"{layer}.lora_A.weight"), weights.get(f"{layer}.lora_B.weight")
    return a is not None and b is not None and (b.shape[0], a.shape[1]) == (outputs, inputs)


def _merged(
    name: str, stored: StoredTensor, layers: LayersOfTensor, weights: Mapping[str, np.ndarray], scale: float, dtype: str
) -> np.ndarray:
    """A tensor as it is written: of weights with their loras, in `dtype`; masks and places as they are."""
    if stored.dtype in _INTEGERS:
        whole: np.ndarray = stored.read().numpy()
        return whole
    merged = _merge(stored, layers, weights, scale)
    if dtype == "float16":
        require_float16(name, float(np.abs(merged).max(initial=0.0)))
    return merged.astype(dtype, copy=False)


def _merge(stored: StoredTensor, layers: LayersOfTensor, weights: Mapping[str, np.ndarray], scale: float) -> np.ndarray:
    """The tensor with the loras of the layers that it holds."""
    own: np.ndarray = stored.read().float().numpy()
    if not layers.is_stacked:
        return _add(own, layers.names[0], weights, scale, layers.part)
    if layers.inputs_first:
        own = own.swapaxes(1, 2)
    merged = np.stack([_add(part, name, weights, scale) for name, part in zip(layers.names, own, strict=True)])
    return np.ascontiguousarray(merged.swapaxes(1, 2)) if layers.inputs_first else merged


def _add(
    own: np.ndarray, layer: str, weights: Mapping[str, np.ndarray], scale: float, part: tuple[int, int] = (0, 1)
) -> np.ndarray:
    """A matrix [outputs, inputs] with the lora of its layer, if it has one; the matrix is a `part` of the layer's."""
    a = weights.get(f"{layer}.lora_A.weight")
    b = weights.get(f"{layer}.lora_B.weight")
    if a is None or b is None:
        return own
    number, count = part
    if (b.shape[0], a.shape[1]) != (count * own.shape[0], own.shape[1]) or a.shape[0] != b.shape[1]:
        raise CheckpointError(
            f"the lora of {layer} has shapes {a.shape} and {b.shape}, the base {own.shape}", remedy=_AS_PEFT
        )
    return own + np.float32(scale) * (b[number * len(own) : (number + 1) * len(own)] @ a)

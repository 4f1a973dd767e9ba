"""A base model with a lora merged into it, as a Hugging Face folder that needs neither mint nor PEFT.

Knows file layouts and the arithmetic of merging; knows nothing of engines or checkpoints' places.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from mint.errors import CheckpointError
from mint.models.folder import ModelFolder
from mint.models.peft_format import module_names
from mint.models.tensor_files import RawTensor, to_bfloat16, write_file, write_tensors

_COPIED = {".json", ".jinja", ".txt", ".model"}
"""Tokenizer, chat template and generation settings; everything else in a folder is weights or documents."""

_DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def write_merged(
    folder: Path,
    base: Path,
    weights: Mapping[str, np.ndarray],
    *,
    scale: float,
    dtype: Literal["float32", "bfloat16"] | None = None,
) -> None:
    """Writes `base` + `scale · B @ A` to `folder`, in `dtype` (None: each tensor's own, which rounds the sum to it).

    A lora on the unembedding of a tied model unties it: the embedding stays as it was, and config.json says so.

    Raises:
        CheckpointError: the lora has a layer that the base has not, or other shapes.
    """
    source = ModelFolder(base)
    tensors = source.tensors()
    config = dict(source.config)
    if "lm_head.lora_A.weight" in weights and config.get("tie_word_embeddings", False):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        config["tie_word_embeddings"] = False
    unknown = [module for module in module_names(weights) if f"{module}.weight" not in tensors]
    if unknown:
        raise CheckpointError(f"the base model in {base} has no layer {unknown[0]}")
    merged = {name: _merge(name, tensor, weights, scale, dtype) for name, tensor in tensors.items()}
    config.pop("torch_dtype", None)
    config["dtype"] = _DTYPE_NAMES.get(merged["model.embed_tokens.weight"].dtype, "float32")
    write_tensors(folder / "model.safetensors", merged, {"format": "pt"})
    for path in base.iterdir():
        if path.suffix in _COPIED and path.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copyfile(path, folder / path.name)
    write_file(folder / "config.json", [json.dumps(config, indent=2).encode()])


def _merge(
    name: str, tensor: RawTensor, weights: Mapping[str, np.ndarray], scale: float, dtype: str | None
) -> RawTensor:
    module = name.removesuffix(".weight")
    target = dtype or _DTYPE_NAMES.get(tensor.dtype, "float32")
    a, b = weights.get(f"{module}.lora_A.weight"), weights.get(f"{module}.lora_B.weight")
    if a is None or b is None:
        if dtype is None:
            return tensor
        return _encode(tensor.to_numpy().astype(np.float32), target)
    if (b.shape[0], a.shape[1]) != tensor.shape or a.shape[0] != b.shape[1]:
        raise CheckpointError(f"the lora of {module} has shapes {a.shape} and {b.shape}, the base {tensor.shape}")
    return _encode(tensor.to_numpy().astype(np.float32) + np.float32(scale) * (b @ a), target)


def _encode(array: np.ndarray, dtype: str) -> RawTensor:
    if dtype == "bfloat16":
        return to_bfloat16(array)
    stored = np.ascontiguousarray(array, dtype=np.float16 if dtype == "float16" else np.float32)
    name = "F16" if dtype == "float16" else "F32"
    return RawTensor(name, tuple(stored.shape), memoryview(stored.reshape(-1).view(np.uint8).data))

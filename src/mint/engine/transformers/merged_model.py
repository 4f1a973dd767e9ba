"""A base model with a lora merged into it, written by transformers.

For bases whose files name a layer otherwise than the model does, or store its matrix transposed (GPT-2), and for tied
models whose embedding is not `model.embed_tokens`. `models/hf_format` merges into the tensors of all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mint.engine.transformers.linear_layers import linear_layers
from mint.engine.transformers.loading import is_left_out, load_model
from mint.engine.transformers.meta_model import meta_model
from mint.errors import CheckpointError
from mint.models.folder import ModelFolder
from mint.models.hf_format import copy_companions, holds_layers, require_float16
from mint.models.peft_format import module_names
from mint.models.quiet_transformers import quiet_transformers
from mint.models.tensor_files import disk_errors

_MASKS = ("bias", "masked_bias", "causal_mask")
"""The last names of masks in old files: GPT-J's `attn.masked_bias` is -1e9."""


def needs_transformers(base: Path, weights: Mapping[str, np.ndarray]) -> bool:
    """Whether a lora cannot be merged into the tensors of the files of `base` by their names."""
    folder = ModelFolder(base)
    if not holds_layers(folder, weights):
        return True
    model = meta_model(folder)
    if any(isinstance(layer, Conv1D) for layer in linear_layers(model).values()):
        return True
    # old files have masks, which would be taken for weights
    return any(is_left_out(name, folder, model) for name in folder.tensors() if name.rsplit(".", 1)[-1] in _MASKS)


def write_merged(
    folder: Path,
    base: Path,
    weights: Mapping[str, np.ndarray],
    *,
    scale: float,
    dtype: Literal["float32", "float16"] = "float32",
) -> None:
    """Writes `base` + `scale · B @ A` to `folder`, with the names that transformers gives the tensors of its files.

    Args as those of `mint.models.hf_format.write_merged`. A lora on weights that are tied to others unties them.

    Raises:
        InvalidRequestError: transformers cannot load the base.
        CheckpointError: the lora has a layer that the model lacks, or other shapes; or a weight is too large for
            float16.
        OSError: the folder cannot be written.
    """
    model = load_model(ModelFolder(base), torch.float32)
    layers = linear_layers(model)
    if _is_on_tied_weights(model, [layers[name] for name in module_names(weights) if name in layers]):
        _untie(model)
    for name in module_names(weights):
        _add(layers.get(name), name, weights[f"{name}.lora_A.weight"], weights[f"{name}.lora_B.weight"], scale)
    if dtype == "float16":
        for name, parameter in model.named_parameters():
            require_float16(name, float(parameter.abs().max()) if parameter.numel() else 0.0)
    model.generation_config = GenerationConfig()  # that of the base is copied: saving may refuse it
    with quiet_transformers(), disk_errors():
        model.to(getattr(torch, dtype)).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    copy_companions(base, folder)


def _is_on_tied_weights(model: PreTrainedModel, layers: list[nn.Module]) -> bool:
    """Whether the matrix of one of these layers is that of another module, too: an unembedding that is the embedding,
    or one of the layers that Zamba 2 has in common."""
    uses = Counter(parameter.data_ptr() for _, parameter in model.named_parameters(remove_duplicate=False))
    return any(uses[layer.weight.data_ptr()] > 1 for layer in layers if isinstance(layer.weight, Tensor))


def _untie(model: PreTrainedModel) -> None:
    """Gives every module parameters of its own, and says so in the configuration, by which they would be tied again."""
    places: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.data_ptr() in places:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
            places.add(parameter.data_ptr())
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    # By these, saving would leave out a matrix.
    model._tied_weights_keys = {}
    model.all_tied_weights_keys = {}


def _add(layer: nn.Module | None, name: str, a: np.ndarray, b: np.ndarray, scale: float) -> None:
    """Adds `scale` · `b` [O, r] @ `a` [r, I] to the matrix of a layer."""
    weight = None if layer is None else layer.weight
    if not isinstance(weight, Tensor):
        raise CheckpointError(f"the base model has no layer {name}", remedy="Export with --format peft")
    matrix = weight.T if isinstance(layer, Conv1D) else weight
    if matrix.shape != (b.shape[0], a.shape[1]) or a.shape[0] != b.shape[1]:
        raise CheckpointError(
            f"the lora of {name} has shapes {a.shape} and {b.shape}, the base {tuple(matrix.shape)}",
            remedy="Export with --format peft",
        )
    matrix += torch.from_numpy(np.float32(scale) * (b @ a))

"""Loads a model of transformers from a folder, and refuses tensors that are missing, left over, or no numbers.

transformers itself goes on with random numbers in the place of what is missing, leaves out what it does not know, and
takes codes of a quantization for numbers. A folder may come from anyone: never runs code from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mint.engine.protocol import is_out_of_memory
from mint.engine.transformers.meta_model import first_line, meta_model
from mint.errors import CheckpointError, InvalidRequestError, MintError
from mint.models.folder import ModelFolder
from mint.models.quiet_transformers import quiet_transformers
from mint.models.tensor_files import StoredTensor

_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})

_LEFT_OUT = re.compile(
    r"(^|\.)mtp(_layers|_block)?\."  # layers that predict further tokens
    r"|(^|\.)(inv_freq|position_ids)$|(attn|attention)\.((masked_)?bias|causal_mask)$"  # what models compute
    r"|\.[qkv]_scale$"  # scales of caches that other engines round
    r"|(^|\.)pooler\.|(^|\.)seq_relationship\."  # BERT's heads for other tasks
)
"""Tensors of published files that no causal model of transformers reads, beside those that its classes name."""

_WRAPPERS = frozenset({"model", "language_model", "text_model"})
"""Prefixes of the names of a text model's tensors in a model of texts and images."""


def load_model(folder: ModelFolder, dtype: torch.dtype) -> PreTrainedModel:
    """The model in `folder` on the CPU, frozen, in evaluation mode and without dropout.

    Raises:
        InvalidRequestError: transformers does not know the architecture, or the tensors are not those of config.json.
        CheckpointError: a weight file is damaged, or has numbers that are not finite.
    """
    path = folder.path
    tensors = folder.tensors()  # refuses damaged files, and quantizations that mint does not read
    empty = meta_model(folder)  # refuses a configuration before weights are read
    _require_sizes(path, tensors, empty)
    _require_window(path, empty)
    try:
        with quiet_transformers():
            loaded = _load(folder, tensors, type(empty), empty.config, dtype)
    except MintError:
        raise
    # Broad: transformers runs the code of one of hundreds of models on files from anywhere, and any of it may fail.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        problem = f"transformers cannot load its weights: {first_line(error)}"
        raise _refused(path, problem, "Give a complete folder of a causal model, as it was published") from error
    model: PreTrainedModel = loaded[0]
    _require_fit(folder, tensors, model, loaded[1])
    _require_finite(path, model)
    model.requires_grad_(False)
    for module in model.modules():  # a lora is trained without dropout
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            vars(module)["attention_dropout"] = 0.0
    return model.eval()


def _load(
    folder: ModelFolder,
    tensors: Mapping[str, StoredTensor],
    model_class: type[PreTrainedModel],
    config: Any,
    dtype: torch.dtype,
) -> Any:
    """The model, and what transformers noticed."""
    noticed: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # so that all is told
    if folder.quantization is not None:  # from dequantized tensors: transformers' own way needs packages of each method
        state = {name: tensor.read() for name, tensor in tensors.items()}
        return model_class.from_pretrained(None, config=config, state_dict=state, dtype=dtype, **noticed)
    return AutoModelForCausalLM.from_pretrained(
        folder.path,
        config=AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False),
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        **noticed,
    )


def _require_sizes(path: Path, tensors: Mapping[str, StoredTensor], empty: PreTrainedModel) -> None:
    """Refuses a configuration that says more numbers than the files have, before transformers makes memory for them."""
    prefix = f"{empty.base_model_prefix}."
    wanted = empty.state_dict()
    for name, tensor in tensors.items():
        own = wanted.get(name, wanted.get(prefix + name))
        if own is not None and own.numel() > math.prod(tensor.shape):
            problem = f"has the tensor {name} of shape {list(tensor.shape)}; config.json says {list(own.shape)}"
            raise _refused(path, problem, "Give the config.json that belongs to these weights")


def _require_window(path: Path, empty: PreTrainedModel) -> None:
    """Refuses layers that see no position, not even their own: transformers gives numbers for them all the same."""
    window = getattr(empty.config, "sliding_window", None)
    layers = getattr(empty.config, "layer_types", None) or ()
    if type(window) is not int or window > 0 or "sliding_attention" not in layers:
        return
    problem = f"has the sliding_window {window} for layers of sliding_attention"
    raise _refused(path / "config.json", problem, "Write how many positions they see, or layer_types without them")


def _require_fit(
    folder: ModelFolder, tensors: Mapping[str, StoredTensor], model: PreTrainedModel, report: Mapping[str, Any]
) -> None:
    """Refuses what `report` of transformers says, and tensors that are no numbers."""
    path = folder.path
    for name, stored, wanted in sorted(report["mismatched_keys"]):
        problem = f"has the tensor {name} of shape {list(stored)}; config.json says {list(wanted)}"
        raise _refused(path, problem, "Give the config.json that belongs to these weights")
    lacking = sorted(report["missing_keys"])
    if lacking:
        problem = f"lacks the tensor {lacking[0]}" + (f", and {len(lacking) - 1} more" if len(lacking) > 1 else "")
        if getattr(model.config, "is_decoder", None) is False:
            problem = f"{problem}: it is an encoder without the output layer of {type(model).__name__}"
            raise _refused(path, problem, "Choose a decoder, with all of its weights")
        raise _refused(path, problem, "Give a complete folder")
    left_over = sorted(name for name in report["unexpected_keys"] if not is_left_out(name, folder, model))
    if left_over:
        raise _refused(
            path,
            f"has the tensor {left_over[0]}, which {type(model).__name__} with this config.json does not have",
            "Give the config.json that belongs to these weights, or leave the tensor out of them",
        )
    whole = {**model.state_dict(), **dict(model.named_buffers())}
    integers = {name.rsplit(".", 1)[-1] for name, tensor in whole.items() if not tensor.is_floating_point()}
    for name, tensor in tensors.items():
        if tensor.dtype in _FLOATS or name.rsplit(".", 1)[-1] in integers or is_left_out(name, folder, model):
            continue
        raise _refused(
            path,
            f"has the tensor {name} as {tensor.dtype}, where {type(model).__name__} needs floating point numbers of "
            "at least 16 bits",
            "Give the quantization_config that belongs to these weights, or take the model in bfloat16",
        )


def _require_finite(path: Path, model: PreTrainedModel) -> None:
    """Refuses NaN and infinity, of which the measurements at load see only what their few tokens meet."""
    for name, parameter in model.named_parameters():
        if parameter.numel() and not all(bool(extreme.isfinite()) for extreme in parameter.aminmax()):
            raise CheckpointError(
                f"{path}: the tensor {name} has numbers that are not finite",
                remedy="Copy or download the model again, or take an earlier checkpoint of it",
            )


def is_left_out(name: str, folder: ModelFolder, model: PreTrainedModel) -> bool:
    """Whether published files have this tensor, and the model rightly goes without it."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    if _LEFT_OUT.search(name) or any(re.search(pattern, name) for pattern in patterns):
        return True
    further = re.match(r"model\.layers\.(\d{1,4})\.", name)
    if further is not None:  # DeepSeek-V3, GLM-4.5 and others number the layers for further tokens on
        first, count = (folder.config.get(key) for key in ("num_hidden_layers", "num_nextn_predict_layers"))
        return type(first) is int and type(count) is int and first <= int(further[1]) < first + count
    if "text_config" not in folder.config or model.config.model_type == folder.config.get("model_type"):
        return False
    # The text model alone was loaded: all else is for images and sounds.
    return _within_text(name) not in {_within_text(own) for own in model.state_dict()}


def _within_text(name: str) -> str:
    """The part of a text model that a tensor belongs to, such as `layers`."""
    return next((part for part in name.split(".") if part not in _WRAPPERS), "")


def _refused(path: Path, problem: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(problem, field="base_model", value=str(path), remedy=remedy)

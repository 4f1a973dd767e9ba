"""A base model without memory, made of its config.json alone: which modules and tensors it has, and their shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mint.errors import InvalidRequestError
from mint.models.folder import ModelFolder
from mint.models.tensor_files import StoredTensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def meta_model(folder: ModelFolder) -> PreTrainedModel:
    """The modules of transformers on torch's meta device.

    Raises:
        InvalidRequestError: transformers cannot make a causal language model of config.json.
    """
    # Deferred: they take seconds.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    # Broad: transformers runs the code of one of hundreds of models on a configuration from anywhere, and any of it may
    # fail: a division by zero, an attribute or index that is not there, endless recursion.
    except Exception as error:
        raise InvalidRequestError(
            f"transformers cannot make a causal language model of it: {first_line(error)}",
            field="base_model",
            value=str(folder.path / "config.json"),
            remedy="Give the config.json of a causal language model, as it was published",
        ) from error


def first_line(error: Exception) -> str:
    """The first line of an error's message, and the second where the first only announces it. The kind of error stands
    before it where the message alone says little."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    told = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    says_all = isinstance(error, (ValueError, OSError, ImportError)) and bool(told)
    return told if says_all else f"{type(error).__name__}: {told}"


def tensors_of_config(folder: ModelFolder) -> dict[str, StoredTensor]:
    """Names and shapes of the tensors that the weight files would have. They cannot be read.

    Raises:
        InvalidRequestError: as `meta_model`.
    """
    state = meta_model(folder).state_dict()
    return {name: StoredTensor("BF16", tuple(tensor.shape), name, None, folder.path) for name, tensor in state.items()}

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
    except (ValueError, KeyError, OSError, ImportError, TypeError, RuntimeError, AttributeError) as error:
        first = str(error).strip().split("\n")[0]
        raise InvalidRequestError(
            f"is no causal language model that transformers knows: {first}",
            field="base_model",
            value=str(folder.path),
            remedy="Name a base model that this server loads",
        ) from error


def tensors_of_config(folder: ModelFolder) -> dict[str, StoredTensor]:
    """Names and shapes of the tensors that the weight files would have. They cannot be read.

    Raises:
        InvalidRequestError: as `meta_model`.
    """
    state = meta_model(folder).state_dict()
    return {name: StoredTensor("BF16", tuple(tensor.shape), name, None, folder.path) for name, tensor in state.items()}

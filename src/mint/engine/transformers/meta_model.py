"""A base model without memory, made of its config.json alone: which modules and tensors it has, and their shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

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
            f"transformers cannot make a causal language model of it: {_told(error, folder.config).rstrip('. ')}",
            field="base_model",
            value=str(folder.path / "config.json"),
            remedy=_remedy(folder.config),
        ) from error


def _remedy(config: Mapping[str, Any]) -> str:
    """A family that transformers does not know is seldom a fault of config.json: its code is in the folder, or newer
    than the installed package."""
    from transformers import CONFIG_MAPPING, __version__  # deferred: seconds to import

    family = config.get("model_type")
    if not isinstance(family, str) or family in CONFIG_MAPPING:
        return "Give the config.json of a causal language model, as it was published"
    if "auto_map" in config:
        return f"mint runs no code from a model folder. Take a model that transformers {__version__} knows by itself"
    return f"transformers {__version__} is installed: a newer one may know it. Update it, or take another model"


def _told(error: Exception, config: Mapping[str, Any]) -> str:
    """The error of transformers, with the setting that caused it, if that can be seen."""
    setting = _setting_of(error, config)
    if setting is not None:
        return f"it does not know {setting}"
    if str(error).startswith("Unrecognized configuration class"):
        return f"model_type = {config.get('model_type')!r} is none in transformers"
    if isinstance(error, ZeroDivisionError):
        zeros = [name for name, value in _settings(config) if type(value) is int and value == 0]
        sizes = [f"{name} = 0" for name in zeros if not name.endswith("_id")]
        return f"it divides by zero, and config.json has {', '.join(sizes)}" if sizes else first_line(error)
    return first_line(error)


def _setting_of(error: Exception, config: Mapping[str, Any]) -> str | None:
    """The setting whose value transformers has looked up in vain, such as a `hidden_act`; its error has the value
    alone."""
    if not isinstance(error, KeyError) or not error.args:
        return None
    places = ((name, value) for name, value in _settings(config) if value == error.args[0] and isinstance(value, str))
    return next((f"{name} = {value!r}" for name, value in places), None)


def _settings(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """The settings, those of objects within by their path: `rope_parameters.rope_type`."""
    for name, value in config.items():
        yield f"{prefix}{name}", value
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{name}.")


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

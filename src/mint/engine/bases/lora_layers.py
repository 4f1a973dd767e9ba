"""The layers of a base model that can have a lora, with their shapes, found without loading its weights."""

from __future__ import annotations

from mint.engine.model.config import read_decoder_config
from mint.errors import InvalidRequestError
from mint.models.folder import ModelFolder
from mint.models.peft_format import Layer, base_layers


def lora_layers(folder: ModelFolder) -> dict[str, Layer]:
    """By PEFT module name. Of a family of mint's own decoder they are read from the headers of the files; of any other
    from a model of transformers without memory.

    Raises:
        InvalidRequestError: transformers cannot make a causal language model of config.json.
        CheckpointError: a weight file is damaged.
    """
    try:
        read_decoder_config(folder.config)
    except InvalidRequestError:
        return _layers_of_modules(folder)
    return base_layers(folder)


def _layers_of_modules(folder: ModelFolder) -> dict[str, Layer]:
    # Deferred: they take seconds, and own families do not need them.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from mint.engine.bases.linear_layers import linear_layers, part_of, widths_of

    try:
        config = AutoConfig.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, KeyError, OSError, ImportError, TypeError, RuntimeError, AttributeError) as error:
        first = str(error).strip().split("\n")[0]
        raise InvalidRequestError(
            f"is no causal language model that transformers knows: {first}",
            field="base_model",
            value=str(folder.path),
            remedy="Name a base model that this server loads",
        ) from error
    layers = {}
    for name, module in linear_layers(model).items():
        inputs, outputs = widths_of(module)
        layers[name] = Layer(part_of(name), outputs, inputs)
    return layers

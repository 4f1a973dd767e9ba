"""The layers of a base model that can have a lora, with their shapes, found without loading its weights."""

from __future__ import annotations

from mint.engine.model.config import read_decoder_config
from mint.engine.transformers.meta_model import meta_model
from mint.errors import InvalidRequestError
from mint.models.folder import ModelFolder
from mint.models.peft_format import UNEMBED, Layer, base_layers


def lora_layers(folder: ModelFolder) -> dict[str, Layer]:
    """By PEFT module name. Of a family of mint's own decoder they are read from the headers of the files; of any other
    from a model of transformers without memory.

    Raises:
        InvalidRequestError: transformers cannot make a causal language model of config.json.
        CheckpointError: a weight file is damaged.
    """
    return base_layers(folder) if is_own_family(folder) else _layers_of_modules(folder)


def output_layer(folder: ModelFolder) -> str:
    """The path of the output layer in the model of transformers.

    Raises:
        InvalidRequestError: as `lora_layers`.
    """
    own = None if is_own_family(folder) else _layers_of_modules(folder).get(UNEMBED)
    return UNEMBED if own is None or own.module is None else own.module


def is_own_family(folder: ModelFolder) -> bool:
    """Whether the model runs on mint's own decoder."""
    try:
        read_decoder_config(folder.config)
    except InvalidRequestError:
        return False
    return True


def _layers_of_modules(folder: ModelFolder) -> dict[str, Layer]:
    # Deferred: they take seconds, and own families do not need them.
    from mint.engine.transformers.linear_layers import linear_layers, part_of, widths_of

    model = meta_model(folder)
    paths = {module: path for path, module in model.named_modules()}
    layers = {}
    for name, module in linear_layers(model).items():
        inputs, outputs = widths_of(module)
        path = paths[module]
        layers[name] = Layer(part_of(name), outputs, inputs, None if path == name else path)
    return layers

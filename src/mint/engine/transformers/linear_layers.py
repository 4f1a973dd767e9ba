"""The linear layers of a model of transformers that can have a lora."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mint.engine.lora import UNEMBED

_MLP_WORDS = ("mlp", "ffn", "feed_forward", "feedforward", "expert", "moe", "fc1", "fc2", "c_fc")
"""A layer is of the MLP if a part of its path has one of these in it; every other one is of attention."""

_SKIPPED = ("router", "gate")
"""Last names of layers that choose experts: they are not trained, as in PEFT's recipes."""

_SAME_PRODUCT = ("FalconLinear",)
"""Classes that compute a linear layer's product in a forward of their own. Others compute something else, of groups of
their inputs (DeepSeek-V4's `o_a_proj`), to which the product of a lora cannot be added."""


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The layers that can have a lora, by their PEFT module names, in the model's order; the unembedding is last.

    Experts whose matrices are stored in one tensor are no linear layers, and stay frozen, as are layers with a forward
    of their own.
    """
    unembedding = model.get_output_embeddings()
    decoder = model.get_decoder()
    if decoder is unembedding:  # ModernBERT's output layer has the name `decoder`, by which transformers looks
        decoder = model.base_model
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    layers: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if _adds_to_its_product(module)
        and name.startswith(f"{prefix}." if prefix else "")
        and module is not unembedding
        and name.rsplit(".", 1)[-1] not in _SKIPPED
    }
    return layers if unembedding is None else {**layers, UNEMBED: unembedding}


def _adds_to_its_product(module: nn.Module) -> bool:
    """Whether a lora's product can be added to what the layer gives."""
    if not isinstance(module, nn.Linear):
        return isinstance(module, Conv1D)
    return type(module).forward is nn.Linear.forward or type(module).__name__ in _SAME_PRODUCT


def part_of(name: str) -> str:
    """The part of the model that a layer belongs to: attn, mlp or unembed."""
    if name == UNEMBED:
        return "unembed"
    return "mlp" if any(word in part for part in name.split(".") for word in _MLP_WORDS) else "attn"


def widths_of(layer: nn.Module) -> tuple[int, int]:
    """The numbers of its inputs and outputs."""
    if isinstance(layer, Conv1D):  # stores its weight as [inputs, outputs]
        return int(layer.weight.shape[0]), int(layer.nf)
    assert isinstance(layer, nn.Linear)
    return layer.in_features, layer.out_features

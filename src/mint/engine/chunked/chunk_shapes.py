"""How the layers of a model are cut into chunks: heads with the keys and values that they read, inner widths of dense
MLPs, and experts. Each chunk has the shape of a small model of the same family.

Pure: knows configs and names of tensors, neither weights nor processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.model.config import ALIGNED, DecoderConfig
from mint.errors import InvalidRequestError
from mint.models.tensor_files import StoredTensor

MOST_CHUNKS = 8
"""A layer is cut into no more chunks than this: a smaller one would be slow to multiply with."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
_BY_OUTPUTS = frozenset(f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")) | {
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
}
_BY_INPUTS = frozenset({"self_attn.o_proj.weight", "mlp.down_proj.weight"})


def chunk_count(config: DecoderConfig, most: int = MOST_CHUNKS) -> int:
    """How many chunks the layers of a model have: the largest power of two that divides what is cut, and no more than
    `most`, also one. It decides bits.

    Raises:
        InvalidRequestError: the layers of this family are not cut.
    """
    family = config.family
    obstacles = {
        "delta nets": family.delta_nets,
        "joint norms of heads": family.joint_head_norms,
        "output gates": family.output_gates,
        "attention sinks": family.sinks,
        "fused matrices": family.fused,
        "shared experts": config.experts is not None and config.experts.shared_intermediate_size is not None,
        "stacked experts": family.experts is not None and family.experts.stacked,
    }
    found = [name for name, is_there in obstacles.items() if is_there]
    if found:
        raise InvalidRequestError(
            f"is not for {family.name}: layers with {' and '.join(found)} are not cut into chunks",
            field="tensor_parallel",
            remedy="Leave it out; --shard-base divides the memory of the base, too",
        )
    count = 1
    while count < most and all(size % (2 * count) == 0 for size in cut_sizes(config).values()):
        count *= 2
    return count


def cut_sizes(config: DecoderConfig) -> dict[str, int]:
    """What is cut, by the names of config.json; an inner width in units of `ALIGNED`."""
    sizes = {"num_key_value_heads": config.num_key_value_heads}
    if any(config.experts_of(layer) is None for layer in range(config.num_hidden_layers)):
        sizes[f"intermediate_size / {ALIGNED}"] = config.intermediate_size // ALIGNED
    if config.experts is not None:
        sizes["num_experts"] = config.experts.count
    return sizes


def chunk_config(config: DecoderConfig, count: int) -> DecoderConfig:
    """The shape of one of `count` chunks."""
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // count,
        num_key_value_heads=config.num_key_value_heads // count,
        intermediate_size=config.intermediate_size // count,
        experts=None if config.experts is None else replace(config.experts, count=config.experts.count // count),
    )


def layer_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Those of layers."""
    return {name: tensor for name, tensor in tensors.items() if _LAYER.fullmatch(name)}


def chunk_tensors(
    tensors: Mapping[str, StoredTensor], config: DecoderConfig, chunk: int, count: int
) -> dict[str, StoredTensor]:
    """The tensors of layers of one chunk, under the names of a model of its shape. Its router has the rows of its own
    experts; norms and the biases of outputs are whole."""
    cut: dict[str, StoredTensor] = {}
    per_chunk = 0 if config.experts is None else config.experts.count // count
    for name, tensor in layer_tensors(tensors).items():
        _, part = _split(name)
        expert = _EXPERT.fullmatch(part)
        if expert is not None and per_chunk:
            number = int(expert[1])
            if number // per_chunk == chunk:
                cut[name.replace(f".experts.{number}.", f".experts.{number % per_chunk}.")] = tensor
        elif part in _BY_OUTPUTS or (per_chunk and part == "mlp.gate.weight"):
            cut[name] = CutTensor.of(tensor, 0, chunk, count)
        elif part in _BY_INPUTS:
            cut[name] = CutTensor.of(tensor, 1, chunk, count)
        else:
            cut[name] = tensor
    return cut


def router_name(layer: int) -> str:
    """The tensor that scores the experts of a layer."""
    return f"model.layers.{layer}.mlp.gate.weight"


@dataclass(frozen=True)
class CutTensor(StoredTensor):
    """One of `count` equal parts of a tensor, along `dimension`. One that does not divide keeps its shape, and the
    loader refuses it."""

    whole: StoredTensor
    dimension: int
    chunk: int
    count: int

    @classmethod
    def of(cls, whole: StoredTensor, dimension: int, chunk: int, count: int) -> StoredTensor:
        """The part `chunk` of `whole`."""
        shape = list(whole.shape)
        if dimension >= len(shape) or shape[dimension] % count:
            return whole
        shape[dimension] //= count
        found = (whole.dtype, tuple(shape), whole.name, whole.file, whole.path)
        return cls(*found, whole=whole, dimension=dimension, chunk=chunk, count=count)

    @override
    def read(self, part: int | slice | None = None) -> Any:
        """See `StoredTensor`; all of it at once."""
        assert part is None, "stacked tensors are not cut"
        size = self.shape[self.dimension]
        own = slice(self.chunk * size, (self.chunk + 1) * size)
        return self.whole.read(own) if self.dimension == 0 else self.whole.read()[:, own]


def _split(name: str) -> tuple[int, str]:
    found = _LAYER.fullmatch(name)
    assert found is not None, name
    return int(found[1]), found[2]

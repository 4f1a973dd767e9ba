"""How the layers of a model are cut into chunks: heads with the keys and values that they read, inner widths of dense
MLPs and of shared experts, and experts. Each chunk has the shape of a small model of the same family.

Pure: knows configs and names of tensors, neither weights nor processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from typing_extensions import override  # a dependency of torch; in typing from Python 3.12 on

from mint.engine.model.config import ALIGNED, DecoderConfig
from mint.errors import InvalidRequestError
from mint.models.tensor_files import StoredTensor

MOST_CHUNKS = 8
"""A layer is cut into no more chunks than this: a smaller one would be slow to multiply with."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
_OUTPUTS = frozenset(
    {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"}
    | {"mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj", "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"}
    | {f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a", "qkvz", "ba")}
)
"""The modules of a layer whose outputs are cut; of a bias, too."""
_INPUTS = frozenset({"self_attn.o_proj", "mlp.down_proj", "mlp.shared_expert.down_proj", "linear_attn.out_proj"})
_BY_FIRST_DIMENSION = frozenset(
    {"self_attn.sinks", "linear_attn.conv1d.weight", "linear_attn.A_log", "linear_attn.dt_bias"}
    | {f"mlp.experts.{part}_proj{kind}" for part in ("gate_up", "down") for kind in ("", "_bias")}
)
"""Tensors that are no weights of products: by heads, by channels, and those of experts that are stored as one."""


def chunk_count(config: DecoderConfig, most: int = MOST_CHUNKS) -> int:
    """How many chunks the layers of a model have: the largest power of two that divides what is cut, and no more than
    `most`, also one. It decides bits.

    Raises:
        InvalidRequestError: the layers of this family are not cut.
    """
    family = config.family
    if family.joint_head_norms:
        raise InvalidRequestError(
            "has norms over all heads of a layer, which are not cut into chunks",
            field="config.json model_type",
            value=config.model_type,
            remedy="Leave --tensor-parallel out; --shard-base divides the memory of the base, too",
        )
    count = 1
    while count < most and all(size % (2 * count) == 0 for size in cut_sizes(config).values()):
        count *= 2
    return count


def cut_sizes(config: DecoderConfig) -> dict[str, int]:
    """What is cut, by the names of config.json; an inner width in units of `ALIGNED`."""
    sizes = {"num_key_value_heads": config.num_key_value_heads}
    net, experts = config.delta_net, config.experts
    if net is not None:
        sizes["linear_num_key_heads"] = net.key_heads
    if any(config.experts_of(layer) is None for layer in range(config.num_hidden_layers)):
        sizes[f"intermediate_size / {ALIGNED}"] = config.intermediate_size // ALIGNED
    if experts is not None:
        sizes["num_experts"] = experts.count
        if experts.shared_intermediate_size is not None:
            sizes[f"shared_expert_intermediate_size / {ALIGNED}"] = experts.shared_intermediate_size // ALIGNED
    return sizes


def chunk_config(config: DecoderConfig, count: int) -> DecoderConfig:
    """The shape of one of `count` chunks."""
    net, experts = config.delta_net, config.experts
    if net is not None:
        net = replace(net, key_heads=net.key_heads // count, value_heads=net.value_heads // count)
    if experts is not None:
        shared = experts.shared_intermediate_size
        shared = None if shared is None else shared // count
        experts = replace(experts, count=experts.count // count, shared_intermediate_size=shared)
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // count,
        num_key_value_heads=config.num_key_value_heads // count,
        intermediate_size=config.intermediate_size // count,
        experts=experts,
        delta_net=net,
    )


def output_runs(config: DecoderConfig, module: str) -> tuple[int, ...] | None:
    """The runs of outputs of a module, named as in a checkpoint, of which a chunk has an equal part each; None: it has
    a part of all of them as one run."""
    _, part = _split(module)
    net = config.delta_net
    if part == "self_attn.qkv_proj":
        return tuple(config.attention_inputs.values())
    if part == "mlp.gate_up_proj":
        return config.intermediate_size, config.intermediate_size
    if net is not None and part in ("linear_attn.in_proj_qkv", "linear_attn.conv1d"):
        return net.key_size, net.key_size, net.value_size
    return None


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
        module, _, kind = part.rpartition(".")
        expert = _EXPERT.fullmatch(part)
        if expert is not None and per_chunk:
            number = int(expert[1])
            if number // per_chunk == chunk:
                cut[name.replace(f".experts.{number}.", f".experts.{number % per_chunk}.")] = tensor
        elif module in _OUTPUTS or part in _BY_FIRST_DIMENSION or (per_chunk and _is_router(config, module)):
            runs = output_runs(config, name.removesuffix(f".{kind}"))
            cut[name] = CutTensor.of(tensor, 0, chunk, count, runs)
        elif module in _INPUTS and kind == "weight":
            cut[name] = CutTensor.of(tensor, 1, chunk, count)
        else:
            cut[name] = tensor
    return cut


def router_name(config: DecoderConfig, layer: int) -> str:
    """The module that scores the experts of a layer."""
    assert config.family.experts is not None
    return f"model.layers.{layer}.mlp.{config.family.experts.router}"


def _is_router(config: DecoderConfig, module: str) -> bool:
    return config.family.experts is not None and module == f"mlp.{config.family.experts.router}"


@dataclass(frozen=True)
class CutTensor(StoredTensor):
    """One of `count` equal parts of a tensor along `dimension`, or of each of the `runs` of its first dimension, one
    behind the other. One that does not divide keeps its shape, and the loader refuses it."""

    whole: StoredTensor
    dimension: int
    chunk: int
    count: int
    runs: tuple[int, ...]

    @classmethod
    def of(
        cls, whole: StoredTensor, dimension: int, chunk: int, count: int, runs: tuple[int, ...] | None = None
    ) -> StoredTensor:
        """The part `chunk` of `whole`; without `runs`, it is one."""
        shape = list(whole.shape)
        if dimension >= len(shape):
            return whole
        runs = runs or (shape[dimension],)
        if sum(runs) != shape[dimension] or any(run % count for run in runs):
            return whole
        shape[dimension] //= count
        found = (whole.dtype, tuple(shape), whole.name, whole.file, whole.path)
        return cls(*found, whole=whole, dimension=dimension, chunk=chunk, count=count, runs=runs)

    @override
    def read(self, part: int | slice | None = None) -> Any:
        """See `StoredTensor`; of a stacked tensor one part, of others all of it at once."""
        if isinstance(part, int):
            assert len(self.runs) == 1 and self.dimension == 0, "only stacked tensors are read in parts"
            return self.whole.read(self.chunk * self.shape[0] + part)
        assert part is None, "a part of a tensor is read whole"
        own = [
            slice(stop - run + self.chunk * (run // self.count), stop - run + (self.chunk + 1) * (run // self.count))
            for run, stop in zip(self.runs, accumulate(self.runs), strict=True)
        ]
        if self.dimension == 1:
            return self.whole.read()[:, own[0]]
        if len(own) == 1:
            return self.whole.read(own[0])
        return torch.cat([self.whole.read(rows) for rows in own])


def _split(name: str) -> tuple[int, str]:
    found = _LAYER.fullmatch(name)
    assert found is not None, name
    return int(found[1]), found[2]

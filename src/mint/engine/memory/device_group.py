"""Predicts what a base model takes of several GPUs, and how many tokens per second they train and sample.

Peak rates are those of data sheets (dense bfloat16, without sparsity). The shares of them that are reached were chosen
by two figures of one H100 (Qwen3-0.6B in training on 16,384 tokens and in sampling 64 sequences) and by their profiles.
Two others of that card are within 20 %, and a single sequence within 35 % (docs/cluster.md, "The plan of a cluster").
No other GPU was measured.

FLOPs of training one token of a sequence of C tokens, with N parameters of the blocks' linear layers that a token
passes, L of the lora, U of the unembedding, A layers with attention and queries of width q: 4 (N + L + U) for forward
and backward through frozen weights, and 7·C·q·A for causal attention (2·C·q·A forward, 2.5 times that backward). With
recomputation, 2·N + 2·C·q·A more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from mint.engine.memory.micro_batches import bytes_per_row
from mint.engine.memory.plan import MODEL_VECTORS, MemoryPlan
from mint.engine.model.config import DecoderConfig
from mint.engine.reductions.state_division import divides_lora
from mint.errors import InvalidRequestError

GIB = 1 << 30

PRODUCT_SHARE = 0.6
"""Share of the peak rate that products reach. On an H100 those of a block alone reached 0.72."""

ATTENTION_SHARE = 0.41
"""Share of the peak rate that attention reaches in training, by its count of FLOPs."""

READ_SHARE = 0.7
"""Share of the memory bandwidth that is reached."""

TOUCHES = 35
"""Bytes that training reads and writes outside of products and attention, for each byte that it keeps for the
backward."""

RECOMPUTED_TOUCHES = 4 / 3
"""A pass whose forward is run again reads and writes so many times as much."""

LAYER_S = 85e-6
"""Seconds that a decoding step spends in each layer on the kernels between the products and on loras. The time to read
weights and cache is counted apart."""

Pass = Literal["kept", "recomputed", "offloaded"]


@dataclass(frozen=True)
class DeviceKind:
    """A GPU by its data sheet: FLOP/s of dense bfloat16 products, and bytes/s of its memory."""

    memory_gib: float
    flops: float
    bandwidth: float


DEVICE_KINDS = {
    "A100": DeviceKind(80, 312e12, 2.04e12),
    "H100": DeviceKind(80, 989e12, 3.35e12),
    "H200": DeviceKind(141, 989e12, 4.8e12),
    "B200": DeviceKind(180, 2250e12, 7.7e12),
    "L40S": DeviceKind(48, 362e12, 0.864e12),
    "RTX4090": DeviceKind(24, 165e12, 1.008e12),
}


@dataclass(frozen=True)
class DeviceGroup:
    """So many GPUs of a kind."""

    count: int
    name: str

    @property
    def kind(self) -> DeviceKind:
        """Its data sheet."""
        return DEVICE_KINDS[self.name]


def read_group(text: str) -> DeviceGroup:
    """`8xH100`, or `H100` for one.

    Raises:
        InvalidRequestError: it is written otherwise, or the GPU is not known.
    """
    found = re.fullmatch(r"(?:([1-9][0-9]{0,4})x)?([A-Za-z0-9]+)", text.strip())
    name = found and found[2].upper()
    if found is None or name not in DEVICE_KINDS:
        known = ", ".join(DEVICE_KINDS)
        raise InvalidRequestError(
            "is no group of GPUs", field="--gpus", value=text, remedy=f"Write 8xH100; known are {known}"
        )
    return DeviceGroup(int(found[1] or 1), name)


@dataclass(frozen=True)
class GroupPlan:
    """Bytes are those of one GPU. `change` is what must differ from what was asked for; None: it fits as it is.

    `fits` is False if none of the changes that are tried is enough. `resident` models of tenants are on the GPUs at the
    same time, and each takes `model` of a GPU; the others are parked in files. `trained` and `sampled` are tokens per
    second of all GPUs, if all of them train, and if all of them sample; with `trainers` of them in training, both
    phases of a loop take equally long.
    """

    group: DeviceGroup
    plan: MemoryPlan
    activations: Pass
    is_sharded: bool
    base: int
    needed: int
    change: str | None
    fits: bool
    tenants: int
    resident: int
    model: int
    trained: float
    sampled: float
    decoding: int
    trainers: int
    gradient: int


PlanOf = Callable[[int, str | None], MemoryPlan]
"""The plan of one GPU for sequences of so many tokens, with a quantization."""


def plan_group(
    config: DecoderConfig, plan_of: PlanOf, group: DeviceGroup, *, context: int, tenants: int, lora_parameters: int
) -> GroupPlan:
    """The first of these that fits: as asked; recomputation; offloaded inputs; a sharded base; NF4; more GPUs; and a
    shorter context."""
    tried = None
    for change, plan, kept, count, is_sharded in _ways(plan_of, group, context):
        own = replace(group, count=count)
        tried = _one(config, plan, own, kept, change, tenants, lora_parameters, is_sharded=is_sharded)
        if tried.fits:
            return tried
    assert tried is not None
    return tried


def _ways(
    plan_of: PlanOf, group: DeviceGroup, context: int
) -> Iterator[tuple[str | None, MemoryPlan, Pass, int, bool]]:
    plan = plan_of(context, None)
    yield None, plan, "kept", group.count, False
    yield "recompute activations", plan, "recomputed", group.count, False
    yield "offload the layers' inputs", plan, "offloaded", group.count, False
    if group.count > 1:
        yield "shard the base over the GPUs", plan, "offloaded", group.count, True
    quantized = plan_of(context, "nf4")
    yield "quantize the base: nf4", quantized, "offloaded", group.count, group.count > 1
    for factor in (2, 4, 8, 16):
        count = factor * group.count
        yield f"{count} GPUs, over which the base is sharded", plan, "offloaded", count, True
    shorter = context // 2
    while shorter >= 512:
        yield f"sequences of {shorter} tokens", plan_of(shorter, "nf4"), "offloaded", group.count, group.count > 1
        shorter //= 2


def _one(
    config: DecoderConfig,
    plan: MemoryPlan,
    group: DeviceGroup,
    kept: Pass,
    change: str | None,
    tenants: int,
    lora_parameters: int,
    *,
    is_sharded: bool,
) -> GroupPlan:
    memory = int(group.kind.memory_gib * GIB)
    base = plan.base
    if is_sharded:  # its part, and two layers that are gathered: the one that computes, and the next one
        base = plan.base // group.count + 2 * plan.base // config.num_hidden_layers
    kv_cache = plan.kv_cache if group.count == 1 else 0  # of several GPUs some train and others sample
    besides = base + kv_cache + getattr(plan, kept)
    recomputes = kept != "kept"
    token_s = training_seconds(config, group.kind, plan.context, lora_parameters, recomputes=recomputes)
    trained = group.count / token_s
    rows = max(1, min(plan.sequences, plan.limits.rows))
    # The mean length of a sequence is half of the context.
    sampled = group.count * rows / step_seconds(config, group.kind, plan, rows, plan.context / 2)
    balanced = group.count * sampled / (trained + sampled)
    trainers = min(max(1, round(balanced)), max(1, group.count - 1))
    vector, model = 4 * lora_parameters, plan.model
    if trainers > 1 and divides_lora(lora_parameters):  # a pass gathers weights and gradient
        model += MODEL_VECTORS * vector // trainers - MODEL_VECTORS * vector
        besides += 2 * vector
    resident = min(tenants, max(0, memory - besides) // model)
    return GroupPlan(
        group=group,
        plan=plan,
        activations=kept,
        is_sharded=is_sharded,
        base=base,
        needed=besides + model,
        change=change,
        fits=resident > 0,
        tenants=tenants,
        resident=resident,
        model=model,
        trained=trained,
        sampled=sampled,
        decoding=rows * group.count,
        trainers=trainers,
        gradient=vector,
    )


def training_seconds(
    config: DecoderConfig, kind: DeviceKind, context: int, lora_parameters: int, *, recomputes: bool
) -> float:
    """Seconds for each token of full micro-batches, of sequences of `context` tokens."""
    active = active_parameters(config)
    products = 4 * (active + lora_parameters + config.vocab_size * config.hidden_size)
    scores = context * config.query_size * len(config.attention_layers)
    attention = 7 * scores
    touched = TOUCHES * bytes_per_row(config, torch.bfloat16)
    if recomputes:
        products += 2 * active
        attention += 2 * scores
        touched *= RECOMPUTED_TOUCHES
    product_s, attention_s = products / (PRODUCT_SHARE * kind.flops), attention / (ATTENTION_SHARE * kind.flops)
    return product_s + attention_s + touched / (READ_SHARE * kind.bandwidth)


def step_seconds(config: DecoderConfig, kind: DeviceKind, plan: MemoryPlan, rows: int, tokens: float) -> float:
    """Seconds of a decoding step of `rows` sequences of so many tokens. Some tens of rows read all experts of a
    mixture."""
    read_s = (plan.base + rows * plan.kv_token * tokens) / (READ_SHARE * kind.bandwidth)
    products = 2 * (active_parameters(config) + config.vocab_size * config.hidden_size)
    return max(read_s, rows * products / (PRODUCT_SHARE * kind.flops)) + LAYER_S * config.num_hidden_layers


def active_parameters(config: DecoderConfig) -> int:
    """The parameters of the blocks' linear layers that one token passes."""
    hidden, total = config.hidden_size, 0
    for layer in range(config.num_hidden_layers):
        net = config.delta_net_of(layer)
        if net is None:
            total += hidden * (sum(config.attention_inputs.values()) + config.query_size)
        else:
            total += hidden * (2 * net.key_heads * net.key_dim + 3 * net.value_heads * net.value_dim)
        experts = config.experts_of(layer)
        inner = config.intermediate_size
        if experts is not None:
            inner = experts.per_token * experts.intermediate_size + (experts.shared_intermediate_size or 0)
            total += hidden * experts.count
        total += 3 * hidden * inner
    return total

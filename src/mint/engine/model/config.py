"""The shape of a decoder, read from a Hugging Face config.json. Options that mint does not compute are refused here.

Knows the families; knows nothing of weights or torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from mint.errors import InvalidRequestError
from mint.models.folder import MOST_LAYERS, MOST_POSITIONS

ALIGNED = 4
"""Widths are multiples of this: 16 bytes in float32."""


Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
"""The activation function of the gate in an MLP. `clamped_swiglu` is GPT-OSS's, and covers the whole product:
gate · σ(`SWIGLU_ALPHA` · gate) · (up + 1), with gates up to `SWIGLU_LIMIT` and ups between ± `SWIGLU_LIMIT`. The
outputs of its gates and ups alternate."""

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


@dataclass(frozen=True)
class NormNames:
    """The names of a layer's norms in a checkpoint; None: the family has no such norm. An input norm stands before
    attention or MLP. An output norm stands behind it, before the result is added to the residual."""

    attention_input: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp_input: str | None = "post_attention_layernorm"
    mlp_output: str | None = None


@dataclass(frozen=True)
class ExpertTensors:
    """How checkpoints hold a mixture of experts, and how its config.json describes it."""

    router: str = "gate"
    intermediate_size: str = "moe_intermediate_size"
    norm_topk_prob: bool = False
    """The value of `norm_topk_prob` if config.json has none."""
    always_normed: bool = False
    """The weights of a token's experts add up to 1, whatever `norm_topk_prob` says."""
    stacked: bool = False
    """The matrices of a layer's experts are one tensor [experts, outputs, inputs], and gate and up are one matrix. Some
    tools write the experts one by one."""
    inputs_first: bool = False
    """That tensor is [experts, inputs, outputs]."""
    biases: bool = False
    """Router and experts have biases."""
    shared: bool = False
    """One more expert computes all rows; its result is multiplied with the sigmoid of a gate."""


@dataclass(frozen=True)
class Family:
    """How one family of decoders differs from another, and what its config.json may leave out."""

    name: str
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False
    """Each query head has one more logit in its softmax, for which there is no value (arXiv 2309.17453)."""
    head_norms: bool = False
    joint_head_norms: bool = False
    """All query heads are normed together, and all key heads."""
    norms: NormNames = NormNames()
    norms_from_one: bool = False
    """Checkpoints hold the weights of norms less 1."""
    experts: ExpertTensors | None = None
    unrotated_layers: bool = False
    multipliers: bool = False
    normal_embeddings: bool = False
    """Embedded tokens are multiplied with √hidden_size, and `query_pre_attn_scalar` takes the place of head_dim."""
    delta_nets: bool = False
    """Layers that `layer_types` calls `linear_attention` are gated delta nets."""
    delta_nets_by_key_head: bool = False
    """A delta net's input products are two layers, whose outputs are sorted by key head."""
    output_gates: bool = False
    """The attended values of each query head are multiplied with the sigmoid of a gate of its own."""
    fused: bool = False
    """Query, key and value are one layer, and gate and up."""
    partial_rotation: bool = False
    rotated_share: float = 1.0
    """Of a head, where config.json does not say it."""
    windows: bool = False
    """Layers see the last `sliding_window` positions, unless that is null."""
    full_every: int | None = None
    """A layer whose number, counted from 1, is a multiple of this has full attention, not a window or a delta net."""
    window_theta: float | None = None
    """The base of a rotation that layers with windows have of their own."""
    unrotated_full_layers: bool = False
    """Where some layers have windows, the heads of the others are not rotated."""
    scaled_rotation: bool = True
    """The rotation may be scaled."""
    activation: Activation = "silu"
    is_tied: bool = False
    sliding_window: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope: Mapping[str, Any] | None = None
    """The `rope_parameters` of a config.json without them."""


_AFTER = NormNames(
    attention_input=None,
    attention_output="post_attention_layernorm",
    mlp_input=None,
    mlp_output="post_feedforward_layernorm",
)

_QWEN3_5 = Family(
    "Qwen3.5",
    head_norms=True,
    norms_from_one=True,
    delta_nets=True,
    full_every=4,
    output_gates=True,
    partial_rotation=True,
    rotated_share=0.25,
    scaled_rotation=False,
)

FAMILIES = {
    "llama": Family("Llama"),
    "qwen2": Family("Qwen2.5", qkv_bias=True),
    "qwen3": Family("Qwen3", head_norms=True),
    "qwen3_moe": Family("Qwen3-MoE", head_norms=True, experts=ExpertTensors()),
    "qwen3_next": replace(
        _QWEN3_5,
        name="Qwen3-Next",
        delta_nets_by_key_head=True,
        experts=ExpertTensors(norm_topk_prob=True, shared=True),
    ),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": replace(
        _QWEN3_5, name="Qwen3.5-MoE", experts=ExpertTensors(always_normed=True, stacked=True, shared=True)
    ),
    "mistral": Family("Mistral", windows=True, sliding_window=4096),
    "smollm3": Family("SmolLM3", unrotated_layers=True, is_tied=True, rope_theta=2e6),
    "granite": Family("Granite", multipliers=True),
    "phi3": Family("Phi-3", fused=True, partial_rotation=True, windows=True, scaled_rotation=False, rms_norm_eps=1e-5),
    "gemma3_text": Family(
        "Gemma 3",
        head_norms=True,
        norms=NormNames(
            attention_output="post_attention_layernorm",
            mlp_input="pre_feedforward_layernorm",
            mlp_output="post_feedforward_layernorm",
        ),
        norms_from_one=True,
        normal_embeddings=True,
        windows=True,
        full_every=6,
        window_theta=10000.0,
        activation="gelu_tanh",
        is_tied=True,
        sliding_window=4096,
        rope_theta=1e6,
    ),
    "exaone4": Family(
        "EXAONE 4",
        head_norms=True,
        norms=_AFTER,
        windows=True,
        full_every=4,
        unrotated_full_layers=True,
        sliding_window=4096,
        rms_norm_eps=1e-5,
    ),
    "gpt_oss": Family(
        "GPT-OSS",
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        experts=ExpertTensors(
            "router", "intermediate_size", always_normed=True, stacked=True, inputs_first=True, biases=True
        ),
        windows=True,
        full_every=2,
        activation="clamped_swiglu",
        sliding_window=128,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    ),
    "olmo2": Family("OLMo 2", head_norms=True, joint_head_norms=True, norms=_AFTER, rms_norm_eps=1e-5),
    "olmo3": Family(
        "OLMo 3",
        head_norms=True,
        joint_head_norms=True,
        norms=_AFTER,
        windows=True,
        full_every=4,
        window_theta=500000.0,
        sliding_window=4096,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
    ),
}
"""By the `model_type` of config.json."""

_REFUSED_OPTIONS = (
    "mlp_bias",
    "use_sliding_window",
    "dual_chunk_attention_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
)

_ACTIVATIONS: dict[Activation, dict[str, object]] = {
    "silu": {"hidden_act": "silu"},
    "gelu_tanh": {"hidden_activation": "gelu_pytorch_tanh"},
    "clamped_swiglu": {"hidden_act": "silu", "swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT},
}
"""The values of config.json that stand for each activation; keys that are absent count as these."""

SUPPORTED = ", ".join(f"{family.name} ({key})" for key, family in FAMILIES.items())
"""The families, for error messages."""


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): frequencies that turn less than `beta_slow` times in the original context are divided by
    `factor`, those that turn more than `beta_fast` times stay, with a ramp over the pairs in between; and cos and sin
    are multiplied by `attention_factor`.

    With `truncate` the ramp begins and ends at whole pairs.
    """

    factor: float
    original_max_position_embeddings: float
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's scaling: frequencies of long wavelengths are divided by `factor`, those of short ones stay, with a ramp
    in between.

    The limits are `original_max_position_embeddings` / `low_freq_factor` and / `high_freq_factor`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float


@dataclass(frozen=True)
class Rope:
    """A rotation of heads: the base of its frequencies, and their scaling."""

    theta: float
    scaling: Llama3Scaling | LinearScaling | YarnScaling | None


Windows = Mapping[int, int]
"""By layer, how many of the last positions a row sees, itself included. A layer that is not there has no window."""

NO_WINDOWS: Windows = MappingProxyType({})


@dataclass(frozen=True)
class Scales:
    """Constants that some families multiply with: embedded tokens; queries and keys, before their products are divided
    by √head_dim; and logits."""

    embedding: float = 1.0
    query_key: float = 1.0
    logits: float = 1.0


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the MLP, in `layers`: each token goes to `per_token` of `count` experts, and to
    one expert that all tokens share, if that has a width."""

    count: int
    per_token: int
    intermediate_size: int
    shared_intermediate_size: int | None
    norm_topk_prob: bool
    layers: frozenset[int]


@dataclass(frozen=True)
class DeltaNetConfig:
    """A gated delta net (arXiv 2412.06464) in place of attention, in `layers`.

    `key_heads` heads of queries and keys of `key_dim` numbers, each for value_heads / key_heads of the `value_heads`
    heads of `value_dim` numbers. A convolution over the last `taps` rows goes over queries, keys and values.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    by_key_head: bool
    layers: frozenset[int]

    @property
    def key_size(self) -> int:
        """Width of all keys (that of the queries is the same)."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Width of all values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Width of queries, keys and values together."""
        return 2 * self.key_size + self.value_size

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """The widths of the products with a layer's input: query, key and value; output gate; beta; decay."""
        return self.channels, self.value_size, self.value_heads, self.value_heads

    @property
    def inputs(self) -> dict[str, int]:
        """The widths of the layers that make these products, in their order, by what checkpoints call them.

        With `by_key_head` their outputs are sorted by key head, for each of which the first layer has query, key,
        values and output gates, and the second betas and decays."""
        if self.by_key_head:
            return {"qkvz": self.channels + self.value_size, "ba": 2 * self.value_heads}
        return dict(zip(("qkv", "z", "b", "a"), self.parts, strict=True))

    @property
    def state_entries(self) -> int:
        """Numbers of the state that a layer carries from row to row."""
        return (self.taps - 1) * self.channels + self.key_dim * self.value_size


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and constants of a decoder, named as in config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    ropes: tuple[Rope | None, ...]
    """By layer; None: heads are not rotated."""
    windows: Windows
    tie_word_embeddings: bool
    experts: ExpertsConfig | None
    delta_net: DeltaNetConfig | None = None
    scales: Scales = Scales()

    @property
    def family(self) -> Family:
        """Which biases and norms there are."""
        return FAMILIES[self.model_type]

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together (the values' is the same)."""
        return self.num_key_value_heads * self.head_dim

    @property
    def attention_inputs(self) -> dict[str, int]:
        """The widths of the products with the input of attention, in their order; a query may have a gate."""
        query = self.query_size * (2 if self.family.output_gates else 1)
        return {"q": query, "k": self.key_value_size, "v": self.key_value_size}

    @property
    def attention_layers(self) -> list[int]:
        """The layers that are no delta nets."""
        return [layer for layer in range(self.num_hidden_layers) if self.delta_net_of(layer) is None]

    def delta_net_of(self, layer: int) -> DeltaNetConfig | None:
        """The delta net of a layer; None where it has attention."""
        return self.delta_net if self.delta_net is not None and layer in self.delta_net.layers else None

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """The experts of a layer; None where it has a dense MLP."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None


def read_decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that `config` (config.json) describes.

    Raises:
        InvalidRequestError: another family, an option that mint does not compute, or a missing or senseless size.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise _unsupported("model_type", model_type, "one of the families")
    _refuse_options(config)
    family = FAMILIES[model_type]
    heads = _size(config, "num_attention_heads")
    key_value_heads = _size(config, "num_key_value_heads", default=heads)
    if heads % key_value_heads:
        raise _unsupported("num_key_value_heads", key_value_heads, f"a divisor of the {heads} query heads")
    layers = _size(config, "num_hidden_layers", most=MOST_LAYERS)
    hidden = _width(config, "hidden_size")
    head_dim = _width(config, "head_dim", default=hidden // heads)
    residual, scales = _scales(config, hidden, head_dim)
    windowed = _windowed_layers(config, layers)
    context = _size(config, "max_position_embeddings", most=MOST_POSITIONS)
    experts = None if family.experts is None else _experts(config, layers, family.experts)
    return DecoderConfig(
        model_type=model_type,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_intermediate_size(config, layers, experts),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        rotary_dim=_rotary_dim(config, head_dim),
        max_position_embeddings=context,
        rms_norm_eps=_positive("rms_norm_eps", config.get("rms_norm_eps", family.rms_norm_eps)) / residual**2,
        ropes=_ropes(config, layers, windowed),
        windows=_windows(config, windowed, context),
        tie_word_embeddings=_flag(config, "tie_word_embeddings", default=family.is_tied),
        experts=experts,
        delta_net=_delta_net(config, layers) if family.delta_nets else None,
        scales=scales,
    )


def _flag(config: Mapping[str, Any], key: str, *, default: bool) -> bool:
    given = config.get(key)
    if given is not None and not isinstance(given, bool):
        raise _unsupported(key, given, "true or false")
    return default if given is None else given


def _intermediate_size(config: Mapping[str, Any], layers: int, experts: ExpertsConfig | None) -> int:
    """That of dense MLPs. A model without any need not say it."""
    is_needed = experts is None or len(experts.layers) < layers
    return _width(config, "intermediate_size", default=None if is_needed else experts.intermediate_size)


def _family(config: Mapping[str, Any]) -> Family:
    return FAMILIES[config["model_type"]]


def _refuse_options(config: Mapping[str, Any]) -> None:
    family = _family(config)
    for key, usual in {**_ACTIVATIONS[family.activation], "attention_bias": family.o_bias}.items():
        if config.get(key, usual) != usual:
            raise _unsupported(key, config[key], f"only {usual!r}")
    for option in _REFUSED_OPTIONS:
        if config.get(option):
            raise _unsupported(option, config[option], "only without")
    kinds = _list(config, "layer_types")
    if family.full_every is None and any(kind != "full_attention" for kind in kinds):
        raise _unsupported("layer_types", kinds, "only full_attention")
    if kinds and len(kinds) != config.get("num_hidden_layers"):
        raise _unsupported("layer_types", kinds, "one kind for each layer")


def _windowed_layers(config: Mapping[str, Any], layers: int) -> frozenset[int]:
    """The layers that have a window, if config.json sets a window."""
    family = _family(config)
    if not family.windows:
        return frozenset()
    if family.full_every is None:
        return frozenset(range(layers))
    return frozenset(range(layers)) - _full_layers(config, layers, "sliding_attention", "sliding_window_pattern")


def _delta_net(config: Mapping[str, Any], layers: int) -> DeltaNetConfig:
    full = _full_layers(config, layers, "linear_attention", "full_attention_interval")
    if not full:
        raise _unsupported("layer_types", config.get("layer_types"), "at least one layer of full attention")
    key_heads = _size(config, "linear_num_key_heads", default=16)
    value_heads = _size(config, "linear_num_value_heads", default=32)
    if value_heads % key_heads:
        raise _unsupported("linear_num_value_heads", value_heads, f"a multiple of the {key_heads} key heads")
    return DeltaNetConfig(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=_width(config, "linear_key_head_dim", default=128),
        value_dim=_width(config, "linear_value_head_dim", default=128),
        taps=_size(config, "linear_conv_kernel_dim", default=4),
        by_key_head=_family(config).delta_nets_by_key_head,
        layers=frozenset(range(layers)) - full,
    )


def _full_layers(config: Mapping[str, Any], layers: int, other: str, interval: str) -> frozenset[int]:
    """The layers of full attention, where each is that or of the kind `other`; `interval` names how often it is that
    where `layer_types` is missing."""
    if config.get("layer_types") is None:
        step = _size(config, interval, default=_family(config).full_every)
        return frozenset(range(step - 1, layers, step))
    kinds = _list(config, "layer_types")
    if len(kinds) != layers or any(kind not in ("full_attention", other) for kind in kinds):
        raise _unsupported("layer_types", kinds, f"{layers} times full_attention or {other}")
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "full_attention")


def _has_windows(config: Mapping[str, Any]) -> bool:
    """Null means none; left out, it means the family's default."""
    return config.get("sliding_window", _family(config).sliding_window) is not None


def _windows(config: Mapping[str, Any], windowed: frozenset[int], context: int) -> Windows:
    """None where a whole context is seen."""
    if not windowed or not _has_windows(config):
        return NO_WINDOWS
    window = _size(config, "sliding_window", default=_family(config).sliding_window)
    return dict.fromkeys(sorted(windowed), window) if window < context else NO_WINDOWS


def _experts(config: Mapping[str, Any], layers: int, tensors: ExpertTensors) -> ExpertsConfig:
    """The mixture of experts. Transformers 5 writes `num_local_experts` although it reads `num_experts`."""
    count = _size(config, "num_experts" if "num_experts" in config else "num_local_experts")
    per_token = _size(config, "num_experts_per_tok")
    if per_token > count:
        raise _unsupported("num_experts_per_tok", per_token, f"at most the {count} experts")
    step = _size(config, "decoder_sparse_step", default=1)
    dense = _list(config, "mlp_only_layers")
    mixtures = frozenset(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)
    return ExpertsConfig(
        count=count,
        per_token=per_token,
        intermediate_size=_width(config, tensors.intermediate_size),
        shared_intermediate_size=_width(config, "shared_expert_intermediate_size") if tensors.shared else None,
        norm_topk_prob=tensors.always_normed or bool(config.get("norm_topk_prob", tensors.norm_topk_prob)),
        layers=mixtures,
    )


def _unrotated_layers(config: Mapping[str, Any], layers: int) -> frozenset[int]:
    """The layers without a rotation: those with a 0 in `no_rope_layers`, else every `no_rope_layer_interval`-th."""
    marks = config.get("no_rope_layers")
    if marks is None:
        step = _size(config, "no_rope_layer_interval", default=4)
        return frozenset(range(step - 1, layers, step))
    if not isinstance(marks, list) or len(marks) != layers:
        raise _unsupported("no_rope_layers", marks, f"a list of {layers} marks, 1 or 0")
    return frozenset(layer for layer, is_rotated in enumerate(marks) if not is_rotated)


def _scales(config: Mapping[str, Any], hidden: int, head_dim: int) -> tuple[float, Scales]:
    """The factor by which some families multiply the results of attention and MLP, and their other constants.

    mint divides the residual rows by that factor instead, from the embedding on. Norms of such rows are the same if
    `eps` is divided by the square of the factor.
    """
    family = _family(config)
    if family.normal_embeddings:
        scalar = _positive("query_pre_attn_scalar", config.get("query_pre_attn_scalar", 256))
        return 1.0, Scales(embedding=math.sqrt(hidden), query_key=(head_dim / scalar) ** 0.25)
    if not family.multipliers:
        return 1.0, Scales()
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    embedding, residual, attention, divisor = (_positive(name, config.get(name, 1.0)) for name in names)
    query_key = math.sqrt(attention * math.sqrt(head_dim))
    return residual, Scales(embedding=embedding / residual, query_key=query_key, logits=1 / divisor)


def _yarn(config: Mapping[str, Any], place: str, rope: Mapping[str, Any]) -> YarnScaling:
    original = _positive(*_original_context(config, place, rope, config.get("max_position_embeddings")))
    factor = rope.get("factor")
    if factor is None:
        factor = config.get("max_position_embeddings", 0) / original
        if factor <= 1:  # nothing says by how much
            raise _unsupported(f"{place}.factor", None, "a number")
    factor = _positive(f"{place}.factor", factor)
    attention = rope.get("attention_factor")
    if attention is None:
        scale, scale_all = rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0
        attention = _magnitude(factor, 1.0)
        if scale and scale_all:
            scale = _positive(f"{place}.mscale", scale)
            scale_all = _positive(f"{place}.mscale_all_dim", scale_all)
            attention = _magnitude(factor, scale) / _magnitude(factor, scale_all)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=_positive(f"{place}.beta_fast", rope.get("beta_fast") or 32.0),
        beta_slow=_positive(f"{place}.beta_slow", rope.get("beta_slow") or 1.0),
        attention_factor=_positive(f"{place}.attention_factor", attention),
        truncate=bool(rope.get("truncate", True)),
    )


def _original_context(
    config: Mapping[str, Any], place: str, rope: Mapping[str, Any], default: object = None
) -> tuple[str, object]:
    """The longest sequence before scaling, behind its name. At the top level it comes first, as in transformers."""
    key = "original_max_position_embeddings"
    if config.get(key) is not None and "." not in place:  # where layers have scalings of their own, it is not read
        return key, config[key]
    return f"{place}.{key}", rope.get(key, default)


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _rotary_dim(config: Mapping[str, Any], head_dim: int) -> int:
    """How many of a head's numbers are rotated: its first ones."""
    place, rope = _rope_settings(config)
    key = f"{place}.partial_rotary_factor"
    usual = _family(config).rotated_share
    share = _positive(key, rope.get("partial_rotary_factor", config.get("partial_rotary_factor", usual)))
    if share != 1.0 and not _family(config).partial_rotation:
        raise _unsupported(key, share, "only 1.0")
    rotated = int(head_dim * share)
    if share > 1 or rotated % 2:
        raise _unsupported(key, share, "a share of a head that has pairs")
    return rotated


def _rope_settings(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Transformers 5 writes base and scaling to `rope_parameters`, for layers with and without windows apart. Older
    files have the base at the top level and the scaling in `rope_scaling`."""
    place = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = _object(place, config.get(place)) or _family(config).rope or {}
    if _family(config).window_theta is not None and place == "rope_parameters" and rope:
        place = f"{place}.full_attention"
        return place, _object(place, rope.get("full_attention"))
    return place, rope


def _ropes(config: Mapping[str, Any], layers: int, windowed: frozenset[int]) -> tuple[Rope | None, ...]:
    family = _family(config)
    place, rope = _rope_settings(config)
    main = _rope(config, place, rope, family.rope_theta)
    if main.scaling is not None and not family.scaled_rotation:
        raise _unsupported(f"{place}.rope_type", rope.get("rope_type", rope.get("type")), "'default'")
    if family.window_theta is not None:
        place = "rope_parameters.sliding_attention"
        local = _object(place, _object("rope_parameters", config.get("rope_parameters")).get("sliding_attention"))
        theta = config.get("rope_local_base_freq", family.window_theta)
        own = _rope({}, place, local, theta)
        return tuple(own if layer in windowed else main for layer in range(layers))
    unrotated = _unrotated_layers(config, layers) if family.unrotated_layers else frozenset()
    if family.unrotated_full_layers and _has_windows(config):
        unrotated = frozenset(range(layers)) - windowed
    return tuple(None if layer in unrotated else main for layer in range(layers))


def _rope(config: Mapping[str, Any], place: str, rope: Mapping[str, Any], theta: float) -> Rope:
    """The base (`theta` where there is none) and the scaling, whose kind is `type` or `rope_type`."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise _unsupported(f"{place}.rope_type", kind, "'default', 'linear', 'llama3' or 'yarn'")
    theta = _positive("rope_theta", rope.get("rope_theta", config.get("rope_theta", theta)))
    if kind == "default":
        return Rope(theta, None)
    if kind == "linear":
        return Rope(theta, LinearScaling(_positive(f"{place}.factor", rope.get("factor"))))
    if kind == "yarn":
        return Rope(theta, _yarn(config, place, rope))
    names = ("factor", "low_freq_factor", "high_freq_factor")
    scaling = Llama3Scaling(
        **{name: _positive(f"{place}.{name}", rope.get(name)) for name in names},
        original_max_position_embeddings=_positive(*_original_context(config, place, rope)),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise _unsupported(f"{place}.low_freq_factor", scaling.low_freq_factor, "below high_freq_factor")
    return Rope(theta, scaling)


def _positive(key: str, value: object) -> float:
    # The maximum refuses NaN, infinity and whole numbers that no float can hold.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:
        raise _unsupported(key, value, "a positive number")
    return float(value)


def _object(key: str, value: object) -> Mapping[str, Any]:
    """Empty where the value is missing or null."""
    if value is not None and not isinstance(value, dict):
        raise _unsupported(key, value, "an object")
    return value or {}


def _list(config: Mapping[str, Any], key: str) -> list[Any]:
    """Empty where the value is missing or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, list):
        raise _unsupported(key, value, "a list")
    return value or []


def _size(config: Mapping[str, Any], key: str, default: int | None = None, most: int | None = None) -> int:
    size = config.get(key)
    size = default if size is None else size
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise _unsupported(key, size, "a positive whole number")
    if most is not None and size > most:
        raise _unsupported(key, size, f"at most {most}")
    return size


def _width(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size that is the length of a matrix's rows."""
    size = _size(config, key, default)
    # BLAS gives unaligned rows other bits in other places of a batch (measured with widths 18 and 77).
    if size % ALIGNED:
        raise _unsupported(key, size, f"a multiple of {ALIGNED}")
    return size


def _unsupported(key: str, value: object, supported: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"is not computed by mint; supported is {supported}, and the families are {SUPPORTED}",
        field=f"config.json {key}",
        value=repr(value),
        remedy="Choose another base model",
    )

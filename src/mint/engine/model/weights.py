"""The base weights of a decoder as the forward uses them, and the sites of loras on them.

Layers that share their inputs are one matrix, and one site.

Letters: E hidden size · H all heads (query, key, value) · D head dimension · I an MLP's inner width · V vocabulary.
Of rows at experts: P pairs of a row and an expert, sorted by expert.
Of a delta net: C channels of the convolution · K its rows · N value heads · D their dimension · U = N·D.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from mint.engine.lora import UNEMBED, LoraWeights, Site
from mint.engine.model.config import DecoderConfig, ExpertsConfig
from mint.engine.model.linear import Matrix
from mint.engine.protocol import LoraSpec


@dataclass(frozen=True)
class MlpWeights:
    """Gate and up as one matrix, and down. Biases are in float32; None: there is none."""

    gate_up: Matrix  # [2·I, E]
    down: Matrix  # [E, I]
    gate_up_bias: Tensor | None = None  # [2·I]
    down_bias: Tensor | None = None  # [E]


@dataclass(frozen=True)
class SharedExpertWeights:
    """The expert of a mixture that computes all rows, and the vector, in float32, whose product with a row's input is
    the gate of its result."""

    mlp: MlpWeights
    gate: Tensor  # [E]


@dataclass(frozen=True)
class MixtureWeights:
    """A mixture of experts, each an MLP, and the matrix that chooses among them, in float32."""

    router: Matrix  # [experts, E]
    experts: list[MlpWeights]
    router_bias: Tensor | None = None  # [experts]
    shared: SharedExpertWeights | None = None


@dataclass(frozen=True)
class AttentionWeights:
    """The matrices of attention in the base's dtype, the bias, the norms of heads and the sinks in float32. With output
    gates, each query head's rows of `qkv` are followed by those of its gate."""

    qkv: Matrix  # [H·D, E], or [(H + query heads)·D, E] with output gates
    qkv_bias: Tensor | None  # [H·D]
    head_norms: Tensor | None  # [query + key heads, D]
    sinks: Tensor | None  # [query heads]
    o: Matrix  # [E, query heads · D]


@dataclass(frozen=True)
class DeltaNetWeights:
    """A gated delta net: the matrices in the base's dtype, the rest in float32. `inputs` has the rows of query, key and
    value, then those of the output gate, of beta and of the decay; or all of them sorted by key head, as checkpoints
    have them."""

    inputs: Matrix  # [C + U + 2·N, E]
    taps: Tensor  # [K, C]: the convolution, the oldest row first
    decay_rates: Tensor  # [N]
    decay_bias: Tensor  # [N]
    norm: Tensor  # [D]
    o: Matrix  # [E, U]


@dataclass(frozen=True)
class LayerWeights:
    """One layer: what mixes rows, and the MLP. Norms, in float32, stand before both, and behind them; a bias, too, is
    added behind the mixer. None: there is none."""

    attention_norm: Tensor | None  # [E]
    attention_output_norm: Tensor | None  # [E]
    mixer: AttentionWeights | DeltaNetWeights
    o_bias: Tensor | None  # [E]
    mlp_norm: Tensor | None  # [E]
    mlp_output_norm: Tensor | None  # [E]
    mlp: MlpWeights | MixtureWeights


@dataclass(frozen=True)
class BaseWeights:
    """All of a base model. `unembedding` shares the memory of the embedding where the two are tied; `final_norm` is
    multiplied with the scale of the logits."""

    layers: list[LayerWeights]
    embedding: Tensor  # [V, E], in the base's dtype
    final_norm: Tensor  # [E]
    unembedding: Matrix  # [V, E]

    @property
    def matrices(self) -> dict[str, Matrix]:
        """The matrices of the layers, but for those of experts that the router chooses, by the name of their site."""
        return site_matrices(self.layers)


def site_matrices(layers: Sequence[LayerWeights]) -> dict[str, Matrix]:
    """The matrices of layers, but for those of experts that the router chooses, by the name of their site."""
    found: dict[str, Matrix] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer.mixer, AttentionWeights):
            found |= {f"{index}.qkv": layer.mixer.qkv, f"{index}.o": layer.mixer.o}
        else:
            found |= {f"{index}.in": layer.mixer.inputs, f"{index}.o": layer.mixer.o}
        if isinstance(layer.mlp, MlpWeights):
            found |= {f"{index}.gate_up": layer.mlp.gate_up, f"{index}.down": layer.mlp.down}
        elif layer.mlp.shared is not None:
            name, mlp = shared_site(index), layer.mlp.shared.mlp
            found |= {f"{name}.gate_up": mlp.gate_up, f"{name}.down": mlp.down}
    return found


def layer_matrices(layer: LayerWeights) -> list[Matrix]:
    """All matrices of a layer, those of experts among them."""
    mixer, mlp = layer.mixer, layer.mlp
    found = [mixer.qkv if isinstance(mixer, AttentionWeights) else mixer.inputs, mixer.o]
    if isinstance(mlp, MlpWeights):
        return [*found, mlp.gate_up, mlp.down]
    shared = [] if mlp.shared is None else [mlp.shared.mlp]
    return [*found, mlp.router, *(matrix for own in (*mlp.experts, *shared) for matrix in (own.gate_up, own.down))]


class ExpertServer(Protocol):
    """Computes those experts of a layer that are in this process.

    Where several processes divide the experts, rows go to the process that has their expert, and the results come back.
    The rows of one process stay together, in their order: so every product has the rows, the order and the bits that
    it has in one process.
    """

    def run_rows(self, rows: Tensor, counts: Sequence[int], lora: LoraWeights | None, *, keeps: bool) -> Any:
        """The results [P, E] of `rows` [P, E], of which each of the layer's experts has `counts`; and what
        `gradient_of` needs of them, if it `keeps` that. May overwrite `rows`."""
        ...

    def gradient_of(
        self, grads: Tensor, weights: Tensor, counts: Sequence[int], lora: LoraWeights | None, kept: Any
    ) -> tuple[Tensor, Tensor]:
        """The gradients for the rows [P, E], and for their routing weights [P] if these are not applied to the results
        elsewhere, from `grads` [P, E] of the results and the `weights` [P]. Those of the lora are added to its own."""
        ...


class ExpertExchange(Protocol):
    """The exchanges of one layer's rows. All processes take part in each; who has no rows computes for the others."""

    def serve(self, server: ExpertServer) -> None:
        """Says what computes the experts of this process."""
        ...

    def run_rows(self, rows: Tensor, counts: Sequence[int], *, keeps: bool) -> Tensor:
        """The results [P, E] of this process's rows [P, E], of which each of the layer's experts has `counts`."""
        ...

    def gradient_of(self, grads: Tensor, weights: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `ExpertServer`; of the last rows that were run with `keeps`. Those of the lora come back with it."""
        ...


@runtime_checkable
class DivisibleExperts(Protocol):
    """A layer's experts that can be divided."""

    def divide(self, exchange: ExpertExchange) -> None:
        """From now on, rows go through `exchange`."""
        ...


LayerRun = Callable[[Tensor], Tensor]
"""Runs one layer over its input [T, E]."""


class LayerSource(Protocol):
    """Where the matrices of one base's layers come from: the seam between the decoder and what holds them elsewhere."""

    def keep(self, layer: LayerWeights) -> None:
        """Takes the next layer, whose matrices have just been loaded."""
        ...

    def around(self, index: int, run: LayerRun) -> LayerRun:
        """`run`, with what has to happen before and after the layer, in a forward and in its backward. The bits of
        results and gradients are those of `run`."""
        ...

    def experts_of(self, index: int) -> ExpertExchange | None:
        """Where the rows of a layer go whose experts other processes have, too; None: all are here."""
        ...


def list_sites(config: DecoderConfig, lora: LoraSpec) -> list[Site]:
    """The sites that `lora` trains, in the order of their storage."""
    hidden = config.hidden_size
    sites = []
    for layer in range(config.num_hidden_layers):
        mlp = f"model.layers.{layer}.mlp"
        mixture = config.experts_of(layer)
        if lora.train_attn:
            sites += _mixer_sites(config, layer)
        if lora.train_mlp and mixture is None:
            sites += _mlp_sites(config, str(layer), mlp, config.intermediate_size, is_one=config.family.fused)
        elif lora.train_mlp and mixture is not None:
            sites += _mixture_sites(config, layer, mlp, mixture)
    if lora.train_unembed:
        sites.append(Site(UNEMBED, (UNEMBED,), hidden, (config.vocab_size,)))
    return sites


def _mixer_sites(config: DecoderConfig, layer: int) -> list[Site]:
    hidden = config.hidden_size
    net = config.delta_net_of(layer)
    if net is not None:
        module = f"model.layers.{layer}.linear_attn"
        names = tuple(f"{module}.in_proj_{part}" for part in net.inputs)
        return [
            Site(f"{layer}.in", names, hidden, tuple(net.inputs.values())),
            Site(f"{layer}.o", (f"{module}.out_proj",), net.value_size, (hidden,)),
        ]
    module = f"model.layers.{layer}.self_attn"
    return [
        _fused_site(f"{layer}.qkv", module, config.attention_inputs, hidden, is_one=config.family.fused),
        Site(f"{layer}.o", (f"{module}.o_proj",), config.query_size, (hidden,)),
    ]


def _mixture_sites(config: DecoderConfig, layer: int, module: str, mixture: ExpertsConfig) -> list[Site]:
    """Those of the experts in their order, then those of the expert that all rows share."""
    is_one = config.family.experts is not None and config.family.experts.stacked
    sites = []
    for expert in range(mixture.count):
        own = f"{module}.experts.{expert}"
        sites += _mlp_sites(config, expert_site(layer, expert), own, mixture.intermediate_size, is_one=is_one)
    width = mixture.shared_intermediate_size
    if width is not None:
        sites += _mlp_sites(config, shared_site(layer), f"{module}.shared_expert", width, is_one=False)
    return sites


def expert_site(layer: int, expert: int) -> str:
    """The prefix of the names of an expert's sites."""
    return f"{layer}.experts.{expert}"


def shared_site(layer: int) -> str:
    """The prefix of the names of the sites of the expert that all rows share."""
    return f"{layer}.shared"


def _mlp_sites(config: DecoderConfig, name: str, module: str, inner: int, *, is_one: bool) -> list[Site]:
    sizes = {"gate": inner, "up": inner}
    gate_up = _fused_site(f"{name}.gate_up", module, sizes, config.hidden_size, is_one=is_one)
    return [gate_up, Site(f"{name}.down", (f"{module}.down_proj",), inner, (config.hidden_size,))]


def _fused_site(name: str, module: str, sizes: Mapping[str, int], inputs: int, *, is_one: bool) -> Site:
    """One product of several layers, or of one where the family stores them so: PEFT then has one lora for it."""
    if is_one:
        return Site(name, (f"{module}.{name.rsplit('.', 1)[-1]}_proj",), inputs, (sum(sizes.values()),))
    return Site(name, tuple(f"{module}.{part}_proj" for part in sizes), inputs, tuple(sizes.values()))
